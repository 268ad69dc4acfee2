"""The step loop in any order of events: every token is right, no page is lost, nobody starves.

Loop, planner, pages, prefix cache, waves and the adapter pool are the real ones; the model below
them is small enough to foretell every token (see paged.py).
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from loralane_server.device.seam import Sampling
from loralane_server.errors import AdapterCorrupt, Overloaded
from loralane_server.rows import Admission, Finish

from tests.server.paged import LAYERS, PagedShard, continued

DIGESTS = ("one", "two", "three")
ROWS = 6
#: Pages of 16 equal tokens and some odd ones: so prefixes meet, and part again.
prompts = st.builds(
    lambda blocks, odd: [token for token in blocks for _ in range(16)] + [3] * odd,
    st.lists(st.sampled_from([1, 2]), max_size=3),
    st.integers(1, 20),
)


@dataclass(frozen=True)
class Asked:
    digest: str
    prompt: list[int]
    seed: int
    #: Tokens at most.
    more: int
    stops: Collection[int]
    expected: list[int]


class LoopMachine(RuleBasedStateMachine):
    """`seen` counts what happened, over all runs."""

    def __init__(self, seen: Counter[str], *, late: bool) -> None:
        super().__init__()
        self.seen = seen
        self.late = late
        self.asked: dict[int, Asked] = {}
        self.cancelled: set[int] = set()
        self.broken: set[str] = set()

    @initialize(
        pages=st.sampled_from([6, 8, 10, 14, 40]),
        step_tokens=st.sampled_from([1, 8, 16, 40, 500]),
        prefix_cache=st.sampled_from([True, True, True, False]),
        doubling=st.sampled_from([None, 20, 200]),
    )
    def start(self, pages: int, step_tokens: int, prefix_cache: bool, doubling: int | None) -> None:
        """`late`: the device computes late, and the loop is a step ahead of it."""
        self.seen["runs"] += 1
        self.length = pages * 16
        self.shard = PagedShard(
            pages=pages,
            rows=ROWS,
            length=self.length,
            step_tokens=step_tokens,
            prefix_cache=prefix_cache,
            doubling=doubling,
            digests=DIGESTS,
            late=self.late,
        )

    @rule(
        digest=st.sampled_from(["", "", *DIGESTS]),
        prompt=prompts,
        more=st.integers(1, 80),
        seed=st.integers(0, 1),
        stops=st.sampled_from([frozenset(), frozenset(), {7}, {1, 12, 30}]),
    )
    def admit(
        self, digest: str, prompt: list[int], more: int, seed: int, stops: Collection[int]
    ) -> None:
        request_id = len(self.asked)
        more = min(more, self.length - len(prompt))
        expected = continued(digest, prompt, more, seed)
        end = next((i for i, token in enumerate(expected, 1) if token in stops), more)
        self.asked[request_id] = Asked(digest, prompt, seed, more, stops, expected[:end])
        admission = Admission(
            request_id, digest, prompt, more, frozenset(stops), sampling=Sampling(seed=seed)
        )
        self.shard.loop.admit(admission, self.shard.sink)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        """Ask once more for what a row was asked for, with what it has generated so far."""
        asked_id = data.draw(st.sampled_from(self.running()))
        asked, had = self.asked[asked_id], self.shard.tokens(asked_id)
        more = asked.more - len(had)
        prompt = asked.prompt + had
        self.admit(asked.digest, prompt, more, asked.seed, asked.stops)
        assert self.asked[len(self.asked) - 1].expected == asked.expected[len(had) :]

    @rule(count=st.integers(1, 24))
    def turn(self, count: int) -> None:
        self.shard.turn(count)

    @precondition(lambda self: self.shard.store.flights)
    @rule(data=st.data(), layers=st.integers(1, LAYERS + 2))
    def arrive(self, data: st.DataObject, layers: int) -> None:
        digest = data.draw(st.sampled_from(sorted(self.shard.store.flights)))
        for _ in range(layers):
            if digest in self.shard.store.flights:
                self.shard.store.hand_over(digest)

    @precondition(lambda self: self.shard.store.flights)
    @rule(data=st.data())
    def break_off(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(self.shard.store.flights)))
        self.shard.store.break_off(digest, AdapterCorrupt("broken off"))
        self.broken.add(digest)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.running()))
        self.shard.loop.cancel(request_id, self.shard.sink)
        self.cancelled.add(request_id)

    @invariant()
    def every_book_balances(self) -> None:
        self.seen["steps"] += 1
        if self.asked:
            self.shard.loop.check()
        self.seen["waves"] += any(p.rows for p in self.shard.loop.progress())

    @invariant()
    def every_token_is_right(self) -> None:
        for request_id in self.asked:
            tokens = self.shard.tokens(request_id)
            assert tokens == self.asked[request_id].expected[: len(tokens)]

    @invariant()
    def what_is_reported_adds_up(self) -> None:
        told = self.shard.events[-1]
        running = len(self.running())
        assert told.admitted <= len(self.asked)
        if told.admitted == len(self.asked) and all(map(self.shard.last, self.cancelled)):
            assert told.capacity.rows_free == ROWS - running

    def teardown(self) -> None:
        """All adapters arrive: then all rows end in as many turns as they have tokens, at most.

        One step ahead, there may be a turn beside each in which a step is only fetched.
        """
        if not hasattr(self, "shard"):
            return
        for digest in list(self.shard.store.flights):
            self.shard.load(digest)
        self.shard.turn()
        most = sum(len(self.asked[i].prompt + self.asked[i].expected) for i in self.running())
        most *= 1 + self.late
        turns = 0
        while self.running():
            assert turns <= most, "somebody waits for ever"
            self.shard.turn()
            turns += 1
        self.shard.turn()
        self.shard.loop.check()
        self.seen["stopped"] += self.shard.loop.preemptions
        self.seen["dropped"] += self.shard.dropped
        for request_id, asked in self.asked.items():
            self.ended_well(request_id, asked)
        capacity = self.shard.events[-1].capacity
        assert (capacity.rows_free, capacity.pages_free) == (ROWS, capacity.pages_total)
        assert (capacity.lanes_in_use, capacity.pending_tokens) == (0, 0)
        assert self.shard.events[-1].admitted == len(self.asked)

    def running(self) -> list[int]:
        return [i for i in self.asked if self.shard.last(i) is None and i not in self.cancelled]

    def ended_well(self, request_id: int, asked: Asked) -> None:
        last = self.shard.last(request_id)
        assert last is not None
        assert all(event.finish is None for event in self.shard.rows[request_id][:-1])
        cached = [event.cached_tokens for event in self.shard.rows[request_id]]
        assert not any(cached[1:])
        assert cached[0] < len(asked.prompt)
        self.seen["cached"] += cached[0] > 0
        if last.finish in (Finish.LENGTH, Finish.STOP_TOKEN):
            tokens = self.shard.tokens(request_id)
            assert tokens == asked.expected
            assert (last.finish is Finish.STOP_TOKEN) == (tokens[-1] in asked.stops)
            self.seen["whole"] += 1
            self.seen["early"] += len(tokens) < asked.more
        elif last.finish is Finish.ERROR:
            assert isinstance(last.error, Overloaded) or asked.digest in self.broken
        else:
            assert request_id in self.cancelled


@pytest.mark.timeout(300)
@pytest.mark.parametrize("late", [False, True])
def test_whatever_happens_in_any_order_nothing_is_lost_shared_or_kept_waiting(late: bool) -> None:
    seen: Counter[str] = Counter()

    run_state_machine_as_test(
        lambda: LoopMachine(seen, late=late),
        settings=settings(max_examples=300, stateful_step_count=60, deadline=None),
    )

    assert seen["steps"] - seen["runs"] > 10_000
    rare = ("stopped", "cached", "whole", "early", "dropped" if late else "waves")
    assert all(seen[event] > 10 for event in rare), seen
