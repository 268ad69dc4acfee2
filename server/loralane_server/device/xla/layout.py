"""Layout: a step's input as one vector of int32, each number where its shape says. Pure.

One vector is one transfer. The host fills it (`pack`), the graph takes it apart with fixed bounds
(`split`). T tokens, R rows, P pages a row, N blocks, W lane pages in the window:

    tokens, positions   [T]
    slots               [T]     KV slot: page * page_tokens + place in the page
    pages               [R, P]  each row's KV pages, in order
    lengths             [R]     tokens in the row's pages after this step
    adapter_of          [T]     the token's adapter, named by its first lane page; BASE = none
    page_owner          [W]     the same of the adapter that owns the lane page; FREE = not used

mixed only:

    last_token          [R]     the row's last token

mixed, attended by blocks:

    block_row           [N]
    block_first         [N]     the block's first token
    block_position      [N]     and its position
    block_count         [N]     how many of the block's tokens are the row's
    token_at            [T]     where the token is among the blocks' tokens

attended by a kernel:

    row_begins          [R + 1] where each row's tokens begin; the end of the last
    row_count           [1]

Whatever a step does not fill is harmless: padded tokens write to the dustbin page, which no row
owns; padded rows have length 0 and read that page; padded blocks have no token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from loralane_server.adapters.pool import LANE_PAGE
from loralane_server.device.seam import Int32, StepInput
from loralane_server.device.xla.buckets import GraphKey
from loralane_server.kv.pages import PAGE_TOKENS, pages_for

#: No adapter; no owner in this step. They are different, so a base token matches no lane.
BASE: Final = -1
FREE: Final = -2


class Field(NamedTuple):
    """One part of the vector: [begin, end), in this shape."""

    begin: int
    end: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where everything is in the vector of one graph."""

    key: GraphKey
    fields: Mapping[str, Field]
    #: The vector of a step without tokens: what `pack` leaves as it is, is harmless.
    blank: Int32

    @property
    def size(self) -> int:
        """Numbers in the vector."""
        return len(self.blank)

    def split(self, ints: Any) -> dict[str, Any]:
        """Take a vector [size] apart, a numpy array or a tensor: views by name."""
        return {
            name: ints[begin:end] if len(shape) == 1 else ints[begin:end].reshape(shape)
            for name, (begin, end, shape) in self.fields.items()
        }

    def pack(self, step: StepInput) -> Int32:
        """Return the vector of a step that `key` holds."""
        ints = self.blank.copy()
        part = self.split(ints)
        rows, positions = len(step.spans), step.positions
        if self.key.kind == "decode":
            # Nearly every step is one: it does without what rows of any length would need.
            ends = row = _up_to(rows)
            last = positions
        else:
            counts = np.array([span.length for span in step.spans], dtype=np.int32)
            row, ends = np.repeat(_up_to(rows), counts), counts.cumsum(dtype=np.int32) - 1
            part["last_token"][:rows] = ends
            last = positions[ends]
            if "block_row" in part:
                _pack_blocks(part, counts, ends + 1 - counts, positions, self.key.block_tokens)
        np.add(last, 1, out=part["lengths"][:rows])
        _pack_tokens(part, step, row, last)
        if self.key.lanes:
            _pack_lanes(part, step, row)
        if "row_begins" in part:
            begins = part["row_begins"]
            begins[1 : rows + 1] = ends + 1
            begins[rows + 1 :] = len(step.tokens)
            part["row_count"][0] = rows
        return ints


@cache
def layout_of(key: GraphKey, dustbin: int, kernel: bool) -> Layout:
    """Return the layout of a graph.

    `dustbin`: the page for what padding writes; `kernel`: whether attention is the kernel's.
    """
    fields: dict[str, Field] = {}
    begin = 0
    for name, shape in _shapes(key, kernel).items():
        end = begin + prod(shape)
        fields[name] = Field(begin, end, shape)
        begin = end
    padding = {
        "pages": dustbin,
        "slots": dustbin * PAGE_TOKENS,
        "adapter_of": BASE,
        "page_owner": FREE,
    }
    blank = np.zeros(begin, dtype=np.int32)
    for name, field in fields.items():
        blank[field.begin : field.end] = padding.get(name, 0)
    return Layout(key, fields, blank)


def rows_of_samples(step: StepInput) -> Int32:
    """Return which row of a graph's logits is whose sample: [samples]."""
    if len(step.tokens) == len(step.spans):  # every token is a row
        return step.sample_at
    ends = np.cumsum([span.length for span in step.spans]) - 1
    return np.searchsorted(ends, step.sample_at).astype(np.int32)


@cache
def _up_to(end: int) -> Int32:
    """Return 0 ... end - 1, not to be written to."""
    return np.arange(end, dtype=np.int32)


def _shapes(key: GraphKey, kernel: bool) -> dict[str, tuple[int, ...]]:
    tokens, rows, blocks = (key.tokens,), (key.rows,), (key.blocks,)
    shapes: dict[str, tuple[int, ...]] = {
        "tokens": tokens,
        "positions": tokens,
        "slots": tokens,
        "pages": (key.rows, key.pages),
        "lengths": rows,
    }
    if key.lanes:
        shapes |= {"adapter_of": tokens, "page_owner": (key.lanes // LANE_PAGE,)}
    if key.kind == "mixed":
        shapes["last_token"] = rows
    if kernel:
        shapes |= {"row_begins": (key.rows + 1,), "row_count": (1,)}
    elif key.kind == "mixed":
        shapes |= dict.fromkeys(
            ("block_row", "block_first", "block_position", "block_count"), blocks
        )
        shapes["token_at"] = tokens
    return shapes


def _pack_tokens(part: dict[str, Any], step: StepInput, row: Int32, last: Int32) -> None:
    count, positions, pages = len(step.tokens), step.positions, part["pages"]
    part["tokens"][:count] = step.tokens
    part["positions"][:count] = positions
    for own, span, position in zip(pages, step.spans, last.tolist(), strict=False):
        used = pages_for(position + 1)
        own[:used] = span.pages[:used]
    place, inside = np.divmod(positions, PAGE_TOKENS)
    np.add(pages[row, place] * PAGE_TOKENS, inside, out=part["slots"][:count])


def _pack_lanes(part: dict[str, Any], step: StepInput, row: Int32) -> None:
    owners = [span.lane_pages[0] if span.lane_pages else BASE for span in step.spans]
    part["adapter_of"][: len(row)] = np.array(owners, dtype=np.int32)[row]
    page_owner = part["page_owner"]
    for lane_pages in {span.lane_pages for span in step.spans}:
        for page in lane_pages:
            page_owner[page] = lane_pages[0]


def _pack_blocks(
    part: dict[str, Any], lengths: Int32, begins: Any, positions: Int32, size: int
) -> None:
    blocks = -(-lengths // size)
    count = int(blocks.sum())
    first_block = blocks.cumsum() - blocks
    row = np.repeat(np.arange(len(lengths)), blocks)
    inside = (np.arange(count) - first_block[row]) * size
    first = begins[row] + inside
    part["block_row"][:count] = row
    part["block_first"][:count] = first
    part["block_position"][:count] = positions[first]
    part["block_count"][:count] = np.minimum(lengths[row] - inside, size)
    tokens = len(positions)
    offset = np.arange(tokens) - np.repeat(begins, lengths)
    part["token_at"][:tokens] = np.repeat(first_block, lengths) * size + offset
