"""The steps under way: the next one is submitted before the tokens of the last are known.

    turn        submits   then fetches and tells     the device computes
    1           step 1                               step 1
    2           step 2    step 1                     step 1, then step 2
    3           step 3    step 2                     step 2, then step 3

While the device computes a step, the host plans, lays out and submits the next. A row that was
sampled in the step under way goes on in the next with a token that only the device knows: the
step's input says which span of the step before chose it (`chosen_for`). All else that a step needs
is known ahead: how many tokens a row has, its pages, its draws (by position), its biases.

How many steps may be under way is the runner's `depth`; a turn that submits nothing fetches all. So
a device that computes at once (depth 1) goes through the same loop, one step a turn, and a row
alone is told its token as soon as it is there: fetching comes before all other waiting. What it
costs: a row that comes while two steps are under way begins behind both.

What is decided on half of the truth is made good like this:

    a row ends with a token that nobody knew yet (a stop token), or is cancelled: its part of the
        step under way is computed, and what is chosen for it dropped. Its pages and lanes are free
        at once, since the device keeps the order: whoever gets them writes them in a later step, or
        a later lane write, and reads nothing before it has written it.
    it may not exceed `max_tokens`, which is known ahead: no step computes its last token.
    a page is found by others once its tokens are known and the step that fills it is submitted,
        done or not: whoever finds it reads it in a later step.
    a row is stopped for its pages only with no step under way, so that what is stopped is whole,
        and nobody is stopped for pages that a row which has ended already would leave.
    a step in which the device fails is noticed when it is fetched, maybe with one behind it:
        `DeviceFailed`, and no step is run any more. What is wrong with one step, `submit` finds.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from loralane_server.device.seam import StepOutput, StepRunner, SubmittedStep
from loralane_server.rows import Row
from loralane_server.steps import Part, build_step, sampled_rows


@dataclass(frozen=True, slots=True, eq=False)
class UnderWay:
    """A step that was submitted."""

    step: SubmittedStep
    #: For whom it chooses a token, in the order of its samples.
    sampled: Sequence[Row]
    #: Tokens of prompts that it computes.
    prompt_tokens: int
    began: float


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """What came of a step."""

    sampled: Sequence[Row]
    output: StepOutput
    prompt_tokens: int
    #: How long it kept the device from the next.
    seconds: float


def due(under_way: int, depth: int, *, submitted: bool) -> int:
    """Return how many of the steps under way to fetch now: what may not stay."""
    return max(0, under_way - (depth - 1 if submitted else 0))


class Pipeline:
    """Owns the steps under way, oldest first. Touched only by the engine's thread."""

    def __init__(self, runner: StepRunner, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
        self._steps: deque[UnderWay] = deque()
        #: When the last one was fetched.
        self._fetched = 0.0

    @property
    def busy(self) -> bool:
        """Whether any step is under way."""
        return bool(self._steps)

    def due(self, *, submitted: bool) -> int:
        """Return how many steps to fetch now; `submitted`: whether one was, in this turn."""
        return due(len(self._steps), self._runner.depth, submitted=submitted)

    def submit(self, parts: Sequence[Part]) -> UnderWay:
        """Begin a step of rows that own the pages for it; those that it samples await a token.

        Raises what the runner raises, and then nothing has changed.
        """
        began = self._clock()
        step = self._runner.submit(build_step(parts))
        sampled = sampled_rows(parts)
        for place, row in sampled:
            row.awaited += 1
            row.place = place
        prompt_tokens = sum(n for _, n in parts if n > 1)
        under_way = UnderWay(step, [row for _, row in sampled], prompt_tokens, began)
        self._steps.append(under_way)
        return under_way

    def fetch(self) -> Fetched:
        """Wait for the oldest step; its rows await its tokens no more. Raises `DeviceFailed`."""
        oldest = self._steps[0]
        output = oldest.step.fetch()
        self._steps.popleft()
        for row in oldest.sampled:
            row.awaited -= 1
        now = self._clock()
        seconds, self._fetched = now - max(oldest.began, self._fetched), now
        return Fetched(oldest.sampled, output, oldest.prompt_tokens, seconds)

    def check(self, rows: Iterable[Row]) -> None:
        """Assert that between two turns rows await what is under way and nothing else."""
        assert len(self._steps) < self._runner.depth
        assert self._runner.depth == 1 or not self._runner.parts
        awaited = Counter(id(row) for step in self._steps for row in step.sampled if not row.ended)
        assert awaited == Counter({id(row): row.awaited for row in rows if row.awaited})
