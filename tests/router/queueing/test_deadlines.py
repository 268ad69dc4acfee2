"""Who gives up on an adapter, and when: the decision, the book of waits, and both at random."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from loralane_proto import shard_pb2 as pb
from loralane_router.queueing.deadlines import AdapterWait, AdapterWaits, wait_of
from loralane_router.requests import Parameters, TextRequest


def wait(arrived=0.0, at_most_s=1.0, policy="fail") -> AdapterWait:
    return AdapterWait(arrived, at_most_s, policy)


def never(digest: str) -> bool:
    return False


@pytest.mark.parametrize(
    ("now", "ready", "started", "over"),
    [
        (10.9, False, False, False),
        (11.0, False, False, True),
        (99.0, False, False, True),
        (99.0, True, False, False),
        (99.0, False, True, False),
        (99.0, True, True, False),
    ],
)
def test_a_wait_is_over_at_its_end_unless_the_adapter_is_ready_or_answers(
    now, ready, started, over
):
    assert wait(arrived=10.0).is_over(now, ready=ready, started=started) is over


def test_only_a_request_that_says_so_gives_up():
    request = TextRequest("two", "a", Parameters())
    bounded = TextRequest(
        "two", "a", Parameters(), max_wait_for_adapter_s=2.5, adapter_wait_policy="base"
    )

    assert wait_of(request, 7.0) is None
    assert wait_of(bounded, 7.0) == AdapterWait(7.0, 2.5, "base")


def test_the_error_names_the_adapter_the_wait_and_what_asked_for_it():
    error = wait(arrived=10.0, at_most_s=0.25).error("org/two", 10.3)

    assert (error.kind, error.status.http) == (pb.ERROR_KIND_LOADING, 503)
    assert error.retry_after_s == 1.0
    for word in ("'org/two'", "0.300 s", "max_wait_for_adapter_ms=250"):
        assert word in error.message


def test_those_whose_wait_is_over_are_given_once_and_in_time():
    waits = AdapterWaits()
    waits.add(1, "a", wait(at_most_s=2.0))
    waits.add(2, "b", wait(at_most_s=1.0))

    assert (waits.next_end, waits.due(0.9, never)) == (1.0, [])
    assert waits.due(1.0, never) == [(2, wait(at_most_s=1.0))]
    assert (waits.next_end, waits.due(1.5, never)) == (2.0, [])
    assert waits.due(5.0, never) == [(1, wait(at_most_s=2.0))]
    assert (waits.next_end, len(waits)) == (None, 0)
    waits.check()


def test_who_waits_beside_a_ready_adapter_gives_up_when_it_goes():
    waits = AdapterWaits()
    waits.add(1, "a", wait())

    assert waits.due(3.0, lambda digest: digest == "a") == []
    assert waits.next_end is None
    assert waits.due(4.0, never) == [(1, wait())]
    waits.check()


def test_who_was_answered_never_gives_up():
    waits = AdapterWaits()
    waits.add(1, "a", wait())
    waits.add(2, "a", wait())
    assert waits.due(1.0, lambda digest: True) == []

    waits.drop(1)
    waits.drop(1)
    waits.drop(3)

    assert waits.due(2.0, never) == [(2, wait())]
    waits.check()


def test_a_request_that_moves_to_another_adapter_is_watched_for_that_one():
    waits = AdapterWaits()
    waits.add(1, "a", wait())
    waits.drop(1)
    waits.add(1, "b", wait())

    assert waits.due(1.0, lambda digest: digest == "b") == []
    assert waits.due(1.0, lambda digest: digest == "a") == [(1, wait())]
    waits.check()


def test_ends_of_answered_requests_are_not_kept():
    waits = AdapterWaits()
    for request_id in range(10_000):
        waits.add(request_id, "a", wait(at_most_s=3600.0))
        waits.drop(request_id)
        waits.check()

    assert waits.next_end is None


class Waits(RuleBasedStateMachine):
    """Against a list that is searched from end to end at every look."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = AdapterWaits()
        self.naive: dict[int, tuple[str, AdapterWait]] = {}
        self.ready: set[str] = set()
        self.now = 0.0
        self.ids = 0

    @rule(digest=st.sampled_from("abc"), at_most=st.integers(1, 20))
    def add(self, digest: str, at_most: int) -> None:
        self.ids += 1
        self.naive[self.ids] = digest, wait(self.now, float(at_most))
        self.waits.add(self.ids, *self.naive[self.ids])

    @precondition(lambda self: self.naive)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.naive)))
        del self.naive[request_id]
        self.waits.drop(request_id)

    @rule(digest=st.sampled_from("abc"))
    def come_or_go(self, digest: str) -> None:
        self.ready ^= {digest}

    @rule(seconds=st.integers(0, 9))
    def look(self, seconds: int) -> None:
        self.now += seconds
        over = {
            request_id
            for request_id, (digest, one) in self.naive.items()
            if one.is_over(self.now, ready=digest in self.ready, started=False)
        }

        found = self.waits.due(self.now, self.ready.__contains__)

        assert len(found) == len(over)
        assert {(id, one) for id, one in found} == {(id, self.naive[id][1]) for id in over}
        for request_id in over:
            del self.naive[request_id]

    @invariant()
    def nobody_is_lost(self) -> None:
        self.waits.check()
        assert len(self.waits) == len(self.naive)
        ahead = [one.ends for _, one in self.naive.values() if one.ends > self.now]
        if ahead:
            assert self.waits.next_end is not None
            assert self.waits.next_end <= min(ahead)


TestWaits = Waits.TestCase
TestWaits.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
