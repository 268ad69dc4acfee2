"""What an adapter says about itself: `adapter_config.json`, every field exact or refused by name.

Frozen, hashable and tensor-free. A padded rank or a device form is a new object, never a change of
this one.

A field is implemented (it is in `AdapterSpec`), without effect on inference (`WITHOUT_EFFECT`; the
tensors decide which targets there are, so no `target_modules` expression is ever run), or refused
unless it is null, false or empty. Unknown fields fall under the last rule.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from loralane_server.adapters.patterns import Pattern, PatternError, compile_key
from loralane_server.errors import AdapterCorrupt, AdapterIncompatible

CONFIG_FILE: Final = "adapter_config.json"
MAX_CONFIG_BYTES: Final = 1 << 20
#: The largest rank that is served; checked where the tensors are known (`index`).
MAX_RANK: Final = 256
#: Above this a config is not believed: no base model is that wide.
_MAX_CONFIG_RANK: Final = 1 << 16

#: Bounds of one pattern table: what keeps matching every module against it in the milliseconds.
MAX_PATTERN_KEYS: Final = 4096
MAX_PATTERN_CHARS: Final = 1 << 16
MAX_QUANTIFIERS: Final = 1024

_T = TypeVar("_T")

#: History, hints and training-time settings.
WITHOUT_EFFECT: Final = frozenset(
    "auto_mapping base_model_name_or_path corda_config eva_config exclude_modules inference_mode "
    "layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config megatron_core "
    "peft_version qalora_group_size revision runtime_config target_modules".split()
)
_IMPLEMENTED: Final = frozenset(
    "alpha_pattern bias init_lora_weights lora_alpha peft_type r rank_pattern task_type "
    "use_rslora".split()
)
#: Ways to start training that leave the base as it was, so A and B are relative to it. The others
#: (pissa, olora, corda, loftq, lora_ga) change the base's weights; PEFT writes true when it
#: converts such an adapter back.
_INITS_ON_THE_BASE: Final = frozenset({"gaussian", "eva", "orthogonal", "mica"})

#: What serving the adapter without the field would lose, where that is worth saying.
_WHY_REFUSED: Final = {
    "modules_to_save": "is not implemented: it replaces whole modules of the base",
    "target_parameters": "is not implemented: it changes parameters that are no linear",
    "trainable_token_indices": "is not implemented: its trainable_tokens replace embeddings",
    "use_dora": "is not implemented: DoRA needs the base weights' norms",
}

MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ATTENTION: Final = frozenset(MODULES[:4])


def block_of(module: str) -> str:
    """Which half of a layer holds the module: "self_attn" or "mlp"."""
    return "self_attn" if module in _ATTENTION else "mlp"


def module_name(layer: int, module: str) -> str:
    """The target's full name in the base model, as PEFT's patterns see it."""
    return f"model.layers.{layer}.{block_of(module)}.{module}"


@dataclass(frozen=True, slots=True)
class BaseShape:
    """The linears of the base model that adapters can change."""

    layers: int
    #: (name, out features, in features), the same in every layer.
    modules: tuple[tuple[str, int, int], ...]
    #: What the shard computes in and lanes are cast to: "float32" or "bfloat16".
    dtype: str

    def shape(self, module: str) -> tuple[int, int] | None:
        """(out, in) of the module's weight; None where the base has no such module."""
        for name, rows, columns in self.modules:
            if name == module:
                return rows, columns
        return None


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Ranks and scales, for each module its own."""

    rank: int = 8
    alpha: float = 8.0
    use_rslora: bool = False
    #: (key, rank) in file order: the first key that matches wins.
    rank_pattern: tuple[tuple[str, int], ...] = ()
    #: (key, alpha) in file order.
    alpha_pattern: tuple[tuple[str, float], ...] = ()
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
    config = _object(raw)
    _check_kind(config)
    for name, value in config.items():
        if name not in _IMPLEMENTED and name not in WITHOUT_EFFECT and not _is_nothing(value):
            why = _WHY_REFUSED.get(name, "is not implemented")
            raise AdapterIncompatible(f"{CONFIG_FILE}: {_show(name)} {why}")
    return AdapterSpec(
        rank=_rank("r", config.get("r", 8)),
        alpha=_alpha("lora_alpha", config.get("lora_alpha", 8)),
        use_rslora=_boolean("use_rslora", config.get("use_rslora", False)),
        rank_pattern=_table("rank_pattern", config, _rank),
        alpha_pattern=_table("alpha_pattern", config, _alpha),
    )


def _object(raw: bytes) -> dict[str, Any]:
    if len(raw) > MAX_CONFIG_BYTES:
        raise AdapterCorrupt(f"{CONFIG_FILE} is larger than {MAX_CONFIG_BYTES} bytes")
    if raw.startswith(b"\xef\xbb\xbf"):
        raise AdapterCorrupt(f"{CONFIG_FILE} starts with a byte order mark; save it without")
    try:
        config = json.loads(raw.decode("utf-8"))
        broken = [name for name, value in config.items() if not _all_finite(value)]
    except AttributeError as exc:
        raise AdapterCorrupt(f"{CONFIG_FILE} is not a JSON object") from exc
    except (ValueError, RecursionError) as exc:
        raise AdapterCorrupt(f"{CONFIG_FILE} is not valid JSON in UTF-8") from exc
    if broken:
        raise AdapterCorrupt(f"{CONFIG_FILE}: {_show(broken[0])} is not a finite number")
    return dict(config)


def _check_kind(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterIncompatible(f"{CONFIG_FILE}: peft_type is {_show(kind)}, must be 'LORA'")
    task = config.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        raise AdapterIncompatible(f"{CONFIG_FILE}: task_type {_show(task)} is not implemented")
    bias = config.get("bias", "none")
    if bias not in (None, "none"):
        raise AdapterIncompatible(f"{CONFIG_FILE}: bias {_show(bias)} is not implemented")
    init = config.get("init_lora_weights", True)
    if isinstance(init, bool) or init is None:
        return
    if not isinstance(init, str) or init.lower() not in _INITS_ON_THE_BASE:
        raise AdapterIncompatible(
            f"{CONFIG_FILE}: init_lora_weights {_show(init)} trains against a changed base; "
            "save with path_initial_model_for_weight_conversion to get a plain LoRA adapter"
        )


def _is_nothing(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})


def _all_finite(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_all_finite, value.values()))
    return not isinstance(value, list) or all(map(_all_finite, value))


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool) and value is not None:
        raise AdapterCorrupt(f"{CONFIG_FILE}: {name} must be true or false, is {_show(value)}")
    return bool(value)


def _rank(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise AdapterCorrupt(f"{CONFIG_FILE}: {name} must be a whole number, is {_show(value)}")
    if not 1 <= value <= _MAX_CONFIG_RANK:
        raise AdapterIncompatible(
            f"{CONFIG_FILE}: rank {name} must be at least 1, at most {_MAX_CONFIG_RANK}"
        )
    return value


def _alpha(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AdapterCorrupt(f"{CONFIG_FILE}: {name} must be a number, is {_show(value)}")
    if value == 0:
        raise AdapterIncompatible(
            f"{CONFIG_FILE}: {name} is 0, so the adapter changes nothing; name the base instead"
        )
    try:
        return float(value)
    except OverflowError as exc:
        raise AdapterCorrupt(f"{CONFIG_FILE}: {name} is not a finite number") from exc


def _table(
    name: str, config: Mapping[str, Any], read: Callable[[str, object], _T]
) -> tuple[tuple[str, _T], ...]:
    value = config.get(name)
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise AdapterCorrupt(f"{CONFIG_FILE}: {name} must be an object, is {_show(value)}")
    return tuple((key, read(f"{name} {_show(key)}", item)) for key, item in value.items())


def _compiled(name: str, table: tuple[tuple[str, _T], ...]) -> tuple[Pattern, ...]:
    keys = [key for key, _ in table]
    if len(keys) > MAX_PATTERN_KEYS or sum(map(len, keys)) > MAX_PATTERN_CHARS:
        raise AdapterIncompatible(f"{CONFIG_FILE}: {name} has more keys than are matched safely")
    compiled: list[Pattern] = []
    for key in keys:
        try:
            compiled.append(compile_key(key))
        except PatternError as exc:
            raise AdapterIncompatible(f"{CONFIG_FILE}: {name} key {_show(key)}: {exc}") from exc
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


def _show(value: object) -> str:
    """A stranger's value for an error message: short, printable, encodable."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
