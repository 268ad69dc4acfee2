from hypothesis import given
from hypothesis import strategies as st
from loralane_router.admission import Ask
from loralane_router.queues import Queues


def ask(request_id: int, digest: str = "a") -> Ask:
    return Ask(request_id, digest, pages=1, lanes=8, arrived=float(request_id))


def ids(queues: Queues, now: float = 0.0) -> dict[str, list[int]]:
    return {line.digest: [a.request_id for a in line.asks] for line in queues.lines(now)}


def test_each_adapter_has_a_queue_in_order_of_arrival():
    queues = Queues()

    for request_id, digest in enumerate("abab"):
        queues.append(ask(request_id, digest))

    assert ids(queues) == {"a": [0, 2], "b": [1, 3]}


def test_a_refused_request_is_first_again_and_held_for_its_pause():
    queues = Queues()
    first, second = ask(1), ask(2)
    queues.append(first)
    queues.append(second)
    queues.take(first, now=0.0)

    queues.put_back(first, until=5.0)

    assert ids(queues, now=4.9) == {}
    assert ids(queues, now=5.0) == {"a": [1, 2]}


def test_only_what_was_served_is_remembered_and_only_while_somebody_waits():
    queues = Queues()
    first, second = ask(1), ask(2)
    queues.append(first)
    queues.append(second)

    queues.take(first, now=7.0)
    (line,) = queues.lines(7.0)
    queues.take(second, now=8.0)

    assert line.served == 7.0
    assert queues._queues == {}
    assert len(queues) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30))
def test_nobody_is_lost_or_kept_too_long(actions):
    queues, alive = Queues(), {}
    for request_id, (digest, remove) in enumerate(actions):
        if remove and alive:
            gone = next(iter(alive))
            queues.remove(gone)
            del alive[gone]
        else:
            queues.append(ask(request_id, digest))
            alive[request_id] = digest

    assert len(queues) == len(alive)
    assert all(request_id in queues for request_id in alive)
    expected: dict[str, list[int]] = {}
    for request_id, digest in alive.items():
        expected.setdefault(digest, []).append(request_id)
    assert ids(queues) == expected
