"""A shard alone in this process, without wire and router: when do its rows get their tokens?"""

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from loralane_server.assembly import Shard, assemble
from loralane_server.config import ShardConfig
from loralane_server.rows import Admission, StepEvent

from bench.promises import NotMeasured

_LOWEST_ID = 16
_PATIENCE_S = 240.0


class Alone:
    """A shard and the times of all tokens, on the clock of `time.perf_counter`."""

    def __init__(self, shard: Shard, vocab: int) -> None:
        self._shard = shard
        self._vocab = vocab
        self._draw = random.Random(5)
        self._changed = threading.Condition()
        #: By request; written by the engine's thread, under the lock.
        self._times: list[list[float]] = []
        self._live: set[int] = set()
        self._failed: Exception | None = None
        shard.engine.listen(self._sink)

    @classmethod
    @contextmanager
    def running(cls, config: ShardConfig) -> Iterator["Alone"]:
        """Load the model and run the shard until the block ends."""
        shard = assemble(config)
        try:
            yield cls(shard, shard.facts.vocab_size)
        finally:
            shard.engine.close()
            shard.store.close()

    def digest(self, reference: str) -> str:
        """Resolve an adapter."""
        return self._shard.store.resolve(reference, None).result().digest

    def load(self, digest: str) -> None:
        """Bring an adapter into the pool, and wait until it is there."""
        self._shard.engine.load(digest).result(_PATIENCE_S)

    def start(self, digests: Sequence[str], prompt: int, new: int) -> range:
        """Admit a row for each digest with a random prompt; return their numbers."""
        with self._changed:
            first = len(self._times)
            numbers = range(first, first + len(digests))
            self._times += [[] for _ in numbers]
            self._live.update(numbers)
        for number, digest in zip(numbers, digests, strict=True):
            ids = tuple(self._draw.randrange(_LOWEST_ID, self._vocab) for _ in range(prompt))
            self._shard.engine.admit(Admission(number, digest, ids, new), self._sink)
        return numbers

    def wait_for_tokens(self, numbers: range, count: int) -> None:
        """Wait until each of these rows has so many tokens."""
        self._wait(numbers, count)

    def finish(self, numbers: range) -> list[list[float]]:
        """Wait until these rows have ended; return the times of each one's tokens."""
        self._wait(numbers, None)
        return [self._times[number] for number in numbers]

    def _wait(self, numbers: range, count: int | None) -> None:
        def happened() -> bool:
            if count is None or self._failed:
                return bool(self._failed) or not self._live & set(numbers)
            return all(len(self._times[number]) >= count for number in numbers)

        with self._changed:
            if not self._changed.wait_for(happened, _PATIENCE_S):
                raise NotMeasured(f"no tokens within {_PATIENCE_S:.0f} s")
        if self._failed:
            raise NotMeasured(str(self._failed)) from self._failed

    def _sink(self, event: StepEvent) -> None:
        now = time.perf_counter()
        with self._changed:
            for row in event.rows:
                if row.tokens:
                    self._times[row.request_id].append(now)
                if row.error:
                    self._failed = row.error
                if row.finish:
                    self._live.discard(row.request_id)
            self._changed.notify_all()
