"""A real shard in this process, and a listener that waits for its events."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from loralane_server.assembly import Shard, assemble
from loralane_server.config import ShardConfig
from loralane_server.rows import Admission, Capacity, RowEvent, StepEvent

from tests import reference


class Listener:
    """Collects a shard's events; waits for rows to end."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.rows: dict[int, list[RowEvent]] = {}
        self.capacity: Capacity | None = None
        self.steps: list[StepEvent] = []
        self._changed = threading.Condition()
        shard.engine.listen(self.sink)

    def sink(self, event: StepEvent) -> None:
        with self._changed:
            self.steps.append(event)
            self.capacity = event.capacity
            for row in event.rows:
                self.rows.setdefault(row.request_id, []).append(row)
            self._changed.notify_all()

    def admit(self, *admissions: Admission) -> None:
        for admission in admissions:
            self.shard.engine.admit(admission, self.sink)

    def cancel(self, request_id: int) -> None:
        self.shard.engine.cancel(request_id, self.sink)

    def wait_until(self, happened: Callable[[], bool]) -> None:
        """Wait for what must come; a test that hangs here fails by pytest's timeout."""
        with self._changed:
            assert self._changed.wait_for(happened, timeout=120)

    def wait(self, *request_ids: int) -> None:
        """Wait until all these rows have ended."""
        self.wait_until(lambda: all(self.ended(i) for i in request_ids))

    def ended(self, request_id: int) -> bool:
        events = self.rows.get(request_id)
        return bool(events) and events[-1].finish is not None  # type: ignore[index]

    def tokens(self, request_id: int) -> list[int]:
        return [t.id for event in self.rows.get(request_id, []) for t in event.tokens]

    def generate(self, *admissions: Admission) -> list[list[int]]:
        """Admit, wait, and return each row's tokens."""
        self.admit(*admissions)
        ids = [a.request_id for a in admissions]
        self.wait(*ids)
        return [self.tokens(i) for i in ids]


@contextmanager
def running(config: ShardConfig) -> Iterator[Listener]:
    """Run a shard; at the end its books must balance."""
    shard = assemble(config)
    try:
        yield Listener(shard)
        shard.engine.check()
    finally:
        shard.engine.close()
        shard.store.close()


def digest_of(shard: Shard, reference_: str) -> str:
    """Resolve an adapter reference to its digest."""
    return shard.store.resolve(reference_, None).result().digest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/` (tiny Llama) and `adapters/<name>/` for each of the sixteen."""
    return make_family("llama", tmp_path_factory.mktemp("tiny"), reference.SIXTEEN)


def make_family(name: str, folder: Path, recipes: Sequence[reference.AdapterRecipe]) -> Path:
    """Save a family's random model and an adapter for each recipe."""
    model: Any = reference.random_model(reference.FAMILIES[name])
    reference.save_model(model, folder / "model")
    for seed, recipe in enumerate(recipes):
        reference.save_adapter(model, recipe, folder / "adapters" / recipe.name, seed=seed)
    return folder
