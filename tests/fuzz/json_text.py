"""JSON as an attacker writes it: repeated names, half characters, numbers that no parser keeps.

`Pairs` is an object whose names may repeat, `Raw` is text that is written as it stands.
"""

import json
from dataclasses import dataclass
from random import Random
from typing import Any, Final


@dataclass(frozen=True)
class Raw:
    """Text in place of a value, valid JSON or not."""

    text: str


class Pairs(list[tuple[str, Any]]):
    """An object, name by name."""


def pairs_of(value: Any) -> Any:
    """Return a JSON value with its objects as `Pairs`."""
    if isinstance(value, dict):
        return Pairs((name, pairs_of(item)) for name, item in value.items())
    return [pairs_of(item) for item in value] if isinstance(value, list) else value


def write(value: Any, space: str = " ") -> str:
    """Return the text of a value; a lone surrogate is escaped, as JSON allows."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Pairs):
        items = (f"{json.dumps(name)}:{space}{write(item, space)}" for name, item in value)
        return "{" + f",{space}".join(items) + "}"
    if isinstance(value, dict):
        return write(pairs_of(value), space)
    if isinstance(value, list | tuple):
        return "[" + f",{space}".join(write(item, space) for item in value) + "]"
    return str(value) if type(value) is int else json.dumps(value)


#: Numbers at the edges of what anybody's integers and floats hold, and things that are no numbers.
NUMBERS: Final = (
    0, 1, -1, 2, 7, 8, 63, 64, 255, 256, 4096, 65536, 65537, 2**31 - 1, 2**31, 2**32, 2**53, 2**62,
    2**63 - 1, 2**63, 2**64, 2**64 - 1, -(2**63), 10**40, 0.5, 1.5, -0.0, 1e-320, 1e308, 4.0,
    Raw("1e400"), Raw("-1e400"), Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("01"),
    Raw("1e3"), Raw("8.0"), Raw("-0"), Raw("0x10"), Raw("1_000"), Raw("+1"), Raw(".5"), Raw("5."),
    Raw("9" * 4000), Raw("9" * 5000), Raw("1" + "0" * 400 + ".0"), Raw("٣"),
)  # fmt: skip
TEXTS: Final = (
    "", " ", "a", "\x00", "\ud800", "\udfff\ud800", "\u202e", "é" * 300, "q_proj", "..", "../..",
    "/etc/passwd", "%s%n", "{}", "\\", '"', "\r\n", "x" * 10_000, "F32", "LORA", "true", "none",
    "all", "all-linear", "__metadata__", "__class__", "١", "𝕏",
)  # fmt: skip


def odd_value(draw: Random) -> Any:
    """Return a value of any kind: edges, wrong types, depth, bulk."""
    choice = draw.randrange(9)
    if choice < 3:
        return draw.choice(NUMBERS)
    if choice < 5:
        return draw.choice(TEXTS)
    if choice == 5:
        return draw.choice((None, True, False, [], Pairs()))
    if choice == 6:
        return [draw.choice(NUMBERS) for _ in range(draw.choice((1, 2, 3, 9, 100)))]
    if choice == 7:
        return Pairs((draw.choice(TEXTS), draw.choice(NUMBERS)) for _ in range(draw.randrange(4)))
    return deep(draw)


def deep(draw: Random) -> Raw:
    """Return a value nested from a little to far too deep, closed or not."""
    depth = draw.choice((2, 50, 500, 900, 1100, 5000, 100_000))
    opening, closing = draw.choice((("[", "]"), ('{"a":', "}")))
    closed = draw.random() < 0.7
    return Raw(opening * depth + "1" + closing * depth * closed)


def mutate_bytes(draw: Random, text: bytes) -> bytes:
    """Return the bytes with a few of them flipped, lost, doubled or replaced."""
    content = bytearray(text)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(len(content) + 1)
        choice = draw.randrange(5)
        if choice == 0 and at < len(content):
            content[at] ^= 1 << draw.randrange(8)
        elif choice == 1:
            del content[at : at + draw.choice((1, 2, 8, 100))]
        elif choice == 2:
            content[at:at] = content[at : at + draw.choice((1, 8, 100))]
        elif choice == 3:
            content[at : at + 1] = draw.choice(
                (
                    b"\xff",
                    b"\x00",
                    b"\xed\xa0\x80",
                    b"\\ud800",
                    b"{",
                    b"}",
                    b"[",
                    b"]",
                    b'"',
                    b"\xc0\x80",
                )
            )
        else:
            content[at:at] = str(draw.choice(NUMBERS[:30])).encode()
    return bytes(content)
