"""Buckets: the fixed shapes that steps are padded to. Pure decisions, no tensor.

A compiled graph computes one shape. So the shapes are declared when the shard starts, from its
limits alone, and every step runs in the smallest one that holds it:

    decode   every token is a row of its own: tokens == rows
    mixed    rows of any length side by side; as many rows as the shard has at most

times how many KV pages a row may read, times the *window*: how many lanes, from the first, the step
reads. Window 0 serves steps of base rows, which pay nothing for LoRA.

Without an attention kernel a mixed step is attended by blocks of adjacent tokens of one row, each
of which reads its row's pages for itself: few wide blocks for long prompts, or many narrow ones.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal, NamedTuple

from loralane_server.adapters.pool import LANE_PAGE
from loralane_server.device.seam import StepInput
from loralane_server.kv.pages import pages_for

#: A ladder's rungs lie so far apart: padding costs at most this factor, graphs stay few.
_RATIO: Final = 4
#: Rungs of a ladder at most: each one multiplies the graphs, and each graph is compiled at start.
_RUNGS: Final = 3
#: Smaller ones would save nothing that can be measured.
_LEAST_PAGES: Final = 16
_LEAST_TOKENS: Final = 32
_LEAST_LANES: Final = 128
#: Of one row's tokens: so many blocks of the largest mixed shape, each of a size between the last
#: two; blocks of the smaller shapes.
_BLOCKS: Final = 8
_SHORT: Final = 8
_NARROW: Final = 16
_WIDE: Final = 64
#: Tokens in the blocks that a mixed shape has to spare, for rows that do not fill theirs, decoding
#: ones above all. Every block costs as much as a full one.
_SPARE_TOKENS: Final = 128
#: Decoding rows are counted in these on a TPU, where fewer cost the same.
_KERNEL_ROWS: Final = 8


class GraphKey(NamedTuple):
    """Names one forward graph: all its shapes follow from this and the model."""

    kind: Literal["decode", "mixed"]
    tokens: int
    #: Rows of the logits: row i is that of the step's span i.
    rows: int
    #: KV pages that each row may read.
    pages: int
    #: Lanes that the step may read: [0, lanes); 0 = base rows only.
    lanes: int
    #: Query blocks of a mixed step; 0 = there is a kernel that needs none.
    blocks: int = 0
    #: Tokens of a block.
    block_tokens: int = 0

    @property
    def name(self) -> str:
        """For logs and progress: mixed-t128-r32-p8-l0."""
        blocks = f"-b{self.blocks}x{self.block_tokens}" if self.blocks else ""
        return f"{self.kind}-t{self.tokens}-r{self.rows}-p{self.pages}-l{self.lanes}{blocks}"


@dataclass(frozen=True, slots=True)
class MixedShape:
    """Tokens of a mixed step, and the blocks in which they are attended (0 = by a kernel)."""

    tokens: int
    blocks: int = 0
    block_tokens: int = 0

    def holds(self, lengths: Sequence[int]) -> bool:
        """Whether rows of these lengths fit."""
        if sum(lengths) > self.tokens:
            return False
        size = self.block_tokens
        return not size or sum((n + size - 1) // size for n in lengths) <= self.blocks


@dataclass(frozen=True, slots=True)
class Buckets:
    """All shapes of one shard. Each tuple ascends; its last member holds all that limits let in."""

    max_rows: int
    #: Of decode steps.
    rows: tuple[int, ...]
    mixed: tuple[MixedShape, ...]
    pages: tuple[int, ...]
    #: Windows; the first is 0.
    lanes: tuple[int, ...]

    def declared(self) -> tuple[GraphKey, ...]:
        """Return every key that `choose` can return, each once."""
        decode = [
            GraphKey("decode", rows, rows, pages, lanes)
            for rows, pages, lanes in product(self.rows, self.pages, self.lanes)
        ]
        mixed = [
            self._mixed_key(shape, pages, lanes)
            for shape, pages, lanes in product(self.mixed, self.pages, self.lanes)
        ]
        return (*decode, *mixed)

    def choose(self, step: StepInput) -> GraphKey:
        """Return the smallest shape that holds a step within the shard's limits."""
        spans = step.spans
        pages = _least(self.pages, pages_for(int(step.positions.max()) + 1))
        used = max([span.lane_pages[-1] + 1 for span in spans if span.lane_pages], default=0)
        lanes = _least(self.lanes, used * LANE_PAGE)
        if len(step.tokens) == len(spans):
            rows = _least(self.rows, len(spans))
            return GraphKey("decode", rows, rows, pages, lanes)
        lengths = [span.length for span in spans]
        shape = next(shape for shape in self.mixed if shape.holds(lengths))
        return self._mixed_key(shape, pages, lanes)

    def _mixed_key(self, shape: MixedShape, pages: int, lanes: int) -> GraphKey:
        return GraphKey(
            "mixed", shape.tokens, self.max_rows, pages, lanes, shape.blocks, shape.block_tokens
        )


