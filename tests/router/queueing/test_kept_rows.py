"""The last free rows are for flows that have less than their share, if there are any."""

from loralane_router.queueing.kept_rows import LEAD, Keeper, Taken


def alike(flow: str) -> float:
    return 1.0


def kept_from(taken: Taken, flow: str = "flood", weight_of=alike) -> int:
    """Of how many free rows a flow may have none, at most."""
    keeper = Keeper(taken, weight_of)
    return max((n for n in range(taken.total + 1) if keeper.kept_from(flow, n)), default=0)


def test_three_rows_of_sixteen_are_kept_from_a_flow_that_has_its_share():
    others = {"a": 16, "flood": 16}

    assert kept_from(Taken(32, {"a": 3, "flood": 16}, others)) == 6
    assert kept_from(Taken(16, {"a": 3, "flood": 8}, others)) == 3
    assert kept_from(Taken(5, {"a": 1, "flood": 3}, others)) == 0


def test_nothing_is_kept_from_a_flow_that_has_less_than_its_share():
    assert kept_from(Taken(32, {"a": 8, "flood": 15}, {"a": 32})) == 0


def test_no_more_rows_are_kept_than_the_others_took_lately():
    assert kept_from(Taken(32, {"flood": 30}, {"flood": 32})) == 0
    assert kept_from(Taken(32, {"flood": 30}, {"flood": 30, "a": 1, "b": 1})) == 2


def test_a_share_is_by_the_weight_of_all_flows_that_have_rows_or_had_some_lately():
    def gold(flow: str) -> float:
        return 3.0 if flow == "flood" else 1.0

    lately = {"a": 16, "b": 16}

    assert kept_from(Taken(32, {"flood": 10, "a": 1}, lately)) == 0
    assert kept_from(Taken(32, {"flood": 11, "a": 1}, lately)) == 6
    assert kept_from(Taken(32, {"flood": 19, "a": 1}, lately), weight_of=gold) == 0
    assert kept_from(Taken(32, {"flood": 20, "a": 1}, lately), weight_of=gold) == 6


def test_a_share_is_one_row_at_least():
    flows = {f"f{n}": 1 for n in range(30)}
    many = {f"g{n}": 1 for n in range(32)}

    assert kept_from(Taken(32, flows, many)) == 0
    assert kept_from(Taken(32, flows | {"flood": 1}, many)) == 6


def test_a_row_that_was_just_given_away_counts():
    keeper = Keeper(Taken(32, {"flood": 15}, {"a": 32}), alike)

    before = keeper.kept_from("flood", 6)
    keeper.take("flood")

    assert not before
    assert keeper.kept_from("flood", 6)


def test_how_far_others_may_get_ahead_is_by_rows_and_weight():
    keeper = Keeper(Taken(32), lambda flow: 2.0)

    assert keeper.lead("flood") == 32 * LEAD / 2
