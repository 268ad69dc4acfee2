"""Mutated safetensors headers. A seed gives a case, always the same one."""

import struct
from collections.abc import Callable
from random import Random
from typing import Any, Final

from tests.fuzz.json_text import NUMBERS, TEXTS, Pairs, deep, mutate_bytes, odd_value, write
from tests.fuzz.reading import Case

_RANK: Final = 4
_IN_OUT: Final = {"q_proj": (64, 64), "v_proj": (64, 32), "down_proj": (128, 64)}
_CONFIG: Final = (
    b'{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none", '
    b'"target_modules": ["q_proj", "v_proj", "down_proj"], "inference_mode": true}'
)
_DTYPES: Final = (
    "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "I8", "U8",
    "I64", "BOOL", "C64", "f32", "F32 ", "float32", "F128", "", "\ud800", "F" * 9000,
)  # fmt: skip
#: One header in so many is as long as headers may be, or longer: those are slow to make.
_BULK_EVERY: Final = 400


def header_case(seed: int) -> Case:
    """Return the case of a seed."""
    draw = Random(f"header {seed}")
    bulk = seed % _BULK_EVERY == 0
    header = _many(draw) if bulk else _plain(draw)
    size = _body(header)
    for _ in range(0 if bulk and draw.random() < 0.5 else draw.choice((1, 1, 1, 2, 3))):
        draw.choice(_MUTATIONS)(draw, header)
    text = write(header, "" if bulk else " ").encode("utf-8", "surrogatepass")
    if draw.random() < 0.2:
        text = mutate_bytes(draw, text)
    head = _length(draw, len(text)) + text
    if draw.random() < 0.05:
        head = head[: draw.randrange(len(head) + 1)]
    return Case(
        _CONFIG,
        head,
        _size(draw, len(head) + size),
        base=draw.choice(("shallow", "deep")),
        on_disk=seed % 16 == 1,
    )


def _plain(draw: Random) -> Pairs:
    """A well-formed header of a few targets, its tensors in any order."""
    places = [(layer, module) for layer in (0, 1) for module in _IN_OUT]
    kept = draw.sample(places, draw.randrange(1, len(places) + 1))
    tensors = [tensor for layer, module in kept for tensor in _pair(layer, module)]
    draw.shuffle(tensors)
    return _laid_out(tensors, draw)


def _pair(
    layer: int, module: str, root: str = "base_model.model.model."
) -> list[tuple[str, list[int]]]:
    block = "mlp" if module == "down_proj" else "self_attn"
    name = f"{root}layers.{layer}.{block}.{module}"
    inside, outside = _IN_OUT[module]
    return [
        (f"{name}.lora_A.weight", [_RANK, inside]),
        (f"{name}.lora_B.weight", [outside, _RANK]),
    ]


