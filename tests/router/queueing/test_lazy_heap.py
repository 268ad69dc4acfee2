"""A heap whose keys grow: the least is found, whatever happened before."""

from hypothesis import given, settings
from hypothesis import strategies as st
from loralane_router.queueing.lazy_heap import LazyHeap


def test_a_key_that_grew_is_noticed_when_its_item_comes_to_the_front():
    keys = {"a": 1, "b": 2}
    heap = LazyHeap(keys.__getitem__)
    heap.put("a")
    heap.put("b")

    keys["a"] = 3

    assert (heap.first(), heap.nearest(5)) == ("b", ["b", "a"])


def test_an_item_whose_key_fell_is_put_again_and_counts_once():
    keys = {"a": 5, "b": 2}
    heap = LazyHeap(keys.__getitem__)
    heap.put("a")
    heap.put("b")

    keys["a"] = 1
    heap.put("a")

    assert heap.nearest(5) == ["a", "b"]
    assert len(heap) == 2
    heap.check()


def test_who_is_not_accepted_is_passed_over_and_stays():
    heap = LazyHeap(lambda item: item)
    for number in (3, 1, 2):
        heap.put(number)

    assert heap.first(lambda number: number > 1) == 2
    assert heap.first(lambda number: number > 3) is None
    assert heap.nearest(3) == [1, 2, 3]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-3, 5)), max_size=60))
def test_it_agrees_with_sorting_after_any_history(changes):
    keys: dict[int, int] = {}
    heap = LazyHeap(keys.__getitem__)

    for item, change in changes:
        if item not in heap:
            keys[item] = change
            heap.put(item)
        elif change == 0:
            heap.remove(item)
            del keys[item]
        else:
            keys[item] += change
            if change < 0:
                heap.put(item)
        heap.check()

        found = heap.nearest(99)
        assert [keys[i] for i in found] == sorted(keys.values())
        assert sorted(found) == sorted(keys)
