"""Which adapters are read to memory while their requests wait."""

import math

from loralane_router.admission import Ask, Line
from loralane_router.lookahead import LOOK_AHEAD, to_prefetch


def line(digest: str, *, cold: bool = True, arrived: float = 0.0, served: float = -math.inf):
    return Line(digest, [Ask(1, digest, 1, 8 if digest else 0, arrived, cold)], served)


def test_cold_adapters_are_prefetched_in_the_order_of_their_turns():
    lines = [line("late", arrived=3.0), line("served", served=2.0), line("early", arrived=1.0)]

    assert to_prefetch(lines, held=(), asked=()) == ["early", "served", "late"]


def test_what_is_in_memory_and_the_base_need_nothing():
    lines = [line("warm", cold=False), line("", cold=False), line("cold")]

    assert to_prefetch(lines, held=(), asked=()) == ["cold"]


def test_an_adapter_that_is_loaded_or_was_asked_for_is_left_alone():
    lines = [line("loading"), line("asked"), line("new")]

    assert to_prefetch(lines, held={"loading"}, asked={"asked"}) == ["new"]


def test_it_looks_ahead_so_far_and_no_further():
    lines = [line(f"{i:03}", arrived=float(i)) for i in range(100)]
    near = [f"{i:03}" for i in range(LOOK_AHEAD)]

    assert to_prefetch(lines, held=(), asked=()) == near
    assert to_prefetch(lines, held=(), asked=near) == []
