from loralane_proto import shard_pb2 as pb
from loralane_router.admission import Ask
from loralane_router.facts import AdapterFacts
from loralane_router.ledger import Ledger


def capacity(rows=4, pages=16, lanes_in_use=0) -> pb.Capacity:
    return pb.Capacity(
        rows_total=4,
        rows_free=rows,
        pages_total=16,
        pages_free=pages,
        page_tokens=16,
        lanes_total=32,
        lanes_free=32 - lanes_in_use,
        lanes_in_use=lanes_in_use,
    )


def room(ledger: Ledger) -> tuple[int, int, int]:
    left = ledger.room()
    return left.rows, left.pages, left.lanes


A1, A2, B1 = Ask(1, "a", 3, 8, 0.0), Ask(2, "a", 3, 8, 0.0), Ask(3, "b", 3, 16, 0.0)
BASE = Ask(4, "", 3, 0, 0.0)


def test_what_was_sent_counts_before_the_shard_says_so():
    ledger = Ledger(capacity())

    for ask in (A1, A2, B1):
        ledger.take(ask, now=0.0)
    ledger.observe(capacity())

    assert room(ledger) == (1, 7, 8)
    ledger.check()


def test_an_adapters_lanes_are_free_when_its_last_row_ends():
    ledger = Ledger(capacity())
    ledger.take(A1, 0.0)
    ledger.take(A2, 0.0)

    ledger.release(A1)
    held = room(ledger)
    ledger.release(A2)

    assert (held, room(ledger)) == ((3, 13, 24), (4, 16, 32))
    ledger.check()


def test_what_others_hold_is_left_alone():
    ledger = Ledger(capacity())
    ledger.take(BASE, 0.0)

    ledger.observe(capacity(rows=1, pages=8, lanes_in_use=8))

    assert room(ledger) == (1, 8, 24)


def test_a_stale_report_does_not_block_an_idle_shard():
    ledger = Ledger(capacity())
    ledger.take(A1, 0.0)
    ledger.release(A1)

    ledger.observe(capacity(rows=0, pages=0, lanes_in_use=32))

    assert room(ledger) == (4, 16, 32)


def test_pinned_adapters_keep_their_lanes_and_need_none():
    ledger = Ledger(capacity())
    ledger.pin(AdapterFacts(digest="a", lanes=8, pinned=True, tier="device"))
    idle = room(ledger)

    ledger.take(A1, 0.0)
    ledger.observe(capacity(rows=3, pages=13, lanes_in_use=8))

    assert (idle, room(ledger)) == ((4, 16, 24), (3, 13, 24))
    assert ledger.room().holders["a"].pinned
    assert (ledger.pinned_lanes(without="b"), ledger.pinned_lanes(without="a")) == (8, 0)


def test_pages_are_rounded_up():
    ledger = Ledger(capacity())

    assert [ledger.pages(tokens) for tokens in (1, 16, 17)] == [1, 1, 2]
