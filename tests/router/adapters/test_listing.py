"""Adapters of all shards as one list, in any state that shards can be in."""

from hypothesis import given
from hypothesis import strategies as st
from loralane_proto import shard_pb2 as pb
from loralane_router.adapters.listing import Listing
from loralane_router.adapters.names import Names
from loralane_router.adapters.registry import Registry

NAMES = ("a", "b", "c")
DIGESTS = ("1", "2", "3", "4")

#: What happens, one after another: (shard, event, digest, name).
EVENTS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["described", "unloaded", "resident", "alias"]),
        st.sampled_from(DIGESTS),
        st.sampled_from(NAMES),
    ),
    max_size=30,
)


def happen(names: Names, registry: Registry, event: str, digest: str, name: str) -> None:
    if event == "described":
        registry.remember(pb.Adapter(digest=digest, reference=name, tier=pb.TIER_DISK))
    elif event == "unloaded":
        names.forget(registry.forget(digest))
    elif event == "resident":
        registry.observe([pb.Residency(digest=digest, tier=pb.TIER_DEVICE)])
    elif (facts := registry.find(name)) is not None:
        names.add(f"alias-of-{name}", name)
        registry.called(f"alias-of-{name}", facts)


@given(EVENTS, st.integers(1, 4))
def test_every_adapter_of_every_shard_is_under_a_name_and_every_name_is_there_once(events, size):
    names = Names(None)
    at = {f"shard-{number}": Registry(names) for number in range(3)}
    listing = Listing(names)

    for number, event, digest, name in events:
        happen(names, at[f"shard-{number}"], event, digest, name)
        listing.page(at, 1, "")  # what it keeps must not be used beyond the next change

    shown = []
    page = listing.page(at, size, "")
    while page.entries:
        shown += page.entries
        page = listing.page(at, size, page.entries[-1].name)
    assert [entry.name for entry in shown] == sorted({entry.name for entry in shown})
    assert page.total == len(shown)
    assert names.aliases() <= {entry.name for entry in shown}
    for entry in shown:
        for place in entry.shards:
            assert at[place.shard].known(place.facts.digest) is place.facts
    for address, registry in at.items():
        registry.check()
        listed = {p.facts.digest for entry in shown for p in entry.shards if p.shard == address}
        known = {digest for digest in DIGESTS if registry.known(digest)}
        assert listed == known
