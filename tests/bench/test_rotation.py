"""Verdicts on adapters that take turns."""

from bench.rotation import RESIDENT, SCARCE, Turn, promises
from bench.traffic import BROKEN, Answer
from bench.windows import Window


def turn(server: str, rate: float, *tokens: float, failed: int = 0) -> Turn:
    got = {f"s{n}": count for n, count in enumerate(tokens)}
    return Turn(server, rate, 0.1, 0.1, got, dict.fromkeys(got, 0.1), failed, 0.0)


def verdicts(*turns: Turn) -> list[bool]:
    return [promise.holds for promise in promises(turns)]


def test_a_turn_adds_up_tokens_and_tells_the_longest_wait_of_each_adapter():
    answers = [
        Answer("x", 1.0, 5.0, 200, (2.0, 3.0), 2),
        Answer("x", 2.0, 9.0, 200, (6.0, 7.0), 2),
        Answer("y", 3.0, 9.0, BROKEN),
        Answer("z", -2.0, 7.0, 200, (0.5,), 1),
    ]

    got = Turn.of(SCARCE, answers, ("x", "y", "z"), Window(0.0, 6.5), generator=0.2)

    assert got.tokens == {"x": 3.0, "y": 0.0, "z": 1.0}
    assert got.longest == {"x": 4.0, "y": float("inf"), "z": 2.5}
    assert got.rate == 4 / 6.5
    assert got.failed == 1


def test_the_rates_of_all_turns_and_the_sums_of_all_adapters_are_judged():
    turns = [
        turn(RESIDENT, 100.0, 50.0, 50.0),
        turn(SCARCE, 40.0, 40.0, 0.0),
        turn(SCARCE, 80.0, 40.0, 80.0),
        turn(RESIDENT, 100.0, 50.0, 50.0),
    ]

    assert verdicts(*turns) == [True, True, True]


def test_slow_rotation_starvation_and_failures_each_break_a_promise():
    fit = turn(RESIDENT, 100.0, 50.0, 50.0)

    assert verdicts(fit, turn(SCARCE, 59.0, 29.0, 30.0)) == [False, True, True]
    assert verdicts(fit, turn(SCARCE, 60.0, 59.0, 1.0)) == [True, False, True]
    assert verdicts(fit, turn(SCARCE, 60.0, 30.0, 30.0, failed=1)) == [True, True, False]
    assert verdicts(turn(RESIDENT, 0.0, 0.0), turn(SCARCE, 0.0, 0.0))[:2] == [False, False]
