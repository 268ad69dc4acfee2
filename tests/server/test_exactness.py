"""Greedy tokens in float32 equal transformers + PEFT, whatever else is in the batch."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from loralane_server.adapters.pool import lanes_for
from loralane_server.config import ShardConfig
from loralane_server.rows import Admission

from tests import reference
from tests.conftest import DeviceName
from tests.server.conftest import Listener, digest_of, make_family, running

TOKENS = 64
#: Prompts for each of base and sixteen adapters: 34 requests, more than any batch holds.
PROMPTS = 2
#: Room for about half of the adapters: the others wait, evict, and are loaded again.
LANES = 160


@dataclass(frozen=True)
class Case:
    """One request and the tokens that the reference gives."""

    adapter: str
    prompt: tuple[int, ...]
    expected: list[int]


@dataclass(frozen=True)
class Family:
    folder: Path
    cases: list[Case]
    device: DeviceName

    def config(self, max_rows: int) -> ShardConfig:
        return ShardConfig(
            model=str(self.folder / "model"),
            adapter_roots=(self.folder / "adapters",),
            device=self.device,
            dtype="float32",
            max_rows=max_rows,
            lanes=LANES,
            step_tokens=48,
            prefix_cache="off",
        )


@pytest.fixture(scope="module", params=sorted(reference.FAMILIES))
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: DeviceName
) -> Family:
    folder = make_family(request.param, tmp_path_factory.mktemp("family"), reference.SIXTEEN)
    model = reference.random_model(reference.FAMILIES[request.param])
    rng = random.Random(7)
    cases = []
    for adapter in ["", *(recipe.name for recipe in reference.SIXTEEN)]:
        length = rng.randint(1, 70)
        prompts = [[rng.randrange(256) for _ in range(length)] for _ in range(PROMPTS)]
        path = folder / "adapters" / adapter if adapter else None
        found = reference.greedy(model, path, prompts, TOKENS)
        cases += [
            Case(adapter, tuple(prompt), expected)
            for prompt, expected in zip(prompts, found, strict=True)
        ]
    # A reference that repeats one token, or adapters that change nothing, would prove nothing.
    assert len({tuple(case.expected) for case in cases}) == len(cases)
    assert sum(len(set(case.expected)) for case in cases) > 8 * len(cases)
    rng.shuffle(cases)
    return Family(folder, cases, device)


@pytest.fixture(scope="module")
def shard(family: Family) -> Iterator[Listener]:
    """One for all batches of a family. Without its prefix cache each computes its prompts anew."""
    with running(family.config(max_rows=32)) as listener:
        yield listener


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_tokens_equal_the_reference_at_every_batch_size(
    family: Family, shard: Listener, rows: int
) -> None:
    assert wrong_of(family, shard, rows) == set()


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_tokens_equal_the_reference_on_a_shard_of_one_row(family: Family) -> None:
    with running(family.config(max_rows=1)) as listener:
        assert wrong_of(family, listener, rows=1) == set()


def wrong_of(family: Family, listener: Listener, rows: int) -> set[str]:
    """Ask for every case, so many rows at a time; return whose tokens are not the reference's."""
    digests = {
        case.adapter: digest_of(listener.shard, case.adapter) if case.adapter else ""
        for case in family.cases
    }
    first = len(listener.rows)
    admissions = [
        Admission(first + i, digests[case.adapter], case.prompt, TOKENS)
        for i, case in enumerate(family.cases)
    ]
    run_all(listener, admissions, rows)
    return {
        case.adapter or "base"
        for case, admission in zip(family.cases, admissions, strict=True)
        if listener.tokens(admission.request_id) != case.expected
    }


def run_all(listener: Listener, admissions: list[Admission], rows: int) -> None:
    """Keep the batch full: a row joins whenever one has left and its adapter fits."""
    lanes = {
        digest: lanes_for(listener.shard.store.summary(digest).rank)
        for digest in {a.digest for a in admissions if a.digest}
    }
    waiting, live = list(admissions), set[Admission]()

    def fits(candidate: Admission) -> bool:
        digests = {a.digest for a in (*live, candidate) if a.digest}
        return len(live) < rows and sum(lanes[d] for d in digests) <= LANES

    def one_ended() -> bool:
        return any(listener.ended(a.request_id) for a in live)

    while waiting or live:
        while waiting and fits(waiting[0]):
            live.add(waiting[0])
            listener.admit(waiting.pop(0))
        listener.wait_until(one_ended)
        live = {a for a in live if not listener.ended(a.request_id)}
