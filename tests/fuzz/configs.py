"""Mutated `adapter_config.json`s beside whole weights. A seed gives a case, always the same one."""

import json
from collections.abc import Callable
from random import Random
from typing import Any, Final

from peft import LoraConfig

from tests.fuzz.json_text import TEXTS, Pairs, Raw, deep, mutate_bytes, odd_value, pairs_of, write
from tests.fuzz.reading import Case
from tests.server.adapters.samples import CONFIG, header_bytes, lora, safetensors

#: Every field that PEFT writes, and some that others do.
_FIELDS: Final = (
    *sorted(LoraConfig().to_dict()), "fine_tune_type", "lora_parameters", "num_layers",
    "unsloth_fixed", "r ", "R", "lora_alfa", "", "\ud800", "x" * 5000,
)  # fmt: skip
_LAYERS: Final = range(32)
_MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: What hangs, blows up or confuses engines that backtrack, and what PEFT's users really write.
_PATTERNS: Final = (
    "(a+)+$", "(a|a)*b", "(a|aa)+$", "((a*)*)*", "(.*)*x", "(.*.*.*.*)*q", ".*.*.*.*.*.*.*q_proj",
    "([a-z_.0-9]+)*layers", "(x{0,500}){0,500}", "(?=a)", "(?!a)", "(?<=a)b", "(?P<n>a)(?P=n)",
    "(a)\\1", "(?i)Q_PROJ", "[", "[]", "[^]", "(", ")", "*", "+?", "a**", "a{2}{3}", "{", "a{,}",
    "a{99999}", "a{5,1}", "\\", "\\d+", "\\p{L}", "\\x41", "\\N{BULLET}", "\\Z", "\\b", "(?#c)a",
    "q_proj", "layers.1.self_attn.q_proj", "model.layers.(0|1).*q_proj", ".*", "^model", "$", "^",
    "[a-z]{1,64}" * 6, ".{0,9999}" * 20, "(?:a?){64}a{64}", "a?" * 60 + "a" * 60, "(" * 200,
    "|" * 250, "(|" * 80 + ")" * 80, "[[:alpha:]]", "[a&&b]", "[\\w--a]", "q_proj\n", "\x00",
    "\ud800", "é+", "",
)  # fmt: skip


def config_case(seed: int) -> Case:
    """Return the case of a seed."""
    draw = Random(f"config {seed}")
    config: Pairs = pairs_of(CONFIG | _extras(draw))
    for _ in range(draw.choice((1, 1, 1, 2, 3, 5))):
        draw.choice(_MUTATIONS)(draw, config)
    text = _encoded(draw, write(config))
    if draw.random() < 0.15:
        text = mutate_bytes(draw, text)
    head, size = draw.choice(_WEIGHTS)
    return Case(text, head, size)


def _weights(layers: range, modules: tuple[str, ...]) -> tuple[bytes, int]:
    file = safetensors(lora(modules, layers))
    return file[: header_bytes(file)], len(file)


#: The head and the size of a small adapter's file, and of one that changes everything.
_WEIGHTS: Final = (_weights(range(2), ("q_proj", "v_proj")), _weights(_LAYERS, _MODULES))


def _extras(draw: Random) -> dict[str, Any]:
    """Sometimes all that PEFT would write, else nothing."""
    whole = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return json.loads(json.dumps(whole.to_dict(), default=list)) if draw.random() < 0.3 else {}


def _encoded(draw: Random, text: str) -> bytes:
    if draw.random() < 0.97:
        return text.encode("utf-8", "surrogatepass")
    return text.encode(draw.choice(("utf-16", "utf-32", "utf-8-sig", "latin-1")), "replace")


def _set(config: Pairs, name: str, value: Any) -> None:
    """Put a value under a name, in its place if it has one."""
    for index, (known, _) in enumerate(config):
        if known == name:
            config[index] = name, value
            return
    config.append((name, value))


def _change_field(draw: Random, config: Pairs) -> None:
    _set(config, draw.choice(_FIELDS), odd_value(draw))


