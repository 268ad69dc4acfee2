import torch
from hypothesis import given
from hypothesis import strategies as st
from loralane_server.adapters.reading.reader import LayerTensors
from loralane_server.adapters.store.host_cache import HostCache
from loralane_server.device.seam import TargetTensors

from tests.server.adapters.samples import FUZZ


def layer(number: int, nbytes: int = 10) -> LayerTensors:
    half = torch.zeros(1)
    return LayerTensors(number, {"q_proj": TargetTensors(half, half)}, nbytes)


def filled(*digests: str, capacity: int = 40) -> HostCache:
    """Two layers of 10 bytes for each digest."""
    cache = HostCache(capacity)
    for digest in digests:
        assert cache.put(digest, layer(0))
        assert cache.put(digest, layer(1))
    return cache


def test_what_was_put_is_found_and_counted() -> None:
    cache = filled("a")

    assert cache.get("a", 1) is not None
    assert cache.get("a", 2) is None
    assert cache.get("b", 0) is None
    assert (cache.bytes, cache.bytes_of("a"), cache.layers_of("a")) == (20, 20, 2)
    cache.check()


def test_the_least_recently_used_adapter_leaves_as_a_whole() -> None:
    cache = filled("a", "b")
    cache.get("a", 0)

    assert cache.put("c", layer(0))

    assert [cache.layers_of(digest) for digest in "abc"] == [2, 0, 1]
    cache.check()


def test_a_pinned_adapter_is_never_evicted() -> None:
    cache = filled("a", "b")
    cache.pin("a", True)
    cache.pin("b", True)

    assert not cache.put("c", layer(0))
    cache.pin("b", False)
    assert cache.put("c", layer(0))

    assert [cache.layers_of(digest) for digest in "abc"] == [2, 0, 1]
    cache.check()


def test_what_can_never_fit_evicts_nobody() -> None:
    cache = filled("a", "b")

    assert not cache.put("c", layer(0, nbytes=41))

    assert cache.bytes == 40
    cache.check()


def test_an_adapter_never_evicts_itself() -> None:
    cache = filled("a", capacity=20)

    assert not cache.put("a", layer(2))

    assert cache.layers_of("a") == 2
    cache.check()


def test_putting_a_layer_again_counts_it_once() -> None:
    cache = filled("a")

    assert cache.put("a", layer(0, nbytes=15))

    assert cache.bytes == 25
    cache.check()


def test_dropping_frees_even_what_is_pinned() -> None:
    cache = filled("a")
    cache.pin("a", True)

    assert cache.drop("a") == 20
    assert cache.drop("a") == 0

    assert cache.bytes == 0
    cache.check()


def test_what_is_held_or_pinned_is_named() -> None:
    cache = filled("a", "b")
    cache.pin("b", True)
    cache.pin("c", True)

    assert cache.digests == {"a", "b"}
    assert cache.pinned == {"b", "c"}
    assert [cache.is_held(digest) for digest in "abcd"] == [True, True, True, False]


def test_an_adapter_could_be_held_beside_those_that_are_pinned() -> None:
    cache = filled("a", "b", capacity=40)
    cache.pin("b", True)

    assert cache.could_hold("c", 20)
    assert not cache.could_hold("c", 21)
    assert cache.could_hold("b", 40)


OPERATIONS = st.tuples(
    st.sampled_from(["put", "get", "drop", "pin", "unpin"]),
    st.sampled_from("abc"),
    st.integers(0, 2),
    st.integers(0, 25),
)


@FUZZ
@given(st.lists(OPERATIONS, max_size=30))
def test_its_books_balance_whatever_happens(operations: list[tuple[str, str, int, int]]) -> None:
    cache = HostCache(40)

    for verb, digest, number, nbytes in operations:
        match verb:
            case "put":
                cache.put(digest, layer(number, nbytes))
            case "get":
                cache.get(digest, number)
            case "drop":
                cache.drop(digest)
            case _:
                cache.pin(digest, verb == "pin")
        cache.check()
