"""The threads of the adapter store, by what they wait for. All that compute give way to the steps.

A load waits for its own adapter only: what is in memory never queues behind a disk, a disk never
behind a download, a look never behind a download, one for what is known behind no load at all, and
nothing that a request waits for behind what is only read ahead.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from loralane_server.device.threads import stand_back, use_threads


class Workers:
    """The threads that look for adapters and read them; each computes alone."""

    def __init__(self) -> None:
        #: Whether files are still those that are known: some microseconds, on the way of nearly
        #: every request. Giving way to the steps there would take longer than a step.
        self.known = _executor(4, "known", partial(use_threads, 1))
        #: Folders: resolving and reading.
        self.disk = _executor(4, "disk")
        #: Asking hubs and buckets: metadata, headers. As many as a hub may leave hanging for as
        #: long as a look is bounded (`remote.LOOK_TIMEOUT_S`) while another adapter is waited for;
        #: fewer than the 100 connections of huggingface_hub's client.
        self.remote = _executor(96, "remote")
        #: Loads that begin with a download; one that drips holds a thread for half a minute.
        self.downloads = _executor(96, "downloads")
        #: Loads of what is in memory.
        self.memory = _executor(2, "memory")
        #: Reads that nobody waits for.
        self.ahead = _executor(2, "ahead")
        #: What is left to do when nobody has to wait.
        self.rest = _executor(1, "rest")

    def close(self) -> None:
        """Take no more work; what was begun ends by itself."""
        looks = self.known, self.disk, self.remote
        reads = self.downloads, self.memory, self.ahead
        for executor in (*looks, *reads, self.rest):
            executor.shutdown(wait=False, cancel_futures=True)


def _executor(
    threads: int, name: str, begin: Callable[[], None] = stand_back
) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, f"adapters-{name}", begin)
