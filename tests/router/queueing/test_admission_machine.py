"""Queues, shares, ledger and admission together, in any order of events, on a cranked shard."""

from itertools import combinations, permutations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from loralane_router.queueing.admission import AGE_EVERY, PATIENCE_S
from loralane_router.queueing.fairness import ANSWER_COST, PROMPT_COST
from loralane_router.queueing.weights import Weights

from tests.router.cranked import LANES, CountedShares, Cranked

#: The longest prompt and the longest answer, tokens.
P, M = 12, 10
LANES_OF = {"": 0, "a": LANES, "b": LANES, "c": LANES, "d": 2 * LANES, "e": 3 * LANES}


class AdmissionMachine(RuleBasedStateMachine):
    """A shard that is short of everything, and whatever can happen in front of it."""

    steps = 0

    @initialize(
        rows=st.sampled_from([1, 2, 3, 4, 5, 8, 16]),
        pages=st.integers(6, 24),
        lanes=st.integers(3, 5),
    )
    def start(self, rows: int, pages: int, lanes: int) -> None:
        self.shard = Cranked(rows, pages, lanes * LANES)

    @rule(
        digest=st.sampled_from(sorted(LANES_OF)),
        key=st.sampled_from([None, None, "key:x", "key:y"]),
        prompt=st.integers(1, P),
        answer=st.integers(1, M),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
    )
    def submit(self, digest: str, key: str | None, prompt: int, answer: int, priority: int) -> None:
        shard, lanes = self.shard, LANES_OF[digest]
        pinned = shard.ledger.pinned_lanes(without=digest)
        if lanes <= shard.lanes_total - pinned:
            shard.submit(digest, key, prompt, answer, lanes, priority)

    @rule()
    def admit(self) -> None:
        self.shard.admit()

    @rule()
    def deliver(self) -> None:
        self.shard.deliver()

    @rule()
    def report_late(self) -> None:
        self.shard.report()

    @rule(rounds=st.integers(1, 4))
    def go_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self.shard.round()

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        shard = self.shard
        rows = [row.ask.request_id for row in shard.rows]
        waiting = [request_id for request_id in shard.submitted if request_id in shard.queues]
        if rows or waiting:
            shard.cancel(data.draw(st.sampled_from(rows + waiting)))

    @precondition(lambda self: self.shard.rows and not self.shard.rows[-1].made)
    @rule(pause=st.sampled_from([0.0, 1.5]))
    def refuse(self, pause: float) -> None:
        self.shard.refuse(pause)

    @rule(digest=st.sampled_from("ab"), pinned=st.booleans())
    def pin(self, digest: str, pinned: bool) -> None:
        """As the shard does: refused if its lanes are in use; who is kept out then is told so."""
        shard = self.shard
        shard.deliver()
        held = {row.ask.digest for row in shard.rows if row.ask.lanes} | set(shard.pinned)
        in_use = sum(LANES_OF[d] for d in held | {digest})
        if in_use <= shard.lanes_total:
            shard.pin(digest, LANES, pinned)
            for kept_out, lanes in shard.queues.wanted_lanes().items():
                if lanes > shard.lanes_total - shard.ledger.pinned_lanes(without=kept_out):
                    shard.ended += shard.queues.drop(kept_out)

    @invariant()
    def nothing_is_lost_or_served_twice(self) -> None:
        AdmissionMachine.steps += 1
        if hasattr(self, "shard"):
            self.shard.check()

    def teardown(self) -> None:
        """Without news everybody is served, and in time: nobody waits for what does not come."""
        if not hasattr(self, "shard"):
            return
        shard = self.shard
        left = [i for i in shard.submitted if i not in shard.ended]
        bound = 5 + len(left) * (PATIENCE_S + M + 2)
        rounds = 0
        while len(shard.ended) < len(shard.submitted):
            shard.round()
            rounds += 1
            assert rounds <= bound, "somebody waits for ever"
        shard.check()


def test_nothing_is_lost_and_the_room_is_kept_whatever_happens():
    AdmissionMachine.steps = 0

    run_state_machine_as_test(
        AdmissionMachine, settings=settings(max_examples=300, stateful_step_count=50, deadline=None)
    )

    assert AdmissionMachine.steps >= 10_000


