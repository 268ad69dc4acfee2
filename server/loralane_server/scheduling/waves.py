"""Steps that begin before their adapter is resident, and run as far as its layers have arrived.

A wave is the first step of the rows that wait for one load: the first chunk of their prompts behind
what the prefix cache had, laid out as a step of its own. Its layer k needs the lanes of layer k and
of no later one, so it is run in parts, between the steps of other rows: whatever is written may be
computed. At its end its rows are sampled and are rows like any other. Rows that come later wait for
the load's end.

Where steps cannot be run in parts there are no waves: rows wait for the load's end.

A wave writes to KV pages of all its rows. When one of them ends or is stopped, the whole wave is
dropped before the pages are given back; what remains of its rows begins anew.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loralane_server.device.seam import StepInParts, StepInput, StepOutput, StepRunner
from loralane_server.residency import Load
from loralane_server.rows import Row
from loralane_server.scheduling.planner import plan_step, plan_waves, wave_tokens
from loralane_server.steps import Part, build_step, in_step_order


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a load and the wave that follows it have come."""

    digest: str
    #: Layers whose lanes are written.
    written: int
    #: Layers that the wave has computed.
    computed: int
    #: Request ids of the wave.
    rows: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Wave:
    """One load's rows and how far they are computed."""

    load: Load
    parts: list[Part]
    step: StepInput
    running: StepInParts
    #: Layers done; one more than there are when its rows have been sampled.
    computed: int = 0

    @property
    def ready(self) -> int:
        """Layers that could be run now; sampling, which needs a complete load, is one more."""
        return self.load.written + self.load.complete - self.computed


class Waves:
    """Owns the waves under way, by digest, oldest first. Touched only by the engine's thread."""

    def __init__(self, runner: StepRunner, step_tokens: int) -> None:
        self._runner = runner
        self._layers = runner.parts
        self._step_tokens = step_tokens
        self._waves: dict[str, Wave] = {}

    @property
    def can_advance(self) -> bool:
        """Whether any could run a layer now."""
        return any(wave.ready for wave in self._waves.values())

    def due(self, loads: Iterable[Load]) -> list[Load]:
        """Return the loads that have a first layer, rows, and no wave yet."""
        if not self._layers:
            return []
        return [
            load
            for load in loads
            if load.written > 0 and load.rows and load.digest not in self._waves
        ]

    def parts(self, rows: Sequence[Row]) -> list[Part]:
        """Return how many tokens of its rows a wave computes, as a step takes them."""
        budget = wave_tokens(self._layers, self._step_tokens)
        counts = plan_step([row.pending for row in rows], budget)
        return in_step_order([(row, n) for row, n in zip(rows, counts, strict=True) if n])

    def form(self, load: Load, parts: list[Part]) -> None:
        """Begin a wave with some of a load's rows, which own the pages for what it computes."""
        for row, _ in parts:
            row.in_wave = True
        step = build_step(parts)
        self._waves[load.digest] = Wave(load, parts, step, self._runner.begin(step))

    def plan(self, streams: int | None) -> list[tuple[Wave, int]]:
        """Return which waves run how many layers now; see `plan_waves`."""
        waves = list(self._waves.values())
        sizes = [(len(wave.step.tokens), wave.ready) for wave in waves]
        counts = plan_waves(sizes, self._layers, streams, self._step_tokens)
        return [(wave, count) for wave, count in zip(waves, counts, strict=True) if count]

    def run(self, wave: Wave, count: int) -> StepOutput | None:
        """Run the next `count` layers; return what was sampled if that was the end."""
        wave.computed += count
        return wave.running.run(count)

    def drop(self, digest: str) -> list[Row]:
        """End a wave where it is; its rows, which are waiting or ordinary ones again."""
        rows = [row for row, _ in self._waves.pop(digest).parts]
        for row in rows:
            row.in_wave = False
        return rows

    def progress(self, loads: Iterable[Load]) -> list[Progress]:
        """Return how far the loads in flight, and the waves that outlast theirs, have come."""
        known = {load.digest: load for load in loads}
        known |= {digest: wave.load for digest, wave in self._waves.items()}
        return [self._progress(load) for load in known.values()]

    def check(self, rows: Iterable[Row]) -> None:
        """Assert that waves are ahead of nobody's lanes, and share no row."""
        waved = [row for wave in self._waves.values() for row, _ in wave.parts]
        assert len(waved) == len({id(row) for row in waved})
        assert {id(row) for row in waved} == {id(row) for row in rows if row.in_wave}
        for digest, wave in self._waves.items():
            assert wave.parts
            assert wave.ready >= 0
            assert all(row.admission.digest == digest for row, _ in wave.parts)
            for (row, n), span in zip(wave.parts, wave.step.spans, strict=True):
                assert 0 < n <= row.pending
                assert row.begun
                assert span.start == row.computed
                assert span.pages is row.pages

    def _progress(self, load: Load) -> Progress:
        wave = self._waves.get(load.digest)
        rows = () if wave is None else tuple(row.admission.request_id for row, _ in wave.parts)
        return Progress(load.digest, max(load.written, 0), wave.computed if wave else 0, rows)
