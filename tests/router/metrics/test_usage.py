"""Sums by adapter under a bound on adapters."""

from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st
from loralane_router.metrics.usage import OTHER, AdapterUsage, Usage


def sums(usage: AdapterUsage) -> Usage:
    total = Usage()
    for row in usage.rows():
        total.add(row.usage)
    return total


def test_every_adapter_has_a_row_under_the_name_it_began_with():
    usage = AdapterUsage()

    usage.begin("d1", "one")
    usage.begin("d1", "uno")
    usage.cold("d1", 0.5)
    usage.first_token("d1", 7, 0.25)
    usage.tokens("d1", 3)

    row, other = usage.rows()
    assert (row.adapter, row.digest) == ("one", "d1")
    assert row.usage == Usage(2, 7, 3, 1, 0.25, 1, 0.5)
    assert (other.adapter, other.digest, other.usage) == (OTHER, "", Usage())


def test_who_was_not_asked_for_longest_is_folded_into_the_others():
    usage = AdapterUsage(most=2)
    for digest in ("a", "b", "a", "c"):
        usage.begin(digest, digest.upper())

    assert [(r.adapter, r.usage.requests) for r in usage.rows()] == [("A", 2), ("C", 1), (OTHER, 1)]


def test_what_still_runs_for_a_folded_adapter_counts_with_the_others():
    usage = AdapterUsage(most=1)
    usage.begin("a", "A")
    usage.begin("b", "B")

    usage.tokens("a", 5)

    assert [r.usage.generated_tokens for r in usage.rows()] == [0, 5]


def test_the_base_is_no_adapter():
    usage = AdapterUsage()

    usage.begin("", "base")
    usage.first_token("", 9, 1.0)
    usage.tokens("", 9)

    assert [row.usage for row in usage.rows()] == [Usage()]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["begin", "first", "tokens", "cold"]), st.integers(0, 9))
)


@given(EVENTS)
def test_no_sum_ever_goes_down_and_rows_are_bounded(events):
    usage = AdapterUsage(most=3)
    before = asdict(sums(usage))

    for kind, number in events:
        digest = f"d{number}"
        match kind:
            case "begin":
                usage.begin(digest, digest)
            case "first":
                usage.first_token(digest, 2, 0.5)
            case "tokens":
                usage.tokens(digest, 1)
            case "cold":
                usage.cold(digest, 0.25)
        after = asdict(sums(usage))

        assert all(after[name] >= before[name] for name in before)
        assert sum(after.values()) > sum(before.values())
        assert len(usage.rows()) <= 4
        before = after
