"""From a tensor's name to its place: which module of the base it changes, and what it is there.

    base_model.model. model.layers.7.self_attn.q_proj .lora_A .default .weight
    roots             where                            part    adapter

Pure: what a place may hold, and whether its shape fits, is decided in `targets` and `tables`.
"""

from typing import Final, Literal, NamedTuple

from loralane_server.adapters.formats.base_shape import EMBED, HEAD, BaseShape, block_of
from loralane_server.device.seam import ENDS

#: What a tensor is to its module: the halves of LoRA; B's own bias (`lora_bias`); the bias of the
#: base replaced; DoRA's magnitudes; the whole table replaced; some of its rows (`tokens`); the
#: weight of the base itself, which PEFT saves beside LoRA on a table.
Part = Literal["A", "B", "lora_bias", "bias", "magnitude", "table", "tokens", "base"]

#: Names that wrappers insert anywhere; they say nothing about the module.
_WRAPPERS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
#: What may stand before `layers` and the tables: wrappers of the whole model, in any number.
_ROOTS: Final = frozenset({"base_model", "model", "language_model"})

_PARTS: Final[dict[tuple[str, ...], Part]] = {
    ("lora_A", "weight"): "A",
    ("lora_B", "weight"): "B",
    ("lora_B", "bias"): "lora_bias",
    ("lora_magnitude_vector",): "magnitude",
    ("lora_magnitude_vector", "weight"): "magnitude",
    ("bias",): "bias",
    ("base_layer", "bias"): "bias",
}
_TABLE_PARTS: Final[dict[tuple[str, ...], Part]] = {
    ("weight",): "table",
    ("modules_to_save", "weight"): "table",
    ("token_adapter", "trainable_tokens_delta"): "tokens",
    ("base_layer", "weight"): "base",
    ("token_adapter", "base_layer", "weight"): "base",
}
_EMBED_PARTS: Final[dict[tuple[str, ...], Part]] = _TABLE_PARTS | {
    ("lora_embedding_A",): "A",
    ("lora_embedding_B",): "B",
    ("lora_magnitude_vector",): "magnitude",
    ("lora_magnitude_vector", "weight"): "magnitude",
}
_HEAD_PARTS: Final[dict[tuple[str, ...], Part]] = _TABLE_PARTS | _PARTS


class Place(NamedTuple):
    """Where a tensor belongs."""

    #: `ENDS` for `embed_tokens` and `lm_head`.
    layer: int
    #: As the name has it: a fused module is not yet taken apart.
    module: str
    part: Part
    #: What the adapter was called in the process that saved it; "" where the name does not say.
    adapter: str = ""


def place_of(name: str, base: BaseShape) -> Place | None:
    """Return the place that a tensor's name stands for; None where this base has no such place."""
    segments = name.split(".")
    if not _WRAPPERS.isdisjoint(segments):
        segments = [segment for segment in segments if segment not in _WRAPPERS]
    start = 0
    while start < len(segments) and segments[start] in _ROOTS:
        start += 1
    where = segments[start:]
    if where[:1] in ([EMBED], [HEAD]):
        return _end(where, base)
    if len(where) < 5 or where[0] != "layers":
        return None
    _, number, block, module, *rest = where
    if base.shape(module) is None or block != block_of(module) or module in (EMBED, HEAD):
        return None
    part, adapter = _part(tuple(rest), _PARTS)
    if part is None or not _is_layer(number, base):
        return None
    return Place(int(number), module, part, adapter)


def _end(where: list[str], base: BaseShape) -> Place | None:
    module, *rest = where
    part, adapter = _part(tuple(rest), _EMBED_PARTS if module == EMBED else _HEAD_PARTS)
    if part is None or base.shape(module) is None:
        return None
    return Place(ENDS, module, part, adapter)


def _part(rest: tuple[str, ...], parts: dict[tuple[str, ...], Part]) -> tuple[Part | None, str]:
    """What the end of a name says; the adapter's name may stand behind PEFT's own words."""
    if rest in parts:
        return parts[rest], ""
    own = 2 if rest[:1] == ("token_adapter",) else 1
    if len(rest) <= own or not rest[0].startswith(("lora_", "modules_to_save", "token_adapter")):
        return None, ""
    return parts.get(rest[:own] + rest[own + 1 :]), rest[own]


def _is_layer(number: str, base: BaseShape) -> bool:
    """Whether it is written as PEFT writes it, and in the base."""
    plain = number.isascii() and number.isdigit() and len(number) < 9
    return plain and str(int(number)) == number and int(number) < base.layers