class FairnessMachine(RuleBasedStateMachine):
    """A shard with room for every adapter, so that only rows are shared."""

    steps = 0

    @initialize(
        rows=st.integers(1, 4),
        weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=4, max_size=4),
        step_s=st.sampled_from([0.001, 1.0]),
    )
    def start(self, rows: int, weights: list[float], step_s: float) -> None:
        flows = dict(zip("abcd", weights, strict=True))
        self.shares = CountedShares(Weights.parse({"adapters": flows}))
        self.shard = Cranked(rows, shares=self.shares, step_s=step_s)
        for flow in flows:
            self.shares.flow_of(None, flow, flow)
        #: For two flows that wait: counters and what each got by age when that began.
        self.since: dict[tuple[str, str], tuple[dict[str, float], dict[str, float]]] = {}

    @rule(flow=st.sampled_from("abcd"), prompt=st.integers(1, P), answer=st.integers(1, M))
    def submit(self, flow: str, prompt: int, answer: int) -> None:
        self.shard.submit(flow, prompt=prompt, answer=answer)

    @rule(flow=st.sampled_from("abcd"), count=st.integers(2, 12), answer=st.integers(1, M))
    def flood(self, flow: str, count: int, answer: int) -> None:
        for _ in range(count):
            self.shard.submit(flow, answer=answer)

    @rule(rounds=st.integers(1, 8))
    def go_on(self, rounds: int) -> None:
        for _ in range(rounds):
            self.shard.round()
            self._compare()

    @precondition(lambda self: self.shard.rows)
    @rule()
    def cancel_a_row(self) -> None:
        self.shard.cancel(self.shard.rows[0].ask.request_id)

    @invariant()
    def served_alike(self) -> None:
        FairnessMachine.steps += 1
        if hasattr(self, "shard"):
            self._compare()
            self.shares.check()

    def _compare(self) -> None:
        waiting = [flow for flow in "abcd" if self.shard.queues.waits_for(flow)]
        counters, aged = self._now()
        pairs = set(permutations(waiting, 2))
        self.since = {pair: self.since.get(pair, (counters, aged)) for pair in pairs}
        for (more, less), (counters_then, aged_then) in self.since.items():
            gained = {flow: counters[flow] - counters_then[flow] for flow in (more, less)}
            behind = max(0.0, counters_then[less] - counters_then[more])
            by_age = aged[more] - aged_then[more]
            assert gained[more] - gained[less] <= self._bound(more) + behind + by_age + 1e-6

    def _now(self) -> tuple[dict[str, float], dict[str, float]]:
        shard, shares = self.shard, self.shares
        aged = dict.fromkeys("abcd", 0.0)
        for request_id in shard.queues.aged:
            flow = shard.submitted[request_id].flow
            aged[flow] += shard.served[request_id] / shares.weight_of(flow)
        return {flow: shares.counter(flow) for flow in "abcd"}, aged

    def _bound(self, flow: str) -> float:
        rows = self.shard.rows_total
        return (PROMPT_COST * P + ANSWER_COST * M * rows) / self.shares.weight_of(flow)


def test_flows_that_wait_together_are_served_alike_within_the_bound():
    FairnessMachine.steps = 0

    run_state_machine_as_test(
        FairnessMachine, settings=settings(max_examples=250, stateful_step_count=50, deadline=None)
    )

    assert FairnessMachine.steps >= 10_000


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=2, max_size=4),
    rows=st.integers(1, 4),
    sizes=st.lists(st.tuples(st.integers(1, P), st.integers(1, M)), min_size=4, max_size=4),
)
def test_over_any_time_flows_that_always_wait_are_served_alike(weights, rows, sizes):
    """The bound of `fairness`, 2 B, for every two moments of one busy time."""
    flows = dict(zip("abcd", weights, strict=False))
    shares = CountedShares(Weights.parse({"adapters": flows}))
    shard = Cranked(rows, shares=shares, step_s=0.0)
    for flow in flows:
        shares.flow_of(None, flow, flow)
    lead: dict[tuple[str, str], list[float]] = {pair: [] for pair in combinations(flows, 2)}

    for _ in range(120):
        for flow, (prompt, answer) in zip(flows, sizes, strict=False):
            while sum(ask.flow == flow for ask in waiting_asks(shard)) < rows + 1:
                shard.submit(flow, prompt=prompt, answer=answer)
        shard.round()
        for first, second in lead:
            lead[first, second].append(shares.counter(first) - shares.counter(second))

    for (first, second), leads in lead.items():
        lesser = min(flows[first], flows[second])
        bound = (PROMPT_COST * P + ANSWER_COST * M * rows) / lesser + 1e-6
        assert max(leads) - min(leads) <= 2 * bound
        assert max(map(abs, leads)) <= bound


def waiting_asks(shard: Cranked):
    return [
        ask
        for group in shard.queues.groups("abcd")
        for line in group.lines.values()
        for ask in line.asks.values()
    ]


@settings(deadline=None)
@given(
    rows=st.integers(1, 4),
    flows=st.integers(1, 6),
    answer=st.integers(1, M),
    lead=st.integers(0, 1000),
)
def test_the_least_urgent_request_of_the_most_served_flow_waits_no_longer_than_age_allows(
    rows, flows, answer, lead
):
    shard = Cranked(rows)
    for flow in range(flows):
        shard.submit("", f"urgent {flow}", answer=answer, priority=-1)
    shard.shares.charge("last", generated=lead)
    last = shard.submit("", "last", answer=answer, priority=1)

    rounds = 0
    while last not in shard.admitted:
        for flow in range(flows):
            shard.submit("", f"urgent {flow}", answer=answer, priority=-1)
        shard.round()
        rounds += 1

        # Who goes by age is at the end of that order then: each line goes once before it.
        admissions = AGE_EVERY * (flows + 1)
        assert rounds <= PATIENCE_S + 2 + (admissions / rows + 1) * answer
