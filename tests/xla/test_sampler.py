"""Sampling in graphs gives what sampling.py gives for the same logits."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch_xla
from hypothesis import given, settings
from hypothesis import strategies as st
from loralane_server import sampling
from loralane_server.device.cpu_search import CpuSearch
from loralane_server.device.seam import Sampling, Span, StepInput, StepOutput
from loralane_server.device.xla.bisection import Bisection
from loralane_server.device.xla.graphs import Graphs
from loralane_server.device.xla.sampler import BIASES, Sampler
from loralane_server.drawing import Search
from torch import Tensor

from tests.xla.compilations import Compilations

ROWS, VOCAB = 4, 53


class Shard:
    """A sampler, and logits that a forward graph could have left."""

    def __init__(self, vocab: int = VOCAB) -> None:
        self.vocab = vocab
        self.sampler = Sampler((ROWS, 2 * ROWS), vocab, torch_xla.device())
        graphs = Graphs()
        self.sampler.compile(graphs)
        assert graphs.compiled == self.sampler.declared

    def sample(
        self,
        logits: Tensor,
        wanted: Sequence[Sampling],
        *,
        rows: Sequence[int] | None = None,
        padded: int = ROWS,
        position: int = 7,
        top: int | None = None,
    ) -> StepOutput:
        """Sample logits [samples, vocab], which lie at `rows` of the graph's."""
        at = np.array(range(len(wanted)) if rows is None else rows, np.int32)
        every = torch.full((padded, self.vocab), 3.0)
        every[torch.from_numpy(at).long()] = logits
        device = torch_xla.device()
        greedy = torch.zeros(2 * ROWS, dtype=torch.int64)
        greedy[:padded] = every.argmax(dim=-1)
        asked = step(wanted, position, top)
        return self.sampler.choose(greedy.to(device), every.to(device), at, asked).fetch()


def step(wanted: Sequence[Sampling], position: int, top: int | None) -> StepInput:
    count = len(wanted)
    return StepInput(
        tokens=np.zeros(count, np.int32),
        positions=np.arange(position, position + count, dtype=np.int32),
        spans=[Span(0, 1, np.zeros(1, np.int32))] * count,
        sample_at=np.arange(count, dtype=np.int32),
        sampling=wanted,
        top_logprobs=top,
    )


def reference(
    logits: Tensor, wanted: Sequence[Sampling], position: int = 7, top: int = 20
) -> StepOutput:
    logits = logits.clone()
    sampling.add_bias(logits, wanted)
    positions = range(position + 1, position + 1 + len(wanted))
    tokens = sampling.choose(logits, wanted, positions)
    return sampling.with_logprobs(logits, tokens, top)


@pytest.fixture(scope="module")
def shard() -> Shard:
    return Shard()


#: Few different values, so that ties are common; what an adapter that overflows may give.
_VALUES = st.sampled_from(
    [-2.5, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1e-38, 0.25, 1.0, 4.0, 30.0, 1e30, float("-inf")]
)
_STRANGE = st.sampled_from([float("nan"), float("inf"), float("-inf"), 0.0, 5.0])
_LOGITS = st.one_of(
    st.lists(_VALUES, min_size=VOCAB, max_size=VOCAB),
    st.lists(_STRANGE, min_size=VOCAB, max_size=VOCAB),
    st.lists(st.floats(width=32, allow_nan=False), min_size=VOCAB, max_size=VOCAB),
)
_BIAS = st.dictionaries(
    st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.0, 0.5, 100.0]), max_size=5
)
_WANTED = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-9, 1e-3, 0.7, 1.0, 5.0, 1e9]),
    top_k=st.sampled_from([0, 1, 2, 7, VOCAB, 10 * VOCAB, 2**31 - 1]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=_BIAS.map(lambda found: tuple(found.items())),
)


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(st.tuples(_LOGITS, _WANTED), min_size=1, max_size=ROWS))
def test_tokens_are_those_of_the_host(
    shard: Shard, rows: list[tuple[list[float], Sampling]]
) -> None:
    logits = torch.tensor([row for row, _ in rows])
    wanted = [asked for _, asked in rows]

    found = shard.sample(logits, wanted)

    assert found.tokens.tolist() == reference(logits, wanted).tokens.tolist()


