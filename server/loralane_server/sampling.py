"""Sampling as a function of (logits, seed, position) alone: batch, order and history do not matter.

A row replayed on another shard, or in another batch, draws the same number at the same position,
so it continues with the same tokens. The number is made on the host and travels with the step; what
a device makes of it is in drawing.py. Logits are [samples, vocab] float32.
"""

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from loralane_server.device.cpu_search import CpuSearch
from loralane_server.device.seam import Sampling, StepOutput
from loralane_server.drawing import ONE, Wanted, draw

#: Colder is as cold: the likeliest token by far.
_COLDEST: Final = 1e-6
#: Logits in one pass: what it computes with stays in a core's cache.
_AT_ONCE: Final = 1 << 17
_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """Return the draw of a row at a position, in [0, 1): SplitMix64 of both, top 24 bits."""
    x = _mix(_mix(seed & _MASK) ^ (position & _MASK))
    return (x >> 40) / (1 << 24)


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def choose(logits: Tensor, sampling: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """Return one token id a row: greedy where temperature is 0, else drawn. [samples] int64."""
    tokens = logits.argmax(dim=-1)
    drawn = [i for i, wanted in enumerate(sampling) if wanted.temperature > 0]
    at_once = max(1, _AT_ONCE // logits.shape[-1])
    for cuts in (False, True):
        rows = [i for i in drawn if has_cuts(sampling[i]) == cuts]
        for begin in range(0, len(rows), at_once):
            part = rows[begin : begin + at_once]
            at = torch.tensor(part)
            wanted = _side_by_side([asked(sampling[i], positions[i]) for i in part])
            tokens[at] = draw(logits[at], tokens[at], wanted, CpuSearch(), cuts=cuts)
    return tokens


def has_cuts(sampling: Sampling) -> bool:
    """Whether not all tokens may be drawn."""
    return sampling.top_k > 0 or sampling.top_p < 1


def asked(sampling: Sampling, position: int) -> tuple[float, int, int, int]:
    """Return what a row that draws asks for at a position: numbers for the fields of `Wanted`."""
    return (
        math.log2(math.e) / max(sampling.temperature, _COLDEST),
        sampling.top_k,
        round(min(max(sampling.top_p, 0.0), 1.0) * ONE),
        round(uniform(sampling.seed, position) * ONE),
    )


def _side_by_side(wanted: Sequence[tuple[float, int, int, int]]) -> Wanted:
    scale, *others = zip(*wanted, strict=True)
    return Wanted(torch.tensor(scale), *(torch.tensor(x, dtype=torch.int32) for x in others))


def add_bias(logits: Tensor, sampling: Sequence[Sampling]) -> None:
    """Add each row's own biases to its logits [samples, vocab], in place."""
    for row, wanted in enumerate(sampling):
        if wanted.logit_bias:
            ids, biases = zip(*wanted.logit_bias, strict=True)
            logits[row, list(ids)] += torch.tensor(biases)


def with_logprobs(logits: Tensor, tokens: Tensor, top: int) -> StepOutput:
    """Add log-probabilities of the model's distribution: biased, before temperature and cuts."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
    if not top:
        return StepOutput(tokens.numpy(), chosen.numpy())
    values, ids = logprobs.topk(min(top, logits.shape[-1]), dim=-1)
    return StepOutput(tokens.numpy(), chosen.numpy(), ids.numpy(), values.numpy())
