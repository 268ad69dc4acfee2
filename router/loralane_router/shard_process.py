"""The shard that `loralane serve` starts beside the router: a child process of its own."""

import asyncio
import ctypes
import logging
import signal
import sys
from collections.abc import Sequence
from typing import Final

_log = logging.getLogger(__name__)

#: `prctl`: the signal that a process gets when its parent dies.
_PR_SET_PDEATHSIG: Final = 1
#: What the shard prints on stdout when it serves, before its address.
_READY: Final = b"ready "


class ShardEnded(Exception):
    """The shard's process ended by itself; its own log lines say why."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the shard ended with status {status}; see its last lines above")


def _end_with_parent() -> None:
    """A router that was killed leaves no shard behind that holds its memory; runs in the child."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class ShardProcess:
    """A running child; whoever starts it stops it.

    It has a session of its own: Ctrl-C reaches the router alone, which finishes what runs before
    it ends the shard. The child's stderr is ours; its stdout is too, but for the ready line.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._ready = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, command: Sequence[str]) -> "ShardProcess":
        """Start the child."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        return cls(process)

    async def wait_ready(self) -> None:
        """Return when the shard has said that it serves; never if it ends before."""
        await self._ready.wait()

    async def wait_ended(self) -> None:
        """Wait for the child's end and raise ShardEnded."""
        raise ShardEnded(await self._process.wait())

    async def stop(self, grace_s: float) -> None:
        """Ask the child to end, and make it end after `grace_s`. Idempotent."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
            except TimeoutError:
                _log.warning("the shard did not end within %g s and is killed", grace_s)
                self._process.kill()
                await self._process.wait()
        await self._reader

    async def _read(self) -> None:
        assert self._process.stdout is not None, "stdout is a pipe"
        async for line in self._process.stdout:
            if line.startswith(_READY):
                self._ready.set()
            else:
                sys.stderr.write(line.decode(errors="replace"))
