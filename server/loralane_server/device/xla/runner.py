"""Steps on XLA: every graph compiled before the first step, then one vector in, tokens out.

    choose     the smallest declared shape that holds the step        buckets.py
    lay out    the step as one vector of int32, one transfer          layout.py
    run        the compiled forward graph; logits stay on the device  graphs.py
    sample     a graph of its own, only if a row asks for more than the likeliest token
    fetch      the tokens, when the next step is submitted            chosen.py

The next step takes from the device what this one chose, so it need not wait for the host.
What the host does in a step depends on its rows; nothing is done for each layer or adapter.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch_xla
from torch import Tensor
from tqdm import tqdm

from loralane_server.device.seam import GraphCount, StepInParts, StepInput
from loralane_server.device.xla.batch import XlaBatch
from loralane_server.device.xla.buckets import GraphKey
from loralane_server.device.xla.chosen import Chosen, filled_in, padded
from loralane_server.device.xla.device import XlaDevice
from loralane_server.device.xla.graphs import Graph, Graphs
from loralane_server.device.xla.layout import Layout, rows_of_samples
from loralane_server.device.xla.sampler import Sampler, likeliest
from loralane_server.device.xla.transfer import bring
from loralane_server.errors import DeviceFailed

log = logging.getLogger(__name__)


class Model(Protocol):
    """What graphs are traced of: a `Decoder`."""

    def logits(self, batch: XlaBatch) -> Tensor:
        """See `Decoder.logits`."""


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """The forward graph of one shape, and how its input is laid out."""

    layout: Layout
    graph: Graph


class XlaRunner:
    """Implements `StepRunner`. Owns the compiled forward graphs."""

    #: Steps are graphs, compiled as a whole.
    parts = 0
    #: The host prepares a step while the device computes the one before.
    depth = 2

    def __init__(self, decoder: Model, device: XlaDevice, vocab: int) -> None:
        """`compile` before the first step."""
        self._decoder = decoder
        self._device = device
        self._forwards: dict[GraphKey, Forward] = {}
        self._graphs = Graphs()
        self._keys = device.buckets.declared()
        rows = sorted({key.rows for key in self._keys})
        self._sampler = Sampler(rows, vocab, torch_xla.device())
        #: What the last step chose, as in `Chosen`.
        self._tokens = device.put(torch.zeros(rows[-1], dtype=torch.int64))

    @property
    def graphs(self) -> GraphCount:
        """See `StepRunner.graphs`."""
        forward, lanes = len(self._keys), self._device.lane_graphs
        return GraphCount(forward + lanes + self._sampler.declared, self._graphs.compiled)

    def compile(self) -> None:
        """Compile every graph that steps and lane writes will need, showing how far it is."""
        began = time.perf_counter()
        with tqdm(total=self.graphs.declared, desc="compiling", unit="graph") as bar:
            self._graphs = Graphs(mesh=self._device.mesh, began=_shown_in(bar))
            self._device.compile_lanes(self._graphs)
            self._sampler.compile(self._graphs)
            for key in self._keys:
                self._forwards[key] = self._compiled(key)
            bar.update(self._graphs.compiled - bar.n)
        self._graphs.close()
        count = self.graphs
        assert count.compiled == count.declared, f"{count.declared} graphs declared, not {count}"
        log.info("%d graphs compiled in %.1f s", count.compiled, time.perf_counter() - began)

    def submit(self, step: StepInput) -> Chosen:
        """See `StepRunner.submit`. Raises `DeviceFailed`."""
        forward = self._forwards[self._device.buckets.choose(step)]
        ints = forward.layout.pack(step)
        rows = rows_of_samples(step)
        try:
            tokens, logits = forward.graph.run([bring(ints), self._tokens])
            if _is_greedy(step):
                chosen = Chosen(tokens, rows)
            else:
                chosen = self._sampler.choose(tokens, logits, rows, step)
        except RuntimeError as exc:
            raise DeviceFailed(f"the device failed in a step: {exc}") from exc
        self._tokens = chosen.tokens
        return chosen

    def begin(self, step: StepInput) -> StepInParts:
        """See `StepRunner.begin`."""
        raise NotImplementedError("graphs are compiled for whole steps")

    def _compiled(self, key: GraphKey) -> Forward:
        device = self._device
        layout = device.layout(key)
        forward = forward_of(self._decoder, device, key)
        ints = device.put(torch.zeros(layout.size, dtype=torch.int32))
        graph = self._graphs.compile(
            key.name,
            forward,
            [ints, self._tokens],
            updated=device.kv_cells(),
            read=device.lane_cells(key),
        )
        return Forward(layout, graph)


def forward_of(
    decoder: Model, device: XlaDevice, key: GraphKey
) -> Callable[[Tensor, Tensor], Sequence[Tensor]]:
    """Return what the forward graph of a key computes; tpu/ exports it too.

    It takes a step's vector and what the step before chose, [rows of the shard] int64.
    """

    def forward(ints: Tensor, before: Tensor) -> Sequence[Tensor]:
        batch = device.batch_of(key, ints)
        logits = decoder.logits(replace(batch, tokens=filled_in(batch.tokens, before))).float()
        return [padded(likeliest(logits), before.shape[0]), logits]

    return forward


def _is_greedy(step: StepInput) -> bool:
    """Whether the likeliest tokens are all that a step is asked for."""
    return step.top_logprobs is None and not any(
        wanted.temperature > 0 or wanted.logit_bias for wanted in step.sampling
    )


def _shown_in(bar: "tqdm[Any]") -> Callable[[str], None]:
    """Return what moves a bar as graphs are compiled, one after another."""
    names: list[str] = []

    def show(name: str) -> None:
        bar.update(len(names) - bar.n)
        bar.set_postfix_str(name)
        names.append(name)

    return show
