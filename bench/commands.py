"""`loralane` commands as children that a benchmark starts, kills and starts again."""

import asyncio
import re
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

from bench.promises import NotMeasured

_LOG_LINES = 20
_GRACE_S = 25.0


class NotReady(NotMeasured):
    """A command ended before it was ready; the message holds its last lines."""


class Command:
    """One child; ends with `stop` or `kill`, one of which must be called."""

    def __init__(self, process: asyncio.subprocess.Process, log: IO[bytes], ready: str) -> None:
        self._process = process
        self._log = log
        #: What its line of readiness says.
        self.ready = ready
        # Whoever prints into a pipe that nobody reads stops when it is full.
        self._draining = asyncio.create_task(_drain(process))

    @classmethod
    async def start(cls, arguments: Sequence[str], ready: str) -> "Command":
        """Run `loralane ...` until a line matches `ready`, whose group is kept. Raises NotReady."""
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the child is gone
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "loralane_router", *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
        assert process.stdout is not None, "stdout is a pipe"
        try:
            async for line in process.stdout:
                if found := re.search(ready, line.decode(errors="replace")):
                    return cls(process, log, found[1])
        except BaseException:
            process.kill()
            await process.wait()
            log.close()
            raise
        status = await process.wait()
        log.seek(0)
        last = log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        log.close()
        raise NotReady("\n".join([f"loralane {arguments[0]} ended with {status}:", *last]))

    async def kill(self) -> None:
        """Send SIGKILL, and return when it is gone. Idempotent."""
        if self._process.returncode is None:
            self._process.kill()
        await self._gone()

    async def stop(self) -> None:
        """Send SIGTERM, SIGKILL if that does not help; return when it is gone. Idempotent."""
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(_GRACE_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
        await self._gone()

    async def _gone(self) -> None:
        await self._process.wait()
        await self._draining
        self._log.close()


async def _drain(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None, "stdout is a pipe"
    async for _ in process.stdout:
        pass
