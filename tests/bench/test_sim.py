"""The simulator: small runs by hand, nothing lost, the same seed the same run, the real policy."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from loralane_router.fleet import load, routing
from loralane_router.queueing import admission, fairness, ledger, queues
from loralane_server.scheduling import planner

from bench.plots import LARGEST, latency_against_load
from bench.sim import front, policies, shard
from bench.sim.__main__ import GOALS, OURS, main, missed_goals
from bench.sim.cluster import Cluster, Late
from bench.sim.costs import Costs
from bench.sim.events import Events
from bench.sim.front import Front
from bench.sim.goodput import Trial, goodput
from bench.sim.policies import POLICIES
from bench.sim.shard import Row
from bench.sim.traces import ADAPTERS, WORKLOADS, Arrival, Workload, trace

#: A step takes 1 s, each prompt token 0.01 s more, a copy 2 s, a fetch 5 s; four tokens in a step.
COSTS = Costs(
    step_s=1.0,
    row_s=0.0,
    token_s=0.01,
    rank_s=0.0,
    step_tokens=4,
    rows=2,
    slots=1,
    host_adapters=2,
    copy_s=2.0,
    fetch_s=5.0,
)
MANY = Workload("many", exponent=0.5, cv=2.0)


def first_shard(fronts: Sequence[Front], row: Row, now: float) -> int:
    return 0


def played(arrivals: Sequence[Arrival], costs: Costs = COSTS) -> Cluster:
    cluster = Cluster(first_shard, costs, shards=1)
    cluster.play(arrivals, rate=1.0)
    cluster.check()
    return cluster


def request(at: float, adapter: str = "a", prompt: int = 4, answer: int = 1) -> Arrival:
    return Arrival(at, adapter, 8, prompt, answer)


def test_one_request_by_hand():
    cluster = played([request(10.0, prompt=6, answer=3)])

    # Fetched for 5 s, copied for 2; steps of 4 and 2 tokens (1.04 and 1.02 s); two decoding steps.
    assert cluster.first == {0: pytest.approx(10 + 5 + 2 + 1.04 + 1.02)}
    assert cluster.ended == {0: pytest.approx(cluster.first[0] + 2)}
    assert cluster.outcome().fetches == 1
    assert cluster.outcome().copies == 1


def test_a_prompt_waits_for_the_step_under_way_and_shares_its_steps_with_decoding_rows():
    cluster = played([request(0.0, answer=10), request(9.5, prompt=4)])

    # The first token of the first at 8.04, so its steps end at 9.04, 10.04; then 3 of the second's
    # tokens fit beside its own, and the last one.
    assert cluster.first == {0: pytest.approx(8.04), 1: pytest.approx(10.04 + 1.03 + 1.01)}
    assert cluster.ended[0] == pytest.approx(8.04 + 9 + 0.04)


def test_an_adapter_waits_for_the_slot_of_another_and_comes_back_from_the_host():
    cluster = played([request(0.0, "a", answer=3), request(1.0, "b"), request(2.0, "a")])

    # a: fetched, copied and computed until 8.04, ends at 10.04. b was fetched meanwhile and waits
    # for the only slot; the second request of a joins the first there, at 8.04.
    first, second, third = (cluster.first[number] for number in range(3))
    assert first == pytest.approx(8.04)
    assert third == pytest.approx(8.04 + 1.03 + 1.01)
    assert second == pytest.approx(10.08 + 2 + 1.04)
    assert cluster.outcome().fetches == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", POLICIES)
def test_every_request_ends_once_and_the_same_seed_gives_the_same_run(name: str):
    arrivals = trace(MANY, requests=150, seed=3)
    costs = Costs(rows=6, slots=2, host_adapters=8)
    runs = [Cluster(POLICIES[name](), costs, shards=3) for _ in range(2)]

    for cluster in runs:
        cluster.play(arrivals, rate=3.0)
        cluster.check()

    cluster, again = runs
    assert len(cluster.arrived) == len(cluster.first) == len(cluster.ended) == 150
    assert all(cluster.arrived[i] < first for i, first in cluster.first.items())
    assert all(cluster.first[i] <= end for i, end in cluster.ended.items())
    assert again.ended == cluster.ended


def test_books_are_right_after_every_event():
    arrivals = trace(MANY, requests=60, seed=5)
    checked = Counter[int]()

    def checking(fronts: Sequence[Front], row: Row, now: float) -> int:
        for end in fronts:
            end.check()
        checked[row.request_id] += 1
        return row.request_id % len(fronts)

    cluster = Cluster(checking, Costs(rows=4, slots=2, host_adapters=3), shards=2)
    cluster.play(arrivals, rate=20.0)

    assert checked == dict.fromkeys(range(60), 1)


def test_what_decides_is_the_products_own_code():
    assert policies.choose is routing.choose
    assert front.admit is admission.admit
    assert front.load_of is load.load_of
    assert front.Queues is queues.Queues
    assert front.Ledger is ledger.Ledger
    assert front.FairShares is fairness.FairShares
    assert shard.plan_step is planner.plan_step


def test_the_products_policy_takes_the_shard_with_the_least_expected_time():
    ours = POLICIES[OURS]()
    chosen: list[int] = []

    def watched(fronts: Sequence[Front], row: Row, now: float) -> int:
        views = [front.view(row.adapter) for front in fronts]
        seconds = [routing.expected_s(view, routing.Need(row.prompt, 1)) for view in views]
        chosen.append(ours(fronts, row, now))
        assert seconds[chosen[-1]] == min(seconds)
        return chosen[-1]

    cluster = Cluster(watched, Costs(rows=6, slots=2, host_adapters=8), shards=3)
    cluster.play(trace(MANY, requests=100, seed=1), rate=2.0)

    assert Counter(chosen).keys() == {0, 1, 2}
    assert len(chosen) == 100


def test_a_trace_played_faster_is_the_same_trace():
    workload = WORKLOADS[1]

    arrivals = trace(workload, requests=5000, seed=1)

    assert arrivals == trace(workload, requests=5000, seed=1)
    assert arrivals != trace(workload, requests=5000, seed=2)
    assert arrivals[-1].at / 5000 == pytest.approx(1, rel=0.1)


def test_a_crowd_asks_for_an_adapter_that_nobody_used_before():
    crowd = trace(WORKLOADS[3], requests=10_000, seed=1)

    numbers = [i for i, arrival in enumerate(crowd) if arrival.adapter == f"a{ADAPTERS}"]

    assert min(numbers) >= 5000
    assert max(numbers) < 8000
    assert len(numbers) / 3000 == pytest.approx(0.3, rel=0.1)


def test_a_run_ends_as_soon_as_too_many_are_late():
    late = Late(limit_s=0.5, allowed=1)
    cluster = Cluster(first_shard, COSTS, shards=1)

    cluster.play([request(float(i)) for i in range(30)], 1.0, late)

    assert late.too_many
    assert len(cluster.ended) < 30


def test_goodput_is_where_the_first_tokens_come_too_late():
    # One step of 0.7 s for each request and one at a time: 1 / 0.7 requests a second, if the
    # queue may grow by no more than the 0.8 s that are left.
    costs = replace(COSTS, step_s=0.7, token_s=0.0, rows=1, copy_s=0.0, fetch_s=0.0)
    arrivals = [request(float(i)) for i in range(300)]

    rate = goodput(Trial(lambda: first_shard, [arrivals], costs, shards=1))

    assert rate == pytest.approx(1 / 0.7, rel=0.02)


def test_events_of_one_moment_happen_in_the_order_in_which_they_were_set():
    events, seen = Events(), list[int]()
    for number in range(5):
        events.at(1.0, lambda number=number: seen.append(number))  # type: ignore[misc]

    while events.step():
        pass

    assert seen == [0, 1, 2, 3, 4]


def test_a_goal_that_is_missed_is_named():
    row = {OURS: 100.0, "least loaded": 50.0, "ray multiplex": 99.0}

    assert missed_goals({"calm": row}) == [
        f"calm: 1.01 x ray multiplex, must be {GOALS['ray multiplex']:.2f}"
    ]


def test_the_bench_writes_what_the_picture_is_drawn_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("bench.sim.__main__._LOADS", (10, 20))
    out, picture = tmp_path / "sim.json", tmp_path / "routing.png"

    arguments = ["--requests=60", "--traces=zipf 1.2", f"--policies={OURS},random"]

    status = main([*arguments, f"--out={out}"])
    results = json.loads(out.read_text())
    latency_against_load(results, picture)

    assert status == 0
    assert results["goodput"].keys() == {"zipf 1.2"}
    assert [point["rate"] for point in results["curves"][OURS]] == [10, 20]
    assert 1000 < picture.stat().st_size <= LARGEST