def test_many_draws_from_smooth_logits_are_those_of_the_host() -> None:
    shard = Shard(vocab=1000)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(8, 1000, generator=generator) * 3
    wanted = [
        Sampling(0.9, top_k=k, top_p=p, seed=k + 1) for k in (0, 50) for p in (1, 0.9, 0.5, 0)
    ]

    for position in range(100):
        found = shard.sample(logits, wanted, padded=2 * ROWS, position=position)
        assert found.tokens.tolist() == reference(logits, wanted, position).tokens.tolist()


@pytest.mark.parametrize("cached", [True, False])
def test_bisection_finds_what_a_search_on_the_host_does(cached: bool) -> None:
    logits = torch.randn(3, 900, generator=torch.Generator().manual_seed(5))
    logits[1] = logits[1].round()
    logits[2, ::2] = float("-inf")
    amounts = torch.arange(2700, dtype=torch.int32).view(3, 900) * (1 << 18)
    count = torch.tensor([1, 450, 900])
    inputs = [logits, amounts, count, count * (amounts.sum(dim=-1) // 900)]
    placed = [tensor.to(torch_xla.device()) for tensor in inputs]

    def search(by: Search, inputs: Sequence[Tensor]) -> list[Tensor]:
        logits, amounts, count, wanted = inputs
        return [
            by.reached(logits, None, count),
            by.reached(logits, amounts, wanted),
            by.first(by.settled(amounts + 1), wanted),
        ]

    graph = Graphs(cached=cached).compile("search", lambda *x: search(Bisection(), x), placed)

    for found, expected in zip(graph.run(placed), search(CpuSearch(), inputs), strict=True):
        assert torch.equal(found.cpu(), expected)


def test_rows_lie_anywhere_among_the_graphs_rows(shard: Shard) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    wanted = [Sampling(1.0, seed=5, logit_bias=((3, 2.0),)), Sampling(logit_bias=((9, 100.0),))]

    found = shard.sample(logits, wanted, rows=[6, 1], padded=2 * ROWS, top=5)

    expected = reference(logits, wanted, top=5)
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.top_ids is not None
    assert found.top_ids.tolist() == expected.top_ids.tolist()


def test_more_biases_than_one_run_holds_take_several() -> None:
    shard = Shard(vocab=2 * BIASES)
    logits = torch.randn(3, 2 * BIASES, generator=torch.Generator().manual_seed(2))
    every = tuple((token, float(token % 7) * 3) for token in range(2 * BIASES))
    wanted = [Sampling(logit_bias=every), Sampling(), Sampling(logit_bias=every[: BIASES // 2])]

    found = shard.sample(logits, wanted, top=0)

    expected = reference(logits, wanted)
    assert found.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-5)


@pytest.mark.parametrize("top", [0, 1, 20])
def test_logprobs_are_those_of_the_host(shard: Shard, top: int) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4)) * 5
    wanted = [Sampling(), Sampling(1.0, seed=8), Sampling(logit_bias=((1, -100.0),))]

    found = shard.sample(logits, wanted, top=top)

    expected = reference(logits, wanted, top=top)
    assert found.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-6)
    if top:
        np.testing.assert_array_equal(found.top_ids, expected.top_ids)
        np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, rtol=1e-5, atol=1e-6)
    else:
        assert found.top_ids is None


def test_nothing_that_a_request_can_ask_for_compiles(shard: Shard) -> None:
    logits = torch.randn(ROWS, VOCAB)
    shard.sample(logits, [Sampling()] * ROWS)
    before = Compilations.so_far()

    for turn in range(50):
        wanted = [
            Sampling(turn * 0.1, turn % 9, turn / 50, turn, tuple((i, 1.0) for i in range(turn)))
            for _ in range(1 + turn % ROWS)
        ]
        shard.sample(logits[: len(wanted)], wanted, position=turn, top=turn % 21)

    assert Compilations.so_far() == before
