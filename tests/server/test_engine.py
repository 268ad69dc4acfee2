"""The engine: rows come and go between steps, and nothing that ends leaves anything behind."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from loralane_server.config import ShardConfig
from loralane_server.device.seam import Sampling
from loralane_server.errors import AdapterCorrupt, AdapterInUse, InvalidRequest, Overloaded
from loralane_server.rows import Admission, Finish
from safetensors.torch import load_file, save_file

from tests.server.conftest import Listener, digest_of, running
from tests.server.gated import gated

PROMPT = tuple(b"The quick brown fox")


@pytest.fixture
def shard(tiny: Path) -> Iterator[Listener]:
    config = ShardConfig(
        model=str(tiny / "model"),
        adapter_roots=(tiny / "adapters",),
        dtype="float32",
        max_rows=4,
        lanes=64,
        step_tokens=16,
    )
    with running(config) as listener:
        yield listener


def endless(request_id: int, digest: str = "") -> Admission:
    return Admission(request_id, digest, PROMPT, max_tokens=200)


def all_free(listener: Listener) -> bool:
    c = listener.capacity
    return c is not None and (c.rows_free, c.pages_free, c.lanes_in_use) == (
        c.rows_total,
        c.pages_total,
        0,
    )


def test_a_cancelled_row_frees_row_pages_and_lanes_within_its_step(shard: Listener) -> None:
    digest = digest_of(shard.shard, "r8")
    shard.admit(endless(1, digest))
    shard.wait_until(lambda: len(shard.tokens(1)) > 3)

    shard.cancel(1)
    shard.wait(1)

    (event,) = [e for e in shard.steps if any(r.finish is Finish.CANCELLED for r in e.rows)]
    assert event.capacity.rows_free == event.capacity.rows_total
    assert event.capacity.pages_free == event.capacity.pages_total
    assert event.capacity.lanes_in_use == 0


def test_a_row_ends_by_its_stop_token_and_reports_it(shard: Listener) -> None:
    (free,) = shard.generate(Admission(1, "", PROMPT, max_tokens=8))
    stop = free[4]

    shard.admit(Admission(2, "", PROMPT, max_tokens=8, stop_token_ids=frozenset([stop])))
    shard.wait(2)

    assert shard.tokens(2) == free[: free.index(stop) + 1]
    assert shard.rows[2][-1].finish is Finish.STOP_TOKEN


def test_a_prompt_longer_than_a_step_is_computed_in_chunks_beside_streams(shard: Listener) -> None:
    long = tuple(range(97))
    (alone,) = shard.generate(Admission(1, "", long, max_tokens=4))
    shard.admit(endless(2))
    shard.wait_until(lambda: len(shard.tokens(2)) > 2)

    (beside,) = shard.generate(Admission(3, "", long, max_tokens=4))

    assert beside == alone
    assert not shard.ended(2)
    shard.cancel(2)
    shard.wait(2)


def test_a_row_more_than_fits_is_refused_and_the_others_go_on(shard: Listener) -> None:
    shard.admit(*(endless(i) for i in range(4)))

    shard.admit(endless(9))
    shard.wait(9)

    assert isinstance(shard.rows[9][-1].error, Overloaded)
    assert not any(shard.ended(i) for i in range(4))
    for i in range(4):
        shard.cancel(i)
    shard.wait(0, 1, 2, 3)


@pytest.mark.parametrize(
    "admission",
    [
        Admission(1, "", (), max_tokens=4),
        Admission(1, "", PROMPT, max_tokens=0),
        Admission(1, "", PROMPT, max_tokens=240),
        Admission(1, "", (1, 260), max_tokens=4),
        Admission(1, "", PROMPT, max_tokens=4, sampling=Sampling(logit_bias=((260, 1.0),))),
    ],
)
def test_an_impossible_row_is_told_why(shard: Listener, admission: Admission) -> None:
    shard.admit(admission)
    shard.wait(1)

    assert isinstance(shard.rows[1][-1].error, InvalidRequest)


def test_a_row_that_needs_more_pages_than_there_are_is_told_what_to_do(tiny: Path) -> None:
    with gated(tiny, pages=4) as (_, listener):
        listener.admit(Admission(1, "", PROMPT, max_tokens=64 - len(PROMPT) + 1))
        listener.wait(1)

        error = listener.rows[1][-1].error
        assert isinstance(error, InvalidRequest)
        assert "lower max_tokens" in error.message
        assert "--kv-memory" in error.message
        assert len(listener.generate(Admission(2, "", PROMPT, 64 - len(PROMPT)))[0]) == 45


def test_rows_take_pages_as_they_grow_and_report_what_their_tokens_need(tiny: Path) -> None:
    with gated(tiny, pages=128) as (shard, listener):
        shard.device.may_step.clear()
        listener.admit(Admission(1, "", (1,) * 40, max_tokens=100))
        shard.device.is_waiting.wait()

        shard.device.may_step.set()
        listener.wait(1)

        free = [128 - e.capacity.pages_free for e in listener.steps if e.rows]
        pending = [e.capacity.pending_tokens for e in listener.steps if e.rows]
        assert free == [-(-(41 + i) // 16) for i in range(99)] + [0]
        assert pending == [1] * 99 + [0]
        last = listener.steps[-1].capacity
        assert last.pages_cached == 139 // 16
        assert last.step_ms > 0
        assert last.token_ms >= 0


def test_base_rows_are_the_same_with_and_without_adapters_in_the_batch(shard: Listener) -> None:
    base = Admission(1, "", PROMPT, max_tokens=40)
    (alone,) = shard.generate(base)
    digests = [digest_of(shard.shard, name) for name in ("r1", "r16", "r8")]

    mixed = shard.generate(
        Admission(2, "", PROMPT, max_tokens=40),
        *(Admission(3 + i, d, PROMPT, max_tokens=40) for i, d in enumerate(digests)),
    )

    assert mixed[0] == alone
    assert len({tuple(tokens) for tokens in mixed}) == 4


def test_a_broken_adapter_fails_its_own_rows_only(
    shard: Listener, tiny: Path, tmp_path: Path
) -> None:
    folder = tiny / "adapters" / "broken"
    shutil.copytree(tiny / "adapters" / "r8", folder)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, weights)
    digest = digest_of(shard.shard, "broken")
    good = digest_of(shard.shard, "r3")
    shard.admit(endless(1, good))

    shard.admit(Admission(2, digest, PROMPT, 4), Admission(3, digest, PROMPT, 4))
    shard.wait(2, 3)

    assert isinstance(shard.rows[2][-1].error, AdapterCorrupt)
    assert "finite" in shard.rows[3][-1].error.message  # type: ignore[union-attr]
    assert not shard.ended(1)
    shard.cancel(1)
    shard.wait(1)
    shutil.rmtree(folder)


def test_an_adapter_in_use_cannot_be_unloaded_and_an_idle_one_frees_its_lanes(
    shard: Listener,
) -> None:
    digest = digest_of(shard.shard, "r12")
    shard.admit(endless(1, digest))
    shard.wait_until(lambda: len(shard.tokens(1)) > 0)

    with pytest.raises(AdapterInUse):
        shard.shard.engine.unload(digest).result()

    shard.cancel(1)
    shard.wait(1)
    assert shard.shard.engine.unload(digest).result().lanes == 16
    shard.wait_until(lambda: all_free(shard) and shard.capacity.lanes_free == 64)  # type: ignore[union-attr]


def test_a_row_cancelled_while_its_adapter_loads_leaves_nothing(shard: Listener) -> None:
    digest = digest_of(shard.shard, "r64")
    shard.admit(Admission(1, digest, PROMPT, max_tokens=4))
    shard.cancel(1)

    shard.wait(1)

    assert shard.shard.engine.load(digest).result(timeout=30) is None
    shard.wait_until(lambda: all_free(shard))


def test_a_caller_that_loses_interest_disturbs_nobody(shard: Listener) -> None:
    digest = digest_of(shard.shard, "r48")
    shard.admit(endless(1))

    asked = [shard.shard.engine.capacity(), shard.shard.engine.load(digest)]
    for future in asked:
        future.cancel()

    assert [future.result(timeout=30) is None for future in asked] == [False, True]
    assert not shard.shard.engine.stopped.done()
    shard.cancel(1)
    shard.wait(1)


def test_rows_of_a_listener_that_leaves_are_ended(shard: Listener) -> None:
    other = Listener(shard.shard)
    other.admit(endless(1), endless(2))
    other.wait_until(lambda: bool(other.tokens(1) and other.tokens(2)))

    shard.shard.engine.leave(other.sink)

    shard.wait_until(lambda: all_free(shard))


def test_logprobs_are_reported_when_asked_for(shard: Listener) -> None:
    shard.admit(
        Admission(1, "", PROMPT, max_tokens=3, logprobs=2),
        Admission(2, "", PROMPT, max_tokens=3),
    )
    shard.wait(1, 2)

    asked = [t for event in shard.rows[1] for t in event.tokens]
    assert all(len(t.top) == 2 and t.top[0] == (t.id, t.logprob) for t in asked)
    assert all(t.logprob < 0 for t in asked)
    assert all(not t.top for event in shard.rows[2] for t in event.tokens)
