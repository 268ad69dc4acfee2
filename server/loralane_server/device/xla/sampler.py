"""Sampling on the device, in graphs of its own, run only for steps that ask for more than greedy.

    bias      adds logit_bias, so many entries a run, and takes the likeliest token anew
    draw      draws where a row has a temperature; the likeliest token elsewhere
    cut       draws too, and cuts to top_k and top_p: run if any row of the step asks for that
    logprobs  of the chosen token, and of the likeliest `TOP`

Each takes the logits [rows, vocab] where the forward graph left them. What rows ask for travels in
one vector of float32 and one of int32, padded to the graph's rows; a padded row is greedy. Drawing
is that of the CPU backend (drawing.py), with the same numbers, so a seed gives the same tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from loralane_server.device.seam import Int32, StepInput
from loralane_server.device.xla.bisection import Bisection
from loralane_server.device.xla.chosen import Chosen, padded
from loralane_server.device.xla.graphs import Graph, Graphs
from loralane_server.device.xla.transfer import bring
from loralane_server.drawing import Wanted, draw
from loralane_server.sampling import asked, has_cuts

#: Alternatives that are reported at most: as many as the wire allows.
TOP: Final = 20
#: Entries of logit_bias in one run; more take more runs.
BIASES: Final = 1024


@dataclass(frozen=True, slots=True, eq=False)
class RowGraphs:
    """The graphs for logits of so many rows."""

    bias: Graph
    draw: Graph
    cut: Graph
    logprobs: Graph


class Sampler:
    """Owns the sampling graphs of all row buckets; `compile` before the first step."""

    def __init__(self, rows: Sequence[int], vocab: int, device: torch.device) -> None:
        """`rows`: of the logits of all forward graphs, each number once, ascending.

        The last is the shard's: so many tokens every graph gives (see chosen.py).
        """
        self._rows = tuple(rows)
        self._vocab = vocab
        self._device = device
        self._graphs: dict[int, RowGraphs] = {}

    @property
    def declared(self) -> int:
        """How many graphs `compile` makes."""
        return 4 * len(self._rows)

    def compile(self, graphs: Graphs) -> None:
        """Compile the graphs of every row bucket."""
        for rows in self._rows:
            self._graphs[rows] = self._compiled(graphs, rows)

    def choose(self, greedy: Tensor, logits: Tensor, rows: Int32, step: StepInput) -> Chosen:
        """Choose the step's tokens; does not wait for the device.

        greedy [rows of the shard] begins with the likeliest token of each of logits [rows of the
        graph, vocab], both on the device; rows [samples] says which of them is whose.
        """
        graphs = self._graphs[logits.shape[0]]
        tokens = greedy
        for ids, biases in _bias_runs(step, rows, self._vocab):
            logits, tokens = graphs.bias.run([logits, bring(ids), bring(biases)])
        if any(wanted.temperature > 0 for wanted in step.sampling):
            wanted = map(bring, _draw_inputs(step, rows, logits.shape[0]))
            graph = graphs.cut if any(map(has_cuts, step.sampling)) else graphs.draw
            (tokens,) = graph.run([logits, tokens, *wanted])
        if step.top_logprobs is None:
            return Chosen(tokens, rows)
        return Chosen(tokens, rows, graphs.logprobs.run([logits, tokens]), step.top_logprobs)

    def _compiled(self, graphs: Graphs, rows: int) -> RowGraphs:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype).to(self._device)

        logits = zeros(rows, self._vocab)
        tokens = zeros(self._rows[-1], dtype=torch.int64)
        entries = [zeros(BIASES, dtype=torch.int32), zeros(BIASES)]
        wanted = [zeros(rows), zeros(3 * rows, dtype=torch.int32)]

        def graph(name: str, fn: "Callable[..., Sequence[Tensor]]", inputs: list[Tensor]) -> Graph:
            return graphs.compile(f"{name}-r{rows}", fn, inputs)

        return RowGraphs(
            bias=graph("bias", biased(self._rows[-1]), [logits, *entries]),
            draw=graph("draw", drawn(cuts=False), [logits, tokens, *wanted]),
            cut=graph("cut", drawn(cuts=True), [logits, tokens, *wanted]),
            logprobs=graph("logprobs", logprobs, [logits, tokens]),
        )


def likeliest(logits: Tensor) -> Tensor:
    """Return the likeliest token of each row: the first of equals, and the first NaN if any.

    XLA's own argmax passes over NaN, and takes the last token where there is nothing else.
    """
    nan = logits.isnan()
    return torch.where(nan.any(dim=-1), nan.int().argmax(dim=-1), logits.argmax(dim=-1))


def biased(most: int) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
    """Return what adds biases; `most`: how many tokens it gives, padded."""

    def logits_and_tokens(logits: Tensor, at: Tensor, biases: Tensor) -> list[Tensor]:
        """Add biases [n] to logits [rows, vocab] at [n], counted through; then the likeliest."""
        changed = logits.flatten().index_add(0, at, biases).view(logits.shape)
        return [changed, padded(likeliest(changed), most)]

    return logits_and_tokens


def drawn(*, cuts: bool) -> Callable[[Tensor, Tensor, Tensor, Tensor], list[Tensor]]:
    """Return what draws each row's token; `cuts`: whether any row asks for top_k or top_p."""

    def tokens(logits: Tensor, likeliest: Tensor, scale: Tensor, ints: Tensor) -> list[Tensor]:
        """Take `Wanted` as scale [rows], 0 where a row is greedy, and ints [3 * rows]."""
        draws, greedy = scale > 0, likeliest[: scale.shape[0]]
        wanted = Wanted(torch.where(draws, scale, 1.0), *ints.view(3, -1).unbind())
        found = torch.where(draws, draw(logits, greedy, wanted, Bisection(), cuts=cuts), greedy)
        return [padded(found, likeliest.shape[0])]

    return tokens


