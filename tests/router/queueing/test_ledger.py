"""The room that is left: what the shard reported, less what it cannot know of yet."""

import pytest
from loralane_proto import shard_pb2 as pb
from loralane_router.adapters.facts import AdapterFacts
from loralane_router.errors import RequestError
from loralane_router.queueing.admission import Ask
from loralane_router.queueing.ledger import HEADROOM_PAGES, Ledger


def capacity(rows=4, pages=16, lanes_in_use=0, pending_tokens=0) -> pb.Capacity:
    return pb.Capacity(
        rows_total=4,
        rows_free=rows,
        pages_total=16,
        pages_free=pages,
        page_tokens=16,
        lanes_total=32,
        lanes_free=32 - lanes_in_use,
        lanes_in_use=lanes_in_use,
        pending_tokens=pending_tokens,
    )


def room(ledger: Ledger) -> tuple[int, int, int]:
    left = ledger.room()
    return left.rows, left.pages, left.lanes


A1, A2, B1 = Ask(1, "a", 3, 8, 0.0), Ask(2, "a", 3, 8, 0.0), Ask(3, "b", 3, 16, 0.0)
BASE = Ask(4, "", 3, 0, 0.0)


def test_what_was_sent_counts_until_a_report_counts_it():
    ledger = Ledger(capacity())
    for ask in (A1, A2, B1):
        ledger.take(ask, now=0.0)

    sent = room(ledger)
    ledger.observe(capacity(rows=3, pages=15, lanes_in_use=8), admitted=1)
    one_counted = room(ledger)
    ledger.observe(capacity(rows=1, pages=10, lanes_in_use=24), admitted=3)

    assert sent == (1, 7, 8)
    assert one_counted == (1, 9, 8)
    assert room(ledger) == (1, 10, 8)
    ledger.check()


def test_a_report_that_is_older_than_what_was_sent_changes_nothing():
    ledger = Ledger(capacity())
    ledger.take(A1, now=0.0)

    ledger.observe(capacity(), admitted=0)

    assert room(ledger) == (3, 13, 24)


def test_an_adapter_whose_counted_row_has_ended_needs_its_lanes_for_the_one_that_is_not_counted():
    ledger = Ledger(capacity())
    ledger.take(A1, 0.0)
    ledger.observe(capacity(rows=3, pages=15, lanes_in_use=8), admitted=1)
    ledger.take(A2, 0.0)
    beside_the_first = room(ledger)

    ledger.observe(capacity(), admitted=1)
    ledger.release(A1)

    assert beside_the_first == (2, 12, 24)
    assert room(ledger) == (3, 13, 24)
    ledger.check()


def test_a_row_that_ended_was_counted_in_whatever_order_one_is_told():
    ledger = Ledger(capacity())
    ledger.take(A1, 0.0)
    ledger.take(B1, 0.0)

    ledger.release(A1)
    ledger.observe(capacity(), admitted=1)

    assert room(ledger) == (3, 13, 16)
    assert (ledger.uses("a"), ledger.uses("b")) == (False, True)
    ledger.check()


def test_what_others_hold_is_not_there():
    ledger = Ledger(capacity())
    ledger.take(BASE, 0.0)

    ledger.observe(capacity(rows=1, pages=8, lanes_in_use=8), admitted=1)

    assert room(ledger) == (1, 8, 24)


def test_pages_that_counted_rows_have_still_to_take_for_their_prompts_are_not_free():
    ledger = Ledger(capacity())

    ledger.observe(capacity(rows=1, pages=14, pending_tokens=2 + 100), admitted=0)

    assert room(ledger) == (1, 14 - 6, 32)


def test_pinned_adapters_hold_their_lanes_and_need_no_more():
    ledger = Ledger(capacity(lanes_in_use=8))
    is_new = ledger.pin(AdapterFacts(digest="a", lanes=8, pinned=True, tier="device"))

    ledger.take(A1, 0.0)

    assert is_new
    assert room(ledger) == (3, 13, 24)
    assert ledger.room().holders["a"].pinned
    assert (ledger.pinned_lanes(without="b"), ledger.pinned_lanes(without="a")) == (8, 0)


def test_it_says_whether_what_is_pinned_has_changed():
    ledger = Ledger(capacity())
    pinned = AdapterFacts(digest="a", lanes=8, pinned=True, tier="device")
    not_there = AdapterFacts(digest="a", lanes=8, pinned=True, tier="disk")

    changes = [ledger.pin(facts) for facts in (pinned, pinned, not_there, not_there)]

    assert changes == [True, False, True, False]
    assert not ledger.unpin("a")


def test_a_request_asks_for_its_prompt_and_a_headroom_and_never_for_more_than_it_needs():
    ledger = Ledger(capacity())
    base = AdapterFacts()

    assert [ledger.pages(tokens) for tokens in (1, 16, 17)] == [1, 1, 2]
    assert ledger.needed_pages(17, 200, base) == 2 + HEADROOM_PAGES
    assert ledger.needed_pages(17, 3, base) == 2


@pytest.mark.parametrize(
    ("prompt", "answer", "lanes", "kind"),
    [
        (250, 7, 0, pb.ERROR_KIND_INVALID_REQUEST),
        (1, 1, 40, pb.ERROR_KIND_TOO_LARGE),
        (1, 1, 32, pb.ERROR_KIND_OVERLOADED),
    ],
)
def test_what_can_never_be_held_or_not_beside_what_is_pinned_is_refused(
    prompt, answer, lanes, kind
):
    ledger = Ledger(capacity())
    ledger.pin(AdapterFacts(digest="pinned", lanes=8, pinned=True, tier="device"))

    with pytest.raises(RequestError) as caught:
        ledger.needed_pages(prompt, answer, AdapterFacts(digest="a", lanes=lanes))

    assert caught.value.kind == kind
