"""The device seam: what the decoder needs of a device, and nothing else.

The decoder (model/decoder.py) is the same for every backend. It is made of *groups*: linears that
share an input and whose weights a device may fuse.

    group      linears                    input
    qkv        q_proj, k_proj, v_proj     the normed residual stream
    o          o_proj                     attention output
    gate_up    gate_proj, up_proj         the normed residual stream
    down       down_proj                  the gated activation

Outside the layers, at the `ENDS`, adapters may change two tables [vocab, hidden]: `embed_tokens`
and `lm_head`.

A device owns the memory behind weights, KV pages and adapter lanes; it decides their layout. All
calls come from the engine's thread, in order. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Int32 = NDArray[np.int32]

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}

#: In place of a layer's number: the embedding and the head.
ENDS: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class TargetTensors:
    """What one adapter does to one linear: y = W x + bias becomes (1 + gain) y + B^T A x + shift.

    A linear: in and out are its features. `embed_tokens`: in is the vocabulary, x one-hot.
    """

    #: [rank, in]
    a: Tensor
    #: [rank, out], the scale folded in.
    b: Tensor
    #: [out] float32, or None = zero.
    gain: Tensor | None = None
    #: [out] float32, or None = zero.
    shift: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        parts = (self.a, self.b, self.gain, self.shift)
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True, eq=False)
class TableRows:
    """Rows that replace those of a table [vocab, hidden]."""

    #: [n] int64, each once; None = all, in order.
    ids: Tensor | None
    #: [n, hidden]
    rows: Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """One row's part of a step: `length` tokens from position `start`."""

    start: int
    length: int
    #: The row's KV pages, [pages]; they cover positions 0 .. start + length - 1 at least.
    pages: Int32
    #: Lane pages of the row's adapter; empty = base.
    lane_pages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose the next token of one row; see sampling.py."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    #: (token id, what is added to its logit), each id once and inside the vocabulary.
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepInput:
    """Everything that one step needs, on the host.

    Tokens are grouped by row, in the order of `spans`: single tokens first, and among these the
    rows with an adapter before base rows. So each device finds its blocks without reordering.
    """

    #: [tokens] ids; or, below zero, `chosen_for` a span of the step that was submitted before.
    tokens: Int32
    #: [tokens]
    positions: Int32
    spans: Sequence[Span]
    #: [samples] index into tokens: whose logits choose a next token.
    sample_at: Int32
    #: [samples] one for each of `sample_at`.
    sampling: Sequence[Sampling]
    #: How many alternatives to report for each sample; None = no log-probabilities at all.
    top_logprobs: int | None = None


def chosen_for(span: int) -> int:
    """Return what stands for the token that the step before chooses for its span of that number.

    Its own inverse: chosen_for(chosen_for(3)) == 3.
    """
    return -1 - span


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step chose, on the host."""

    #: [samples]
    tokens: NDArray[np.int64]
    #: [samples] of the chosen token; None when not asked for.
    logprobs: NDArray[np.float32] | None = None
    #: [samples, top] most probable first.
    top_ids: NDArray[np.int64] | None = None
    top_logprobs: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer as stored: [out, in], in the device's dtype."""

    #: By group: the fused weight [sum of outs, in] and its bias [sum of outs] or None.
    linears: Mapping[str, tuple[Tensor, Tensor | None]]
    input_norm: Tensor
    post_norm: Tensor
    #: Qwen3 only: [head_dim].
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


class Linear(Protocol):
    """A packed linear: x [tokens, in] -> [tokens, out]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product (and bias, where there is one)."""


class Batch(Protocol):
    """A step's input on the device; each backend has its own form."""

    @property
    def tokens(self) -> Tensor:
        """[tokens] int64 token ids."""

    @property
    def positions(self) -> Tensor:
        """[tokens] int64 positions."""


@dataclass(frozen=True, slots=True)
class GraphCount:
    """How many graphs steps may need, and how many were compiled so far.

    Equal from the first step on, or a step had to wait for a compilation. Zeros: nothing is.
    """

    declared: int = 0
    compiled: int = 0


class StepInParts(Protocol):
    """A step that is run some layers at a time, between other steps."""

    def run(self, count: int) -> StepOutput | None:
        """Run the next `count` layers; return what was sampled if that was the end.

        The end, where rows are sampled, counts as one more layer.
        """


class SubmittedStep(Protocol):
    """A step that the device has computed, or will compute."""

    def fetch(self) -> StepOutput:
        """Wait for it and return what it chose; once, in the order in which steps were submitted.

        Raises `DeviceFailed` and nothing else: what is wrong with a step alone, `submit` finds.
        """