def logprobs(logits: Tensor, tokens: Tensor) -> list[Tensor]:
    """Return the tokens' log-probabilities [rows], and the likeliest `TOP`: values and ids."""
    every, tokens = torch.log_softmax(logits, dim=-1), tokens[: logits.shape[0]]
    values, ids = every.topk(min(TOP, logits.shape[-1]), dim=-1)
    return [every.gather(-1, tokens[:, None]).squeeze(-1), values, ids]


def _bias_runs(
    step: StepInput, rows: Int32, vocab: int
) -> list[tuple[Int32, "np.ndarray[tuple[int], np.dtype[np.float32]]"]]:
    """Return the entries of all rows as runs of `BIASES`; what a run lacks adds 0 to the first."""
    entries = [
        (row * vocab + token, bias)
        for row, wanted in zip(rows.tolist(), step.sampling, strict=True)
        for token, bias in wanted.logit_bias
    ]
    runs = []
    for begin in range(0, len(entries), BIASES):
        part = entries[begin : begin + BIASES]
        at, biases = np.zeros(BIASES, np.int32), np.zeros(BIASES, np.float32)
        at[: len(part)] = [place for place, _ in part]
        biases[: len(part)] = [bias for _, bias in part]
        runs.append((at, biases))
    return runs


def _draw_inputs(
    step: StepInput, rows: Int32, padded: int
) -> tuple["np.ndarray[tuple[int], np.dtype[np.float32]]", Int32]:
    """Return what the rows ask for, as `drawn` takes it; other rows are greedy."""
    scale, ints = np.zeros(padded, np.float32), np.zeros((3, padded), np.int32)
    for row, at, wanted in zip(rows, step.sample_at, step.sampling, strict=True):
        if wanted.temperature > 0:
            scale[row], *ints[:, row] = asked(wanted, int(step.positions[at]) + 1)
    return scale, ints.reshape(-1)