def _many(draw: Random) -> Pairs:
    """Thousands of tensors: at the limits of number and length, on either side of them."""
    count = draw.choice((4000, 8190, 8192, 8193, 9000))
    prefix = draw.choice(("x.", "base_model.model.model.layers.", "a." * 40, "é" * 20))
    ending = draw.choice(("", ".self_attn.q_proj.lora_A.weight", ".lora_embedding_A"))
    if draw.random() < 0.5:  # every tensor a target of its own, as far as layers go
        places = [(layer, module) for layer in range(count // 6) for module in _IN_OUT]
        return _laid_out([t for place in places for t in _pair(*place, root="")], draw)
    return _laid_out([(f"{prefix}{i}{ending}", [0]) for i in range(count)], draw)


def _laid_out(tensors: list[tuple[str, list[int]]], draw: Random) -> Pairs:
    header, at = Pairs(), 0
    if draw.random() < 0.3:
        header.append(("__metadata__", Pairs([("format", "pt")])))
    for name, shape in tensors:
        size = 4
        for extent in shape:
            size *= extent
        header.append(
            (name, Pairs([("dtype", "F32"), ("shape", shape), ("data_offsets", [at, at + size])]))
        )
        at += size
    return header


def _body(header: Pairs) -> int:
    return max((entry[2][1][1] for name, entry in header if name != "__metadata__"), default=0)


def _length(draw: Random, true: int) -> bytes:
    if draw.random() < 0.93:
        return struct.pack("<Q", true)
    wrong = (true - 1, true + 1, true + 8, 0, 1, 2**20, 2**20 + 1, 2**31, 2**63, 2**64 - 1)
    return struct.pack("<Q", max(draw.choice(wrong), 0))


def _size(draw: Random, true: int) -> int:
    if draw.random() < 0.9:
        return true
    return max(true + draw.choice((-1, 1, -8, 8, -true, -true + 7, -true + 8, 4096, 2**40)), 0)


def _entry(draw: Random, header: Pairs) -> tuple[int, str, Pairs] | None:
    """A tensor of the header: where it stands, its name and what is said of it."""
    found = [
        (index, name, entry)
        for index, (name, entry) in enumerate(header)
        if isinstance(entry, Pairs) and entry and name != "__metadata__"
    ]
    return draw.choice(found) if found else None


def _field(draw: Random, header: Pairs, field: str, change: Callable[[Any], Any]) -> None:
    chosen = _entry(draw, header)
    if chosen is None:
        return
    index, name, entry = chosen
    changed = Pairs((key, change(value) if key == field else value) for key, value in entry)
    header[index] = name, changed


def _change_offsets(draw: Random, header: Pairs) -> None:
    def change(offsets: Any) -> Any:
        if not isinstance(offsets, list) or len(offsets) != 2 or draw.random() < 0.3:
            return odd_value(draw)
        moved, which = list(offsets), draw.randrange(2)
        if draw.random() < 0.5 and isinstance(moved[which], int):
            moved[which] += draw.choice((-1, 1, -4, 4, -8, 8, 2**20, 2**31, 2**62, 2**64))
        else:
            moved[which] = draw.choice(NUMBERS)
        return moved[::-1] if draw.random() < 0.1 else moved

    _field(draw, header, "data_offsets", change)


def _change_dtype(draw: Random, header: Pairs) -> None:
    _field(
        draw,
        header,
        "dtype",
        lambda _: draw.choice(_DTYPES) if draw.random() < 0.8 else odd_value(draw),
    )


def _change_shape(draw: Random, header: Pairs) -> None:
    def change(shape: Any) -> Any:
        choice = draw.randrange(5)
        if choice == 0:
            return [2**31, 2**31, draw.choice((0, 1, 2**31))]
        if choice == 1:
            return [1] * draw.choice((0, 3, 8, 9, 10_000))
        if choice == 2 and isinstance(shape, list):
            return shape[::-1]
        if choice == 3 and isinstance(shape, list) and shape:
            changed = list(shape)
            changed[draw.randrange(len(changed))] = draw.choice(NUMBERS)
            return changed
        return odd_value(draw)

    _field(draw, header, "shape", change)


def _rename(draw: Random, header: Pairs) -> None:
    chosen = _entry(draw, header)
    if chosen is None:
        return
    index, name, entry = chosen
    numbers = ("99", "-1", "01", "1.0", "٣", "9" * 5000, "", "1e0", " 1")
    changed = draw.choice(
        (
            draw.choice(TEXTS),
            name.replace("layers.0", f"layers.{draw.choice(numbers)}"),
            name.replace("lora_A", "lora_B"),
            name.replace("lora_", draw.choice(("lora.", "lora_embedding_", "lora_magnitude_"))),
            name.replace("q_proj", draw.choice(("Q_PROJ", "q_proj.q_proj", "qkv_proj", "lm_head"))),
            name.replace(".weight", draw.choice((".default.weight", ".bias", "", ".weight" * 50))),
            name.replace("base_model", draw.choice(("model.model", "_orig_mod", "language_model"))),
            name + "\x00",
            "." * draw.choice((1, 100, 20_000)),
            f"{draw.choice(('_orig_mod.', 'model.', 'x'))}" * draw.choice((10, 1000, 20_000))
            + name,
            "x" * draw.choice((300, 70_000)),
        )
    )
    header[index] = changed, entry


def _repeat(draw: Random, header: Pairs) -> None:
    if header:
        header.insert(draw.randrange(len(header) + 1), draw.choice(header))


def _drop(draw: Random, header: Pairs) -> None:
    if header:
        del header[draw.randrange(len(header))]


def _change_entry(draw: Random, header: Pairs) -> None:
    chosen = _entry(draw, header)
    if chosen is None:
        return
    index, name, entry = chosen
    changed: Any = Pairs(entry)
    choice = draw.randrange(4)
    if choice == 0:
        changed.append(
            (draw.choice(("extra", "dtype", "shape", "data_offsets", "")), odd_value(draw))
        )
    elif choice == 1:
        del changed[draw.randrange(len(changed))]
    elif choice == 2:
        draw.shuffle(changed)
    else:
        changed = odd_value(draw)
    header[index] = name, changed


def _swap(draw: Random, header: Pairs) -> None:
    """Exchange what is said of two tensors."""
    if len(header) > 1:
        one, other = draw.sample(range(len(header)), 2)
        header[one], header[other] = (
            (header[one][0], header[other][1]),
            (header[other][0], header[one][1]),
        )


def _metadata(draw: Random, header: Pairs) -> None:
    bulk = Pairs((str(i), "x" * 10) for i in range(draw.choice((0, 10, 3000))))
    value = draw.choice((odd_value(draw), bulk, Pairs([("format", odd_value(draw))])))
    header.insert(draw.randrange(len(header) + 1), ("__metadata__", value))


def _nest(draw: Random, header: Pairs) -> None:
    header.append((draw.choice(TEXTS), deep(draw)))


_MUTATIONS: Final[tuple[Callable[[Random, Pairs], None], ...]] = (
    _change_offsets, _change_offsets, _change_dtype, _change_shape, _change_shape, _rename,
    _rename, _repeat, _drop, _change_entry, _swap, _metadata, _nest,
)  # fmt: skip
