"""A bounded share of `make fuzz`, and what the fuzzer itself must notice."""

import mmap
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fuzz.memory import peak_bytes, restart_peak
from tests.fuzz.run import KINDS, MOST_BYTES, MOST_CPU_S, Cost, Report, fuzz, header_case

#: What hangs is far slower; 50 ms are for `make fuzz` on a machine that does nothing else.
CALM_S = 10 * MOST_CPU_S


@pytest.mark.parametrize(("kind", "count"), [("headers", 1600), ("configs", 400)])
def test_mutated_adapters_are_read_or_refused_within_their_bounds(
    kind: str, count: int, tmp_path: Path
) -> None:
    report = fuzz(kind, range(count), tmp_path, most_cpu_s=CALM_S)

    assert not report.failures, "\n".join(report.lines())
    assert report.outcomes.total() == count
    assert report.outcomes["read"] > count / 50, "some mutations leave an adapter whole"
    assert report.outcomes["AdapterCorrupt"] > count / 10
    assert report.outcomes["AdapterIncompatible"] > count / 50


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_case_every_time(kind: str) -> None:
    make = KINDS[kind]

    assert [make(seed) for seed in range(30)] == [make(seed) for seed in range(30)]
    assert len({make(seed) for seed in range(30)}) == 30


def test_an_error_without_a_type_is_a_failure_that_names_its_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "headers", lambda seed: replace(header_case(seed), config=None))

    report = fuzz("headers", range(7, 8), tmp_path)

    assert [seed for seed, _ in report.failures] == [7]
    assert "--headers 1 --configs 0 --first 7" in "\n".join(report.lines())


def test_too_slow_and_too_large_are_failures() -> None:
    report = Report("headers")

    report.add(1, "read", Cost(MOST_CPU_S, MOST_BYTES))
    report.add(2, "read", Cost(MOST_CPU_S * 1.01, 0))
    report.add(3, "read", Cost(0, MOST_BYTES + 1))

    assert [seed for seed, _ in report.failures] == [2, 3]
    assert (report.slowest[1], report.largest[1]) == (2, 3)


def test_the_peak_is_that_of_the_time_since_the_restart() -> None:
    with mmap.mmap(-1, 32 << 20) as large:  # not of the heap, which may have such a hole
        for _ in range(32):
            large.write(bytes(1 << 20))

    before = restart_peak()
    calm = peak_bytes() - before
    with mmap.mmap(-1, 32 << 20) as large:
        for _ in range(32):
            large.write(bytes(1 << 20))
        grown = peak_bytes() - before

    assert calm < 8 << 20
    assert grown > 24 << 20
