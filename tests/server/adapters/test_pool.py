"""The pool's books: lanes are never shared, never taken from a running row, never lost."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from loralane_server.adapters.pool import AdapterPool, choose_pages, lanes_for
from loralane_server.errors import AdapterInUse, AdapterTooLarge, Overloaded


def resident(pool: AdapterPool, digest: str, rank: int) -> None:
    pool.reserve(digest, rank)
    pool.complete(digest)


@pytest.mark.parametrize(("rank", "lanes"), [(1, 8), (8, 8), (9, 16), (64, 64), (250, 256)])
def test_an_adapter_owns_its_rank_in_whole_pages(rank: int, lanes: int) -> None:
    assert lanes_for(rank) == lanes


def test_adjacent_pages_are_preferred_to_scattered_ones() -> None:
    assert choose_pages([0, 2, 3, 7], 2) == (2, 3)
    assert choose_pages([0, 2, 4], 2) == (0, 2)


def test_the_least_recently_used_idle_adapter_is_evicted() -> None:
    pool = AdapterPool(lanes=24)
    for digest in ("old", "used", "new"):
        resident(pool, digest, rank=8)
    pool.acquire("old")
    pool.release("old")

    evicted = pool.reserve("next", rank=8)

    assert [tenant.digest for tenant in evicted] == ["used"]
    pool.check()


def test_lanes_in_use_pinned_or_being_written_are_not_evicted() -> None:
    pool = AdapterPool(lanes=24)
    resident(pool, "running", rank=8)
    pool.acquire("running")
    resident(pool, "pinned", rank=8)
    pool.pin("pinned", True)
    pool.reserve("loading", rank=8)

    with pytest.raises(Overloaded, match="in use or pinned"):
        pool.reserve("next", rank=1)

    assert pool.lanes_in_use == 24
    pool.check()


def test_a_refused_reservation_evicts_nobody() -> None:
    pool = AdapterPool(lanes=16)
    resident(pool, "idle", rank=8)
    resident(pool, "running", rank=8)
    pool.acquire("running")

    with pytest.raises(Overloaded):
        pool.reserve("two pages", rank=16)

    assert pool.get("idle") is not None


def test_an_adapter_that_can_never_fit_is_told_the_flag() -> None:
    with pytest.raises(AdapterTooLarge, match="--lanes 64"):
        AdapterPool(lanes=32).reserve("big", rank=60)


def test_an_adapter_in_use_cannot_be_unloaded() -> None:
    pool = AdapterPool(lanes=8)
    resident(pool, "a", rank=8)
    pool.acquire("a")

    with pytest.raises(AdapterInUse, match="1 running rows"):
        pool.evict("a")

    pool.release("a")
    assert pool.evict("a") == 8
    assert pool.lanes_free == 8


def test_who_was_told_who_owns_lanes_sees_nothing_change() -> None:
    pool = AdapterPool(lanes=16)
    resident(pool, "stays", rank=8)
    resident(pool, "goes", rank=8)
    told = pool.tenants()

    pool.acquire("stays")
    pool.pin("stays", True)
    pool.evict("goes")

    assert [(t.digest, t.users, t.pinned) for t in told.values()] == [
        ("stays", 0, False),
        ("goes", 0, False),
    ]
    assert [(t.digest, t.users, t.pinned) for t in pool.tenants().values()] == [("stays", 1, True)]
    pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Any order of events keeps the books right and running rows' lanes where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = AdapterPool(lanes=64)
        self.held: dict[str, tuple[int, ...]] = {}

    @rule(digest=st.sampled_from("abcdefgh"), rank=st.integers(1, 40))
    def use(self, digest: str, rank: int) -> None:
        try:
            if self.pool.get(digest) is None:
                self.pool.reserve(digest, rank)
        except Overloaded:
            return
        self.pool.acquire(digest)
        tenant = self.pool.get(digest)
        assert tenant is not None
        self.held[digest] = tenant.pages

    @rule(data=st.data())
    @precondition(lambda self: any(not t.resident for t in self.pool.tenants().values()))
    def finish_a_load(self, data: st.DataObject) -> None:
        loading = [t.digest for t in self.pool.tenants().values() if not t.resident]
        self.pool.complete(data.draw(st.sampled_from(loading)))

    @rule(data=st.data())
    @precondition(lambda self: bool(self.held))
    def end_a_row(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.release(digest)
        tenant = self.pool.get(digest)
        assert tenant is not None
        if tenant.users == 0:
            del self.held[digest]

    @rule(digest=st.sampled_from("abcdefgh"), pinned=st.booleans())
    def pin(self, digest: str, pinned: bool) -> None:
        if self.pool.get(digest) is not None:
            self.pool.pin(digest, pinned)

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        for digest, pages in self.held.items():
            tenant = self.pool.get(digest)
            assert tenant is not None
            assert tenant.pages == pages


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
