"""Who computes and who gives its pages back: the oldest always goes on, the youngest stop first."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from loralane_server.kv.pages import PAGE_TOKENS, pages_for
from loralane_server.scheduling.preemption import Claim, StepPlan, beginners, plan_rows

PAGE = PAGE_TOKENS

#: A stream in the middle of a page, and one that needs the next page now.
STREAM = Claim(pending=1, covered=5, grows=True, begun=True, runnable=True, owns=True)
NEEDY = STREAM._replace(covered=0)
#: Two pages of a prompt, not begun.
PROMPT = Claim(pending=2 * PAGE, covered=0, grows=True, begun=False, runnable=True, owns=False)
WAITING = PROMPT._replace(runnable=False)


def test_with_pages_for_all_everybody_computes() -> None:
    plan = plan_rows([STREAM, NEEDY, PROMPT], budget=100, free=10)

    assert plan == StepPlan((1, 1, 2 * PAGE))


def test_the_youngest_gives_its_pages_back_for_an_older_row() -> None:
    assert plan_rows([NEEDY, STREAM, STREAM], budget=100, free=0).stop == 2
    assert plan_rows([STREAM, NEEDY, STREAM], budget=100, free=0).stop == 2


def test_the_youngest_keeps_its_pages_and_waits_when_there_are_none() -> None:
    plan = plan_rows([STREAM, STREAM, NEEDY], budget=100, free=0)

    assert plan == StepPlan((1, 1, 0))


def test_a_stopped_row_is_not_stopped_again() -> None:
    stopped = PROMPT._replace(owns=False)

    assert plan_rows([NEEDY, STREAM, stopped], budget=100, free=0).stop == 1


def test_a_chunk_is_cut_to_the_pages_that_there_are() -> None:
    middle = Claim(pending=50, covered=3, grows=True, begun=True, runnable=True, owns=True)

    plan = plan_rows([STREAM, middle], budget=100, free=2)

    assert plan.counts == (1, 3 + 2 * PAGE)


def test_beside_a_stream_a_deep_chunk_is_smaller() -> None:
    deep = PROMPT._replace(pending=900, covered=900, begun=True, owns=True, computed=2000)

    assert plan_rows([STREAM, deep], budget=101, free=10, doubling=1000).counts == (1, 34)
    assert plan_rows([deep], budget=101, free=10, doubling=1000).counts == (101,)


def test_a_row_begins_only_where_there_is_room_for_what_it_has_and_a_page_for_each() -> None:
    # Two pages of its own, one more for it and one more for the stream.
    assert plan_rows([STREAM, PROMPT], budget=100, free=4).counts == (1, 2 * PAGE)
    assert plan_rows([STREAM, PROMPT], budget=100, free=3) == StepPlan((1, 0), held=True)


def test_pages_that_a_begun_prompt_still_needs_are_not_given_to_who_begins() -> None:
    long = Claim(pending=5 * PAGE, covered=0, grows=False, begun=True, runnable=True, owns=True)

    plan = plan_rows([long, PROMPT], budget=PAGE, free=7)

    assert plan == StepPlan((PAGE, 0), held=True)


def test_nobody_begins_before_an_older_row_that_waits_for_room() -> None:
    big, small = PROMPT._replace(pending=100), PROMPT._replace(pending=4)

    plan = plan_rows([STREAM, big, small], budget=200, free=5)

    assert plan == StepPlan((1, 0, 0), held=True)


def test_who_waits_for_an_adapter_holds_nobody_up() -> None:
    plan = plan_rows([STREAM, WAITING._replace(pending=500), PROMPT], budget=200, free=4)

    assert plan == StepPlan((1, 0, 2 * PAGE))


def test_the_oldest_that_can_run_takes_pages_of_older_ones_that_cannot() -> None:
    holding = WAITING._replace(owns=True)

    assert plan_rows([holding, NEEDY, PROMPT], budget=100, free=0).stop == 0
    assert plan_rows([holding, STREAM, NEEDY], budget=100, free=0).stop is None


def test_the_oldest_begins_without_room_and_stops_the_others_for_it() -> None:
    assert plan_rows([PROMPT, STREAM], budget=100, free=1).stop == 1
    alone = PROMPT._replace(grows=False)
    assert plan_rows([alone], budget=100, free=2).counts == (2 * PAGE,)


def test_rows_of_a_wave_begin_only_where_there_is_room() -> None:
    claims = [STREAM, WAITING, WAITING._replace(pending=PAGE)]

    assert beginners(claims, [1, 2], free=3) == []
    assert beginners(claims, [1, 2], free=5) == [1]
    assert beginners(claims, [1, 2], free=6) == [1, 2]


@dataclass
class Mine:
    """A row in a shard that is nothing but numbers."""

    prompt: int
    most: int
    generated: int = 0
    computed: int = 0
    owned: int = 0
    begun: bool = False
    runnable: bool = True

    @property
    def claim(self) -> Claim:
        tokens = self.prompt + self.generated
        return Claim(
            pending=tokens - self.computed,
            covered=self.owned * PAGE - self.computed,
            grows=pages_for(self.prompt + self.most - 1) > pages_for(tokens),
            begun=self.begun,
            runnable=self.runnable,
            owns=self.owned > 0,
        )

    def stop(self) -> None:
        self.computed = self.owned = 0
        self.begun = False

    def compute(self, count: int) -> None:
        self.owned = max(self.owned, pages_for(self.computed + count))
        self.computed += count
        self.begun = True
        self.generated += self.computed == self.prompt + self.generated


@given(
    st.lists(st.builds(Mine, st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=9),
    st.integers(12, 30),
    st.integers(1, 120),
    st.data(),
)
def test_every_row_ends_in_as_many_steps_as_there_are_tokens(
    rows: list[Mine], total: int, budget: int, data: st.DataObject
) -> None:
    """Rows become runnable in any order; whoever is the oldest of these gains a token a step."""
    for row in rows:
        row.runnable = data.draw(st.booleans())
    steps = 0
    bound = sum(row.prompt + row.most for row in rows)
    while rows:
        if not any(row.runnable for row in rows):
            rows[data.draw(st.integers(0, len(rows) - 1))].runnable = True
        oldest = next(row for row in rows if row.runnable)
        before = oldest.computed

        plan = plan_rows([row.claim for row in rows], budget, total - owned(rows))
        while plan.stop is not None:
            assert rows[plan.stop] is not oldest
            assert rows[plan.stop].owned
            rows[plan.stop].stop()
            plan = plan_rows([row.claim for row in rows], budget, total - owned(rows))
        for row, count in zip(rows, plan.counts, strict=True):
            if count:
                row.compute(count)

        steps += 1
        assert oldest.computed > before
        assert owned(rows) <= total
        assert steps <= bound
        rows = [row for row in rows if row.generated < row.most]


def owned(rows: list[Mine]) -> int:
    return sum(row.owned for row in rows)
