"""Which adapters are read to memory while their requests wait."""

from loralane_router.queueing.admission import Ask
from loralane_router.queueing.lookahead import LOOK_AHEAD, to_prefetch
from loralane_router.queueing.queues import Queues


def ask(digest: str, *, cold: bool = True) -> Ask:
    return Ask(1, digest, 1, 8 if digest else 0, 0.0, cold)


def test_cold_adapters_are_prefetched_in_the_order_of_their_turns():
    upcoming = [ask("first"), ask("warm", cold=False), ask("", cold=False), ask("last")]

    assert to_prefetch(upcoming, held=(), asked=()) == ["first", "last"]


def test_an_adapter_that_is_loaded_or_was_asked_for_is_left_alone():
    upcoming = [ask("loading"), ask("asked"), ask("new")]

    assert to_prefetch(upcoming, held={"loading"}, asked={"asked"}) == ["new"]


def test_it_looks_so_far_ahead_and_no_further_at_overdue_turns_first_and_then_by_share():
    queues = Queues()
    for number in range(100):
        digest = f"{number:02}"
        tokens = 100 - number if number % 2 else 0
        queues._shares.charge(digest, generated=tokens)
        queues.append(Ask(number, digest, 1, 8, number / 10, True, digest, tokens))

    upcoming = queues.upcoming(LOOK_AHEAD, overdue=0.25)

    by_share = list(range(4, 100, 2))
    assert [ask.request_id for ask in upcoming] == [0, 1, 2, *by_share][:LOOK_AHEAD]
    assert len(queues.upcoming(LOOK_AHEAD, overdue=99.0)) == LOOK_AHEAD
    queues.check()
