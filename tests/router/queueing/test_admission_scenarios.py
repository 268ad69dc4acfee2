"""What clients see of admission: floods, rotations and scarce room, on a cranked shard."""

from collections import Counter

from loralane_router.queueing.admission import AGE_EVERY, PATIENCE_S
from loralane_router.queueing.fairness import ANSWER_COST, PROMPT_COST
from loralane_router.queueing.kept_rows import LEAD
from loralane_router.queueing.weights import Weights

from tests.router.cranked import LANES, CountedShares, Cranked


def test_a_flow_that_floods_tenfold_delays_nobody_else_by_more_than_one_turn():
    shard = Cranked(rows_total=4, step_s=0.05)
    victims = ["v1", "v2", "v3"]
    for _ in range(200):
        shard.submit("flood", answer=5)

    delays = []
    for _ in range(200):
        for _ in range(10):
            shard.submit("flood", answer=5)
        wanted = {shard.submit(victim, answer=5) for victim in victims}
        before = len(shard.admitted)
        while wanted - set(shard.admitted):
            shard.round()
        others = [shard.submitted[i] for i in shard.admitted[before:]]
        delays.append(Counter(ask.flow for ask in others)["flood"])
        for _ in range(5):
            shard.round()

    # Rows that the flood has already are not taken from it; of those that come free it gets a turn
    # while three others wait, or what is due by age.
    assert max(delays) <= 2
    assert len(shard.rows) == shard.rows_total
    shard.check()


def flooded(rounds: int) -> tuple[Cranked, list[int]]:
    """Let one flow flood 32 rows and three others send one request in three steps between them.

    Returns how many steps each of the latter waited, when the flood was known as one.
    """
    shard, came, waited = Cranked(rows_total=32, step_s=0.1), dict[int, int](), []
    for number in range(rounds):
        for _ in range(3):
            shard.submit("flood", answer=20)
        if number % 3 == 0:
            came[shard.submit(f"v{number % 9}", answer=20)] = number
        for request_id in shard.round():
            if came.get(request_id, 0) > 30:
                waited.append(number - came[request_id])
    shard.check()
    return shard, waited


def test_with_32_rows_nobody_waits_for_a_row_beside_a_flow_that_floods():
    shard, waited = flooded(rounds=300)

    assert len(waited) == 89
    assert max(waited) == 0
    # The flood has all but what the others have and six rows for them.
    assert 24 <= len(shard.rows) <= 32


def test_a_flow_that_is_alone_takes_every_row():
    shard = Cranked(rows_total=32, step_s=0.1)
    for _ in range(100):
        shard.submit("alone", answer=20)

    for _ in range(30):
        shard.round()

    assert len(shard.rows) == 32


def test_a_flow_of_short_answers_gets_ahead_of_one_that_stands_aside_but_not_for_ever():
    shard, leads = Cranked(rows_total=16), []
    for _ in range(500):
        for _ in range(4):
            shard.submit("short", prompt=12, answer=1)
            shard.submit("long", prompt=1, answer=10)
        shard.round()
        leads.append(shard.shares.counter("short") - shard.shares.counter("long"))

    lead = LEAD * 16
    assert lead / 2 <= max(leads) <= lead + PROMPT_COST * 12 + ANSWER_COST * 10 * 16
    shard.check()


def test_with_room_for_one_adapter_the_other_is_served_within_patience_and_one_answer():
    shard = Cranked(rows_total=2, lanes_total=LANES)
    for number, digest in enumerate("ABAA"):
        shard.submit(digest, answer=1 + number)
    b = 1

    while b not in shard.admitted:
        shard.submit("A", answer=3)
        shard.submit("A", answer=4)
        shard.round()

        assert shard.now <= PATIENCE_S + 4 + 2
    assert Counter(shard.submitted[i].digest for i in shard.admitted)["A"] > 2
    shard.check()


def rotation(lanes: int, rounds: int) -> tuple[Cranked, list[int], float]:
    """Let 16 adapters have two requests each at any time.

    Returns the longest wait of each, in steps, and the share of rows that were busy.
    """
    shard = Cranked(rows_total=8, lanes_total=lanes, step_s=0.1)
    adapters = [f"a{number}" for number in range(16)]
    alive = {shard.submit(adapter, answer=5 + n % 31) for n, adapter in enumerate(adapters * 2)}
    waited, busy = Counter[str](), 0
    for _ in range(rounds):
        for request_id in shard.admit():
            ask = shard.submitted[request_id]
            steps = round((shard.now - ask.arrived) / shard.step_s)
            waited[ask.digest] = max(waited[ask.digest], steps)
        shard.deliver()
        busy += len(shard.rows)
        for request_id in shard.step():
            alive.remove(request_id)
            adapter, answer = shard.submitted[request_id].digest, 5 + 7 * request_id % 31
            alive.add(shard.submit(adapter, answer=answer))
    shard.check()
    return shard, [waited[adapter] for adapter in adapters], busy / (8 * rounds)


