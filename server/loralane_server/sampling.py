"""Sampling as a function of (logits, seed, position) alone: batch, order and history do not matter.

A row replayed on another shard, or in another batch, draws the same number at the same position,
so it continues with the same tokens. The draw is made on the host and travels with the step; the
device inverts the cumulative distribution with it.

    logits       [samples, vocab] float32
    uniform      [samples] in [0, 1)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from loralane_server.device.seam import Sampling, StepOutput

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
    drawn = [i for i, s in enumerate(sampling) if s.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn)
        tokens[rows] = draw(
            logits[rows],
            torch.tensor([sampling[i].temperature for i in drawn]),
            torch.tensor([sampling[i].top_k for i in drawn]),
            torch.tensor([sampling[i].top_p for i in drawn]),
            torch.tensor([uniform(sampling[i].seed, positions[i]) for i in drawn]),
        )
    return tokens


def add_bias(logits: Tensor, sampling: Sequence[Sampling]) -> None:
    """Add each row's own biases to its logits [samples, vocab], in place."""
    for row, wanted in enumerate(sampling):
        if wanted.logit_bias:
            ids, biases = zip(*wanted.logit_bias, strict=True)
            logits[row, list(ids)] += torch.tensor(biases)


def draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform_: Tensor
) -> Tensor:
    """Draw from softmax(logits / temperature) cut to top_k (0 = off), then to top_p.

    top_p keeps the most probable tokens up to and including the one that reaches it. All
    parameters [samples].
    """
    scaled = logits / temperature[:, None].clamp_min(1e-6)
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(logits.shape[-1], device=logits.device)
    kept = (top_k[:, None] <= 0) | (place < top_k[:, None])
    probs = torch.softmax(ordered.masked_fill(~kept, float("-inf")), dim=-1)
    before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill((before >= top_p[:, None]) & (place > 0), 0.0)
    cumulative = probs.cumsum(dim=-1)
    # The first place whose cumulative probability exceeds the draw; never one of probability 0.
    target = uniform_[:, None] * cumulative[:, -1:]
    at = (cumulative <= target).sum(dim=-1, keepdim=True)
    # Where an adapter overflows there is no distribution, only NaN: such a row takes the first.
    last = ((probs > 0).sum(dim=-1, keepdim=True) - 1).clamp_min(0)
    return ids.gather(-1, torch.minimum(at, last)).squeeze(-1)


def with_logprobs(logits: Tensor, tokens: Tensor, top: int) -> StepOutput:
    """Add log-probabilities of the model's distribution: biased, before temperature and cuts."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
    if not top:
        return StepOutput(tokens.numpy(), chosen.numpy())
    values, ids = logprobs.topk(min(top, logits.shape[-1]), dim=-1)
    return StepOutput(tokens.numpy(), chosen.numpy(), ids.numpy(), values.numpy())