def _change_known(draw: Random, config: Pairs) -> None:
    name, _ = draw.choice(config) if config else ("r", 0)
    _set(config, name, odd_value(draw))


def _repeat(draw: Random, config: Pairs) -> None:
    if config:
        name, value = draw.choice(config)
        config.append((name, value if draw.random() < 0.5 else odd_value(draw)))


def _drop(draw: Random, config: Pairs) -> None:
    if config:
        del config[draw.randrange(len(config))]


def _patterns(draw: Random, config: Pairs) -> None:
    """A table of patterns: hostile ones, many, long ones, or every module by name."""
    choice = draw.randrange(6)
    if choice == 0:
        keys = [f"model.layers.{n}.self_attn.{m}" for n in _LAYERS for m in _MODULES]
    elif choice == 1:
        keys = [f"{draw.choice(_PATTERNS)}{n}" for n in range(draw.choice((10, 600, 4097)))]
    elif choice == 2:
        keys = [
            "".join(
                draw.choice("ab.*+?|()[]{}^$\\\\19,-_") for _ in range(draw.choice((5, 40, 255)))
            )
        ]
    else:
        keys = [draw.choice(_PATTERNS) for _ in range(draw.choice((1, 1, 2, 8)))]
    value: Callable[[], Any] = (lambda: 4) if draw.random() < 0.7 else (lambda: odd_value(draw))
    table: Any = Pairs((key, value()) for key in keys)
    _set(config, draw.choice(("rank_pattern", "alpha_pattern")), table)


def _targets(draw: Random, config: Pairs) -> None:
    value = draw.choice(
        (
            draw.choice(_PATTERNS),
            [draw.choice((*_MODULES, *TEXTS)) for _ in range(draw.choice((0, 1, 7, 5000)))],
            odd_value(draw),
        )
    )
    _set(config, draw.choice(("target_modules", "exclude_modules", "modules_to_save")), value)


def _layers(draw: Random, config: Pairs) -> None:
    value = draw.choice(
        (list(range(draw.choice((0, 2, 33, 20_000)))), [-1], [2**70], ["0"], odd_value(draw))
    )
    _set(config, "layers_to_transform", value)
    if draw.random() < 0.5:
        _set(
            config,
            "layers_pattern",
            draw.choice((odd_value(draw), draw.choice(_PATTERNS), "layers")),
        )


def _switch(draw: Random, config: Pairs) -> None:
    """Ask for what has a meaning, also in pairs that exclude each other."""
    name, value = draw.choice(
        (
            ("use_rslora", True), ("use_dora", True), ("lora_bias", True), ("fan_in_fan_out", True),
            ("bias", "all"), ("bias", "lora_only"), ("init_lora_weights", "pissa"),
            ("init_lora_weights", "gaussian"), ("trainable_token_indices", [1, 2]),
            ("trainable_token_indices", Pairs([("embed_tokens", [1])])), ("task_type", "SEQ_CLS"),
            ("peft_type", "IA3"), ("peft_type", "lora"), ("r", 0), ("r", -1), ("lora_alpha", 0),
            ("layer_replication", [[0, 4], [2, 5]]), ("target_parameters", ["x"]),
            ("ensure_weight_tying", True), ("megatron_config", Pairs()),
        )
    )  # fmt: skip
    _set(config, name, value)


def _nest(draw: Random, config: Pairs) -> None:
    _set(config, draw.choice(_FIELDS), deep(draw))


def _bulk(draw: Random, config: Pairs) -> None:
    """As long as a config may be, or longer."""
    length = draw.choice((60_000, 500_000, 2**20 - 2000, 2**20 + 10))
    forms = (
        "x" * length,
        Raw("[" + "0, " * (length // 3) + "0]"),
        Raw("[" + "{}," * (length // 3) + "0]"),
    )
    value = draw.choice(forms)
    _set(config, draw.choice(_FIELDS), value)


_MUTATIONS: Final[tuple[Callable[[Random, Pairs], None], ...]] = (
    *[_change_field, _change_known, _patterns, _patterns, _targets, _layers, _switch] * 4,
    *[_repeat, _drop, _nest] * 4,
    _bulk,
)  # fmt: skip