class StepRunner(Protocol):
    """Runs steps of one model on one device. Touched only by the engine's thread."""

    @property
    def depth(self) -> int:
        """How many steps may be submitted and not yet fetched; 1 = each is fetched at once.

        More only where steps cannot be run in parts.
        """

    @property
    def parts(self) -> int:
        """How many layers of a step can be run one after another; 0 = only whole steps."""

    @property
    def graphs(self) -> GraphCount:
        """What it has compiled."""

    def submit(self, step: StepInput) -> SubmittedStep:
        """Begin a step. The device computes all steps and lane writes in the order of the calls.

        If this raises, nothing has changed, or `DeviceFailed`.
        """

    def begin(self, step: StepInput) -> StepInParts:
        """Prepare a step that is run in parts; only where there are any."""


class LaneMemory(Protocol):
    """What adapters own of a device's memory. All calls come from the engine's thread, in order."""

    def write_lanes(
        self,
        layer: int,
        lane_pages: Sequence[int],
        targets: Mapping[str, TargetTensors],
        tables: Mapping[str, TableRows],
    ) -> None:
        """Fill the lane pages of one layer, or of the `ENDS`, in place; by module name.

        Lanes beyond a target's rank, and targets that the adapter lacks, become zero. `tables` is
        empty but for the `ENDS`; what the pages' earlier owner replaced there is forgotten.
        """

    def forget(self, lane_pages: Sequence[int]) -> None:
        """Let go of what is not in lanes: the tables of the pages' owner, which leaves the pool.

        Tables are kept by reference, tens of megabytes an adapter, until here or until its pages
        are written again. The lanes stay as they are; no row may use them until they are written.
        """


BatchT = TypeVar("BatchT", bound=Batch)
#: For what only takes batches, as a device does.
BatchT_contra = TypeVar("BatchT_contra", bound=Batch, contravariant=True)


class Device(LaneMemory, Protocol[BatchT_contra]):
    """What the decoder calls of a backend, generic in its own form of a step's input."""

    @property
    def name(self) -> str:
        """Return "cpu" or "xla"."""

    def pack(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        group: str | None = None,
        shared: bool = False,
    ) -> Linear:
        """Take a weight [out, in]; the device may copy it into a layout of its own.

        `group`: whose weight it is; None = the head. `shared`: the caller goes on using the tensor
        (a tied head), so a copy costs memory.
        """

    def split(self, y: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Take apart, in dimension 1, what linears of a group left side by side."""

    def put(self, tensor: Tensor) -> Tensor:
        """Place a small tensor (a norm, a rotary table) or an embedding on the device."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: BatchT_contra) -> Tensor:
        """Write k and v to the rows' pages, then attend causally to all that the pages hold.

        q [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim];
        returns [tokens, heads * head_dim].
        """

    def add_lora(self, y: Tensor, x: Tensor, layer: int, group: str, batch: BatchT_contra) -> None:
        """Turn y, the base's product, into that of each row's own adapter, in place.

        y [tokens, outs of the group] becomes (1 + gain) y + LoRA's delta + shift; x [tokens, in] is
        the group's input. Base rows are left untouched, bit for bit.
        """

    def whole(self, y: Tensor) -> Tensor:
        """Return what a linear and `add_lora` made as [tokens, outs of the group].

        Until then a device that shares its work with others may keep it in parts.
        """

    def adapt_embedding(self, x: Tensor, batch: BatchT_contra) -> None:
        """Change the tokens' embeddings x [tokens, hidden], in place, as each row's adapter does.

        First gain, LoRA (the tokens' columns of A, times B) and shift, then replaced rows, which
        are final. Base rows are left untouched, bit for bit.
        """

    def adapt_logits(self, logits: Tensor, x: Tensor, batch: BatchT_contra) -> None:
        """Change logits [samples, vocab], in place, as each sampled row's adapter changes the head.

        x [samples, hidden] is what the head took. In the order of `adapt_embedding`.
        """

    def samples_of(self, x: Tensor, batch: BatchT_contra) -> Tensor:
        """Pick the tokens whose logits are needed: x [tokens, hidden] -> [samples, hidden]."""


class EagerDevice(Device[BatchT], Protocol[BatchT]):
    """A device that computes at once what it is told, in shapes of any size."""

    def batch(self, step: StepInput) -> BatchT:
        """Bring a step's input to the device."""

    def sample(self, logits: Tensor, batch: BatchT) -> StepOutput:
        """Choose one token for each row of logits [samples, vocab]."""
