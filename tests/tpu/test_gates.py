from dataclasses import replace
from typing import Any

import pytest

from tests.tpu.handmade import result, without_lora
from tpu.chips import GIB
from tpu.gates import Result, judge
from tpu.records import Compiled

OUT_OF_HBM = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 41G of 31.24G"


def failed(*results: Result) -> set[str]:
    return {verdict.gate for verdict in judge(results) if not verdict.holds}


def test_a_graph_in_which_everything_holds_passes_every_gate() -> None:
    verdicts = judge([without_lora(), result()])

    assert len(verdicts) == 2 * 6 + 1
    assert all(verdict.holds for verdict in verdicts)


@pytest.mark.parametrize(
    ("compiled", "gate"),
    [
        ({"error": "INTERNAL: no such layout"}, "compiles"),
        ({"error": OUT_OF_HBM}, "compiles"),
        ({"temporary": 12 * GIB}, "fits HBM"),
        ({"code": 12 * GIB}, "fits HBM"),
        ({"arguments": 22 * GIB}, "fits HBM"),
        ({"aliases": {3: 0}}, "updated in place"),
        ({"aliases": {3: 1, 5: 0}}, "updated in place"),
        ({"aliased": 1000}, "updated in place"),
        ({"copies": ("copy.7",)}, "updated in place"),
        ({"collectives": {"all-reduce": 1}}, "collectives"),
        ({"host": ("outfeed o.1",)}, "no host transfer"),
        ({"kernels": 31}, "attention kernel"),
    ],
)
def test_each_gate_fails_for_what_it_is_there_for(compiled: dict[str, Any], gate: str) -> None:
    assert gate in failed(without_lora(), result(**compiled))


def test_memory_that_the_graph_takes_no_part_of_counts() -> None:
    fits, too_much = result({"resident": 30 * GIB}), result({"resident": 31 * GIB})

    assert failed(fits, without_lora()) == set()
    assert failed(too_much, without_lora()) == {"fits HBM"}


def test_as_many_collectives_as_the_target_allows_pass() -> None:
    graph = {"collectives": {"v6e-1x1": 2}}

    assert failed(result(graph, collectives={"all-reduce": 2}), without_lora()) == set()
    assert failed(result(graph, collectives={"all-reduce": 3}), without_lora()) == {"collectives"}


@pytest.mark.parametrize(
    ("tokens", "more", "holds"),
    [(16, 399, True), (16, 401, False), (64, 299, True), (64, 301, False)],
)
def test_lora_may_add_so_many_bytes_and_no_more(tokens: int, more: int, holds: bool) -> None:
    base, lora = (
        Result(replace(r.graph, tokens=tokens), r.compiled)
        for r in (without_lora(), result(hbm_read=7000 + more))
    )

    assert (failed(base, lora) == set()) is holds


def test_four_chips_may_read_more_for_lora_than_one() -> None:
    base, lora = (
        Result(replace(r.graph, partitions=4), r.compiled)
        for r in (without_lora(), result(hbm_read=7000 + 799))
    )

    assert failed(base, lora) == set()


@pytest.mark.parametrize("compiled", [{"hbm_written": 1001}, {"flops": 1e9 + 1}])
def test_base_rows_may_not_pay_a_byte_nor_a_flop(compiled: dict[str, Any]) -> None:
    graph = {"lanes": 0}

    assert failed(without_lora(), result(graph)) == set()
    assert failed(without_lora(), result(graph, **compiled)) == {"base rows pay nothing"}


def test_what_cannot_be_compared_does_not_hold() -> None:
    assert failed(result()) == {"LoRA's bytes"}
    assert failed(without_lora(), result(loops=1)) == {"LoRA's bytes"}
    assert failed(without_lora(error="INTERNAL"), result()) == {"compiles", "LoRA's bytes"}


@pytest.mark.parametrize(
    ("error", "holds"), [(OUT_OF_HBM, True), (None, False), ("INTERNAL: no such layout", False)]
)
def test_what_is_too_large_on_purpose_must_be_refused_for_its_memory(
    error: str | None, holds: bool
) -> None:
    graph = {"name": "too-large", "expected": "refused"}

    verdicts = judge([Result(result(graph).graph, Compiled("too-large", "v6e-1x1", 1.0, error))])

    assert [(verdict.gate, verdict.holds) for verdict in verdicts] == [
        ("too large is refused", holds)
    ]