def test_with_lanes_for_4_of_16_adapters_the_rows_stay_busy_and_nobody_starves():
    all_fit, _, all_busy = rotation(16 * LANES, 1200)
    few_fit, waits, busy = rotation(4 * LANES, 1200)

    assert busy >= 0.75 * all_busy
    assert len(few_fit.ended) >= 0.75 * len(all_fit.ended)
    # Four swaps of two adapters before it: patience once, and for each swap the longest answer.
    assert max(waits) <= PATIENCE_S / 0.1 + 8 * 35
    served = Counter(few_fit.submitted[i].digest for i in few_fit.ended)
    assert min(served.values()) >= 0.5 * len(few_fit.ended) / 16


def test_resident_adapters_are_batched_while_others_wait_for_lanes():
    shard = Cranked(rows_total=4, lanes_total=LANES)
    for digest in ["A", "B", "A", "B", "A", "B", "A"]:
        shard.submit(digest)

    admitted = shard.admit()

    assert [shard.submitted[i].digest for i in admitted] == ["A"] * 4


def test_a_wide_adapter_gets_its_lanes_although_narrow_ones_keep_coming():
    shard = Cranked(rows_total=8, lanes_total=4 * LANES)
    wide = shard.submit("wide", lanes=4 * LANES, answer=2)

    number = 0
    while wide not in shard.admitted:
        for _ in range(4):
            number += 1
            shard.submit(f"narrow {number}", answer=3)
        shard.round()

        assert shard.now <= 2 * PATIENCE_S + 3 + 2
    shard.check()


def test_a_long_prompt_gets_its_pages_although_short_ones_keep_coming():
    shard = Cranked(rows_total=8, pages_total=20)
    for _ in range(8):
        shard.submit("", "short", prompt=4, answer=4)
    shard.round()
    long = shard.submit("", "long", prompt=60, answer=4)

    while long not in shard.admitted:
        for _ in range(4):
            shard.submit("", "short", prompt=4, answer=4)
        shard.round()

        assert shard.now <= PATIENCE_S + 2 * 4 + 2
    shard.check()


def test_urgent_requests_go_first_and_leave_one_admission_in_eight():
    shard = Cranked(rows_total=1)
    for _ in range(100):
        shard.submit("", "patient", priority=1)
    for _ in range(200):
        shard.submit("", "urgent", priority=0)

    for _ in range(10 * AGE_EVERY):
        shard.round()

    flows = Counter(shard.submitted[i].flow for i in shard.admitted)
    assert flows == {"urgent": 10 * (AGE_EVERY - 1), "patient": 10}


def test_two_keys_of_different_weight_that_share_adapters_get_what_they_are_due():
    shares = CountedShares(Weights.parse({"keys": {"gold": 3, "plain": 1}}))
    flows = [shares.flow_of(key, "", "") for key in ("gold", "plain")]
    shard = Cranked(rows_total=4, shares=shares, step_s=0.001)
    for _ in range(400):
        for number, flow in enumerate(flows):
            shard.submit(f"a{number}", flow, prompt=2, answer=3)
            shard.submit(f"b{number}", flow, prompt=2, answer=3)

    for _ in range(300):
        shard.round()

    gold, plain = (shares.charged[flow] for flow in flows)
    assert 2.8 <= gold / plain <= 3.2


class LookedAt(CountedShares):
    """Shares that count how often somebody's counter is looked at."""

    looks = 0

    def counter(self, flow: str) -> float:
        self.looks += 1
        return super().counter(flow)


def looks_in_a_step(flows: int, lanes: int) -> float:
    """How many counters are looked at for each admission when so many flows wait."""
    shares = LookedAt()
    shard = Cranked(rows_total=8, lanes_total=lanes, shares=shares)
    for _ in range(3):
        for flow in range(flows):
            shard.submit(f"a{flow}", answer=3 + flow % 5)
    for _ in range(10):
        shard.round()
    shares.looks, before = 0, len(shard.admitted)

    for _ in range(30):
        shard.round()

    return shares.looks / (len(shard.admitted) - before)


def test_what_an_admission_costs_does_not_grow_with_those_who_wait():
    for lanes in (4 * LANES, 10_000 * LANES):
        few, many = looks_in_a_step(100, lanes), looks_in_a_step(2000, lanes)

        assert many <= 1.5 * few + 10
