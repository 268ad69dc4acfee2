"""How many bytes a compiled graph moves to and from HBM, from its schedule.

The compiler's own count ("bytes accessed") is none of that: it counts VMEM and both ends of every
asynchronous copy. Here an instruction counts

    what it reads    operands that lie in HBM; of those that a fusion only slices or gathers from,
                     the parts taken
    what it writes   results that lie in HBM; of one that is updated in place, the part updated
    prefetches       once, where they begin

A kernel that fetches for itself (attention, from KV pages) counts what the schedule shows of it:
its operands in HBM but for the pages. What it fetches depends on the rows' lengths, not on the
graph; whoever asks adds that.
"""

from dataclasses import dataclass
from typing import Final

from tpu.hlo import HBM, Computation, Instruction, Module, Shape, bytes_in
from tpu.structure import KERNEL

#: Move nothing: names for what is there, or ends of what was counted where it began.
_FREE: Final = frozenset(
    "parameter tuple get-tuple-element bitcast constant after-all iota partition-id replica-id "
    "copy-done slice-done async-done async-update all-reduce-done all-gather-done "
    "collective-permute-done opt-barrier".split()
)
_FREE_CALLS: Final = frozenset(
    "AllocateBuffer ConcatBitcast SliceBitcast Sharding AssumeGatherIndicesInBound".split()
)
#: Change how an array is seen, not which part of it is needed.
_SEEN_THROUGH: Final = frozenset("bitcast reshape transpose copy convert custom-call".split())
#: Take a part of their first operand.
_TAKES_PART: Final = frozenset("slice dynamic-slice gather".split())
#: Change a part of their first operand; which operand is the new part.
_PUTS_PART: Final = {"dynamic-update-slice": 1, "scatter": 2}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes between HBM and the chip in one run."""

    read: int = 0
    written: int = 0
    #: Loops that run so often as nobody knows: counted as if once.
    loops: int = 0

    @property
    def total(self) -> int:
        """Both ways."""
        return self.read + self.written

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.read + other.read, self.written + other.written, self.loops + other.loops
        )

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(self.read * times, self.written * times, self.loops)


def traffic(module: Module, paged: frozenset[tuple[int, ...]] = frozenset()) -> Traffic:
    """Count a graph's traffic on one chip.

    `paged`: dims of arrays from which kernels fetch by themselves.
    """
    return _Counter(module, paged).of(module.entry)


@dataclass(frozen=True, slots=True)
class _Counter:
    module: Module
    paged: frozenset[tuple[int, ...]]

    def of(self, computation: Computation) -> Traffic:
        total = Traffic()
        for instruction in computation.instructions.values():
            total += self._one(computation, instruction)
        return total

    def _one(self, where: Computation, it: Instruction) -> Traffic:
        if it.op in _FREE or (it.op == "custom-call" and it.target in _FREE_CALLS):
            return Traffic()
        if it.op == "while":
            return self._loop(it)
        if it.op == "call" and it.called:
            return self.of(self.module.computations[it.called])
        if it.op.endswith("-start"):
            return _started(it)
        operands = [where.instructions[name] for name in it.operands]
        if it.op == "fusion" and it.called:
            return self._fusion(it, operands)
        return self._plain(it, operands)

    def _loop(self, it: Instruction) -> Traffic:
        assert it.called is not None
        once = self.of(self.module.computations[it.called])
        return once + Traffic(loops=1) if it.trips is None else once * it.trips

    def _plain(self, it: Instruction, operands: list[Instruction]) -> Traffic:
        if it.op in _PUTS_PART:
            return _changed(it.shapes, operands[_PUTS_PART[it.op]].shapes, operands[1:])
        if it.op in _TAKES_PART:
            taken = sum(s.nbytes for s in it.shapes) if _in_hbm(operands[0]) else 0
            rest = sum(bytes_in(o.shapes) for o in operands[1:])
            return Traffic(taken + rest, bytes_in(it.shapes))
        read = [s for o in operands for s in o.shapes]
        if it.target == KERNEL:
            read = [s for s in read if s.dims not in self.paged]
        written = [s for s in it.shapes if it.target != KERNEL or s.dims not in self.paged]
        return Traffic(bytes_in(read), bytes_in(written))

    def _fusion(self, it: Instruction, operands: list[Instruction]) -> Traffic:
        assert it.called is not None
        body = self.module.computations[it.called]
        read = 0
        for number, operand in enumerate(operands):
            if _in_hbm(operand):
                whole = bytes_in(operand.shapes)
                read += min(whole, self._needed(body, body.parameter(number), whole))
        changed = self._changes(body, body.root)
        if changed is None:
            return Traffic(read, bytes_in(it.shapes))
        return Traffic(read + changed, changed)

    def _needed(self, body: Computation, it: Instruction, whole: int) -> int:
        """Return how many bytes of what `it` names the computation reads, at most `whole`."""
        needed = whole if it is body.root else 0
        for user in body.users(it.name):
            first = user.operands[0] == it.name
            if user.op in _TAKES_PART and first:
                needed += sum(s.nbytes for s in user.shapes)
            elif user.op in _PUTS_PART and first:
                continue  # the rest stays where it is
            elif user.op in _SEEN_THROUGH:
                needed += self._needed(body, user, whole)
            elif user.op == "fusion" and user.called:
                inner = self.module.computations[user.called]
                at = user.operands.index(it.name)
                inside = self._needed(inner, inner.parameter(at), whole)
                needed += inside if inside < whole else self._needed(body, user, whole)
            else:
                return whole
        return needed

    def _changes(self, body: Computation, root: Instruction) -> int | None:
        """Return how many bytes of its result a fusion changes in place; None = it makes it new."""
        while root.op in ("bitcast", "reshape", "transpose", "copy"):
            root = body.instructions[root.operands[0]]
        if root.op == "fusion" and root.called:
            inner = self.module.computations[root.called]
            return self._changes(inner, inner.root)
        if root.op == "tuple":
            parts = [self._changes(body, body.instructions[name]) for name in root.operands]
            if all(part is None for part in parts):
                return None
            made = zip(parts, (body.instructions[name] for name in root.operands), strict=True)
            return sum(bytes_in(new.shapes) if part is None else part for part, new in made)
        if root.op not in _PUTS_PART or root.shapes[0].space != HBM:
            return None
        update = body.instructions[root.operands[_PUTS_PART[root.op]]]
        return sum(s.nbytes for s in update.shapes)


def _in_hbm(it: Instruction) -> bool:
    return bytes_in(it.shapes) > 0


def _changed(
    result: tuple[Shape, ...], update: tuple[Shape, ...], operands: list[Instruction]
) -> Traffic:
    read = sum(bytes_in(o.shapes) for o in operands)
    if result[0].space != HBM:
        return Traffic(read, 0)
    changed = sum(s.nbytes for s in update)
    return Traffic(read + changed, changed)


def _started(it: Instruction) -> Traffic:
    """A transfer that goes on beside what follows: as many bytes as arrive."""
    if it.op == "copy-start":
        to, source = it.shapes[0], it.shapes[1]
    else:
        source, to = it.shapes[0], it.shapes[len(it.operands)]
    size = to.nbytes
    return Traffic(size if source.space == HBM else 0, size if to.space == HBM else 0)