def plan_buckets(
    *, max_rows: int, step_tokens: int, max_len: int, lanes: int, kernel: bool = False
) -> Buckets:
    """Declare a shard's shapes.

    max_len: tokens of a row at most. kernel: attention reads what rows have, not what shapes say;
    then neither pages nor blocks make shapes differ.
    """
    # The planner gives every decoding row its token and one prompt at least one token beside.
    most = max(step_tokens, max_rows)
    longest = pages_for(max_len)
    return Buckets(
        max_rows=max_rows,
        rows=_row_buckets(max_rows, kernel),
        mixed=_mixed_shapes(most, max_rows, kernel) if step_tokens > 1 else (),
        pages=(longest,) if kernel else _ladder(longest, _LEAST_PAGES),
        lanes=(0, *_ladder(lanes // LANE_PAGE * LANE_PAGE, _LEAST_LANES)),
    )


def _least(bounds: Sequence[int], wanted: int) -> int:
    return bounds[bisect_left(bounds, wanted)]


def _ladder(top: int, least: int) -> tuple[int, ...]:
    """Return rungs below `top` by `_RATIO`, none under `least`, and `top`; nothing if that is 0."""
    rungs = [top] if top else []
    while len(rungs) < _RUNGS and top and rungs[-1] // _RATIO >= least:
        rungs.append(rungs[-1] // _RATIO)
    return tuple(sorted(rungs))


def _row_buckets(max_rows: int, kernel: bool) -> tuple[int, ...]:
    """Return 1, then doubling from 4: rows are what decoding costs most by."""
    size = _KERNEL_ROWS if kernel else 4
    rows = {max_rows} if kernel else {1, max_rows}
    while size < max_rows:
        rows.add(size)
        size *= 2
    return tuple(sorted(rows))


def _mixed_shapes(most: int, max_rows: int, kernel: bool) -> tuple[MixedShape, ...]:
    sizes = _ladder(most, _LEAST_TOKENS)
    if kernel:
        return tuple(map(MixedShape, sizes))
    *smaller, largest_size = sizes
    largest = _blocked(largest_size, max_rows)
    # Few tokens are short prompts beside decoding rows: blocks for any of them, or such a step
    # would be padded to the largest shape.
    shapes = [MixedShape(t, _most_blocks(t, max_rows, _SHORT), _SHORT) for t in smaller]
    shapes.append(largest)
    if largest.blocks < _most_blocks(most, max_rows, largest.block_tokens):
        shapes.append(MixedShape(most, _most_blocks(most, max_rows, _NARROW), _NARROW))
    return tuple(shapes)


def _blocked(tokens: int, max_rows: int) -> MixedShape:
    """Return a shape for a few long rows and some short ones."""
    size = min(max(tokens // _BLOCKS, _NARROW), _WIDE)
    spare = min(max_rows, _SPARE_TOKENS // size)
    blocks = min(-(-tokens // size) + spare, _most_blocks(tokens, max_rows, size))
    return MixedShape(tokens, blocks, size)


def _most_blocks(tokens: int, max_rows: int, size: int) -> int:
    """Return how many blocks any rows could need: each has one that it may not fill."""
    rows = min(max_rows, tokens)
    return rows + (tokens - rows) // size
