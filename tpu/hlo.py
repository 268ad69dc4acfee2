"""Scheduled HLO as text, read into records: what the compiler will execute, in order.

Only what the checks need is kept of an instruction: its name, operation, result shapes with their
memory space and tiling, operands, and its attributes as text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

#: Memory spaces as the TPU compiler numbers them. 1 is VMEM; 2 and 4 hold flags and scalars.
HBM: Final = 0
HOST: Final = 5

_BITS: Final = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "f8e4m3fn": 8, "f8e5m2": 8,
}  # fmt: skip
_SHAPE: Final = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_SPACE: Final = re.compile(r"S\((\d+)\)")
_TILE: Final = re.compile(r"T\(([\d,]+)\)")
_COMPUTATION: Final = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION: Final = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPERATION: Final = re.compile(r"\s*([a-z][\w\-]*)\(")
_NAME: Final = re.compile(r"%([\w.\-]+)")
_CALLED: Final = re.compile(r"\b(?:calls|to_apply|body)=%?([\w.\-]+)")
_TRIPS: Final = re.compile(r'known_trip_count"?:\{"?n"?:"?(\d+)')


@dataclass(frozen=True, slots=True)
class Shape:
    """One array as the compiler lays it out."""

    dtype: str
    dims: tuple[int, ...]
    space: int
    #: The last dimensions are padded to multiples of these; () = as it is.
    tile: tuple[int, ...]
    #: Dimensions from the fastest to the slowest.
    minor_to_major: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, padding included."""
        sizes = [self.dims[i] for i in self.minor_to_major]
        for at, tile in enumerate(reversed(self.tile)):
            if at < len(sizes):
                sizes[at] = -(-sizes[at] // tile) * tile
        return prod(sizes) * _BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation."""

    name: str
    op: str
    #: Of the result; of all its parts, nested ones too, when that is a tuple.
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    #: What stands behind the operands.
    attributes: str
    #: Between the parentheses: a parameter's number, say.
    inside: str

    @property
    def called(self) -> str | None:
        """The computation that it runs: a fusion's, or a loop's body."""
        found = _CALLED.search(self.attributes)
        return found.group(1) if found else None

    @property
    def target(self) -> str | None:
        """What a custom call calls."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found.group(1) if found else None

    @property
    def trips(self) -> int | None:
        """How often a loop's body runs; None = the compiler does not know."""
        found = _TRIPS.search(self.attributes.replace("\\", ""))
        return int(found.group(1)) if found else None


@dataclass(frozen=True, slots=True)
class Computation:
    """Instructions in the order in which they are executed; the last one is the result."""

    name: str
    instructions: Mapping[str, Instruction]
    root: Instruction

    def users(self, name: str) -> Iterator[Instruction]:
        """Yield the instructions that take this one's result."""
        for instruction in self.instructions.values():
            if name in instruction.operands:
                yield instruction

    def parameter(self, number: int) -> Instruction:
        """Return one of its parameters."""
        wanted = str(number)
        return next(
            i for i in self.instructions.values() if i.op == "parameter" and i.inside == wanted
        )


@dataclass(frozen=True, slots=True)
class Module:
    """A compiled graph."""

    header: str
    computations: Mapping[str, Computation]
    entry: Computation

    @property
    def aliases(self) -> dict[int, int]:
        """Which parameter's memory becomes which result's: parameter -> result."""
        begin = self.header.find("input_output_alias={")
        if begin < 0:
            return {}
        text = self.header[begin : _closing(self.header, self.header.index("{", begin))]
        return {int(p): int(r or 0) for r, p in re.findall(r"\{(\d*)\}: \((\d+)", text)}

    @property
    def running(self) -> list[Computation]:
        """The computations whose instructions run by themselves: the entry and loops' bodies."""
        found = [self.entry]
        for computation in found:
            for it in computation.instructions.values():
                if it.op in ("while", "call") and it.called:
                    found.append(self.computations[it.called])
        return found

    def executed(self) -> Iterator[Instruction]:
        """Yield what runs by itself: the instructions of the entry and of loops, not of fusions."""
        for computation in self.running:
            yield from computation.instructions.values()


def parse(text: str) -> Module:
    """Read a module. Raises `ValueError` if it has no entry."""
    computations: dict[str, Computation] = {}
    entry = None
    lines = iter(text.splitlines())
    header = next(lines, "")
    for line in lines:
        found = _COMPUTATION.match(line)
        if found:
            computation = _computation(found.group(2), lines)
            computations[computation.name] = computation
            if found.group(1):
                entry = computation
    if entry is None:
        raise ValueError("no ENTRY in this HLO")
    return Module(header, computations, entry)


def _computation(name: str, lines: Iterator[str]) -> Computation:
    instructions: dict[str, Instruction] = {}
    root = None
    for line in lines:
        if line.startswith("}"):
            break
        found = _INSTRUCTION.match(line)
        if found:
            instruction = _instruction(found.group(2), line[found.end() :])
            instructions[instruction.name] = instruction
            if found.group(1):
                root = instruction
    if root is None:
        raise ValueError(f"computation {name} has no ROOT")
    return Computation(name, instructions, root)


def _instruction(name: str, text: str) -> Instruction:
    shape_end = _closing(text, 0) if text[0] == "(" else text.index(" ")
    operation = _OPERATION.match(text, shape_end)
    if operation is None:
        raise ValueError(f"no operation in: {name} = {text[:100]}")
    begin = operation.end() - 1
    end = _closing(text, begin)
    inside = text[begin + 1 : end - 1]
    return Instruction(
        name,
        operation.group(1),
        tuple(_shapes(text[:shape_end])),
        tuple(_NAME.findall(inside)),
        text[end:],
        inside,
    )


def _closing(text: str, begin: int) -> int:
    """Return where the bracket that opens at `begin` has been closed."""
    pairs = {"(": ")", "{": "}"}
    opening, closing, depth = text[begin], pairs[text[begin]], 0
    for at in range(begin, len(text)):
        if text[at] == opening:
            depth += 1
        elif text[at] == closing:
            depth -= 1
            if depth == 0:
                return at + 1
    raise ValueError(f"{opening} is never closed: {text[begin : begin + 100]}")


def _shapes(text: str) -> Iterator[Shape]:
    for dtype, dims, layout in _SHAPE.findall(text):
        if dtype in _BITS:
            sizes = _numbers(dims)
            order, _, tiling = layout.partition(":")
            space, tile = _SPACE.search(tiling), _TILE.search(tiling)
            yield Shape(
                dtype,
                sizes,
                int(space.group(1)) if space else HBM,
                _numbers(tile.group(1)) if tile else (),
                _numbers(order) or tuple(reversed(range(len(sizes)))),
            )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def bytes_in(shapes: Sequence[Shape], space: int = HBM) -> int:
    """Return how many bytes of these arrays lie in a memory space."""
    return sum(shape.nbytes for shape in shapes if shape.space == space)
