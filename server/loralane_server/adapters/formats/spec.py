"""What an adapter says about itself: `adapter_config.json`, every field exact or refused by name.

Frozen, hashable and tensor-free. A padded rank or a device form is a new object, never a change of
this one.

A field is implemented (it is in `AdapterSpec`), without effect on inference (`WITHOUT_EFFECT`; the
tensors decide which targets there are, so no `target_modules` expression is ever run), or refused
unless it is null, false or empty. Unknown fields fall under the last rule.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, cast

from loralane_server.adapters.formats import fields
from loralane_server.adapters.formats.base_shape import EMBED, HEAD, module_name
from loralane_server.adapters.formats.fields import CONFIG_FILE, show
from loralane_server.adapters.formats.patterns import Pattern, PatternError, compile_key
from loralane_server.device.seam import ENDS
from loralane_server.errors import AdapterIncompatible

#: The largest rank that is served; checked where the tensors are known (`targets`).
MAX_RANK: Final = 256

#: Bounds of one pattern table: what keeps matching every module against it in the milliseconds.
MAX_PATTERN_KEYS: Final = 4096
MAX_PATTERN_CHARS: Final = 1 << 16
MAX_QUANTIFIERS: Final = 1024

_T = TypeVar("_T")
Bias = Literal["none", "all", "lora_only"]

#: History, hints and training-time settings. `fan_in_fan_out`: the linears of every base that is
#: served are [out, in], where PEFT warns and takes it for false. `megatron_config`: how the linears
#: were spread while training.
WITHOUT_EFFECT: Final = frozenset(
    "auto_mapping base_model_name_or_path corda_config eva_config exclude_modules fan_in_fan_out "
    "inference_mode layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config "
    "megatron_config megatron_core peft_version qalora_group_size revision runtime_config "
    "target_modules".split()
)
IMPLEMENTED: Final = frozenset(
    "alpha_pattern bias ensure_weight_tying init_lora_weights lora_alpha lora_bias modules_to_save "
    "peft_type r rank_pattern task_type trainable_token_indices use_dora use_rslora".split()
)
#: Ways to start training that leave the base as it was, so A and B are relative to it. The others
#: (pissa, olora, corda, loftq, lora_ga) change the base's weights; PEFT writes true when it
#: converts such an adapter back.
_INITS_ON_THE_BASE: Final = frozenset({"gaussian", "eva", "orthogonal", "mica"})
#: PEFT turns these on by being there at all, even empty.
_SET_WHEN_EMPTY: Final = frozenset(
    "alora_invocation_tokens arrow_config kasa_config monteclora_config use_bdlora "
    "velora_config".split()
)
#: What serving the adapter without the field would lose, where that is worth saying.
_WHY_REFUSED: Final = {
    "target_parameters": "is not implemented: it changes parameters that are no linear",
}


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Ranks and scales, for each module its own, and what else the adapter changes."""

    rank: int = 8
    alpha: float = 8.0
    use_rslora: bool = False
    #: (key, rank) in file order: the first key that matches wins.
    rank_pattern: tuple[tuple[str, int], ...] = ()
    #: (key, alpha) in file order.
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    #: Whether B has a bias: y = W x + scale * (B A x + bias of B).
    lora_bias: bool = False
    #: Whose biases of the base are replaced.
    bias: Bias = "none"
    #: W' = magnitude / row norms of (W + scale * B A) * (W + scale * B A).
    use_dora: bool = False
    #: Which of the tables `embed_tokens` and `lm_head` are replaced whole.
    tables: frozenset[str] = frozenset()
    #: (table, ids of the rows that are replaced).
    tokens: tuple[tuple[str, tuple[int, ...]], ...] = ()
    #: Embedding and head of a tied base change together.
    tied: bool = False
    _rank_keys: tuple[Pattern, ...] = field(init=False, repr=False, compare=False)
    _alpha_keys: tuple[Pattern, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rank_keys", _compiled("rank_pattern", self.rank_pattern))
        object.__setattr__(self, "_alpha_keys", _compiled("alpha_pattern", self.alpha_pattern))

    def rank_of(self, module_name: str) -> int:
        """The rank that the tensors of this module must have."""
        return _first_match(self._rank_keys, self.rank_pattern, module_name, self.rank)

    def scale_of(self, module_name: str, rank: int) -> float:
        """What B is multiplied by: alpha / rank, with rsLoRA alpha / sqrt(rank)."""
        alpha = _first_match(self._alpha_keys, self.alpha_pattern, module_name, self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def parse_spec(raw: bytes) -> AdapterSpec:
    """Read an `adapter_config.json`.

    Raises:
        AdapterCorrupt: not a JSON object, or a field is of the wrong type.
        AdapterIncompatible: a field asks for something that is not implemented; it is named.
    """
    config = fields.read_object(raw)
    _check_kind(config)
    _check_unknown(config)
    spec = AdapterSpec(
        rank=fields.rank("r", config.get("r", 8)),
        alpha=fields.alpha("lora_alpha", config.get("lora_alpha", 8)),
        use_rslora=fields.boolean("use_rslora", config.get("use_rslora")),
        rank_pattern=fields.table("rank_pattern", config.get("rank_pattern"), fields.rank),
        alpha_pattern=fields.table("alpha_pattern", config.get("alpha_pattern"), fields.alpha),
        lora_bias=fields.boolean("lora_bias", config.get("lora_bias")),
        bias=_bias(config),
        use_dora=fields.boolean("use_dora", config.get("use_dora")),
        tables=_tables(config),
        tokens=_tokens(config),
        tied=fields.boolean("ensure_weight_tying", config.get("ensure_weight_tying")),
    )
    if spec.use_dora and spec.lora_bias:
        raise AdapterIncompatible(f"{CONFIG_FILE}: use_dora and lora_bias exclude each other")
    return spec


def _check_kind(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterIncompatible(f"{CONFIG_FILE}: peft_type is {show(kind)}, must be 'LORA'")
    task = config.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise AdapterIncompatible(f"{CONFIG_FILE}: task_type {show(task)} is not implemented")
    init = config.get("init_lora_weights", True)
    if isinstance(init, bool) or init is None:
        return
    if not isinstance(init, str) or init.lower() not in _INITS_ON_THE_BASE:
        raise AdapterIncompatible(
            f"{CONFIG_FILE}: init_lora_weights {show(init)} trains against a changed base; "
            "save with path_initial_model_for_weight_conversion to get a plain LoRA adapter"
        )


def _check_unknown(config: Mapping[str, Any]) -> None:
    for name, value in config.items():
        if name in IMPLEMENTED or name in WITHOUT_EFFECT:
            continue
        empty_counts = name in _SET_WHEN_EMPTY and value in ([], {})
        if empty_counts or not fields.is_nothing(value):
            why = _WHY_REFUSED.get(name, "is not implemented")
            raise AdapterIncompatible(f"{CONFIG_FILE}: {show(name)} {why}")


def _bias(config: Mapping[str, Any]) -> Bias:
    bias = config.get("bias") or "none"
    if bias not in ("none", "all", "lora_only"):
        raise AdapterIncompatible(f"{CONFIG_FILE}: bias {show(bias)} is not implemented")
    return cast(Bias, bias)


def _tables(config: Mapping[str, Any]) -> frozenset[str]:
    listed = fields.names("modules_to_save", config.get("modules_to_save"))
    return frozenset(_table_named("modules_to_save", name) for name in listed)


def _tokens(config: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    field_name = "trainable_token_indices"
    value = config.get(field_name)
    if fields.is_nothing(value):
        return ()
    listed = value if isinstance(value, dict) else {EMBED: value}
    named = [(_table_named(field_name, name), name) for name in listed]
    if len({table for table, _ in named}) != len(named):
        raise AdapterIncompatible(f"{CONFIG_FILE}: {field_name} names a table twice")
    return tuple(
        (table, fields.token_ids(f"{field_name} of {show(name)}", listed[name]))
        for table, name in named
    )


def _table_named(field_name: str, name: str) -> str:
    """Which table a name means: the last part of its full name, or all of it."""
    found = [table for table in (EMBED, HEAD) if name in (table, module_name(ENDS, table))]
    if not found:
        raise AdapterIncompatible(
            f"{CONFIG_FILE}: {field_name} names {show(name)}; only {EMBED} and {HEAD} can be "
            "replaced"
        )
    return found[0]


def _compiled(name: str, table: tuple[tuple[str, _T], ...]) -> tuple[Pattern, ...]:
    keys = [key for key, _ in table]
    if len(keys) > MAX_PATTERN_KEYS or sum(map(len, keys)) > MAX_PATTERN_CHARS:
        raise AdapterIncompatible(f"{CONFIG_FILE}: {name} has more keys than are matched safely")
    compiled: list[Pattern] = []
    for key in keys:
        try:
            compiled.append(compile_key(key))
        except PatternError as exc:
            raise AdapterIncompatible(f"{CONFIG_FILE}: {name} key {show(key)}: {exc}") from exc
    if sum(pattern.quantifiers for pattern in compiled) > MAX_QUANTIFIERS:
        raise AdapterIncompatible(
            f"{CONFIG_FILE}: {name} has more than {MAX_QUANTIFIERS} quantifiers"
        )
    return tuple(compiled)


def _first_match(
    keys: tuple[Pattern, ...], table: tuple[tuple[str, _T], ...], module_name: str, default: _T
) -> _T:
    for pattern, (_, value) in zip(keys, table, strict=True):
        if pattern.matches(module_name):
            return value
    return default
