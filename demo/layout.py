"""Text for a terminal: answers beside their models, and tables. Pure functions."""

import textwrap
from collections.abc import Sequence
from typing import Final

WIDTH: Final = 100
_GAP: Final = "  "


class Paint:
    """Terminal colours; plain text where there are none."""

    def __init__(self, *, colours: bool) -> None:
        self._colours = colours

    def bold(self, text: str) -> str:
        """Return `text` for a heading."""
        return self._wrapped(text, "1")

    def name(self, text: str) -> str:
        """Return `text` for a model's name."""
        return self._wrapped(text, "36")

    def dim(self, text: str) -> str:
        """Return `text` for what matters less."""
        return self._wrapped(text, "2")

    def _wrapped(self, text: str, code: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self._colours else text


def answers(said: Sequence[tuple[str, str]], paint: Paint) -> str:
    """Return (name, text) pairs, one below the other, the texts aligned and wrapped."""
    column = max(len(name) for name, _ in said)
    lines = []
    for name, text in said:
        wrapped = textwrap.wrap(printable(text), WIDTH - column - 2 * len(_GAP)) or ["(nothing)"]
        lines.append(f"{_GAP}{paint.name(name.ljust(column))}{_GAP}{wrapped[0]}")
        lines += [f"{_GAP}{' ' * column}{_GAP}{more}" for more in wrapped[1:]]
    return "\n".join(lines)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], paint: Paint) -> str:
    """Return aligned columns: the first to the left, numbers and the rest to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [_line(row, widths) for row in (header, *rows)]
    return "\n".join([paint.dim(lines[0]), *lines[1:]])


def printable(text: str) -> str:
    """Return `text` as one line in which nothing steers the terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.rjust(width) if column else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return _GAP + _GAP.join([first, *others])
