"""A `loralane serve` of one's own: a child on a free port, there until the block ends."""

import asyncio
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import IO, Final

#: What `serve` prints on stdout when it is ready.
_READY: Final = re.compile(r" on (http://\S+)")
_LOG_LINES: Final = 20
#: Longer than `serve` itself gives running requests and then its shard.
_GRACE_S: Final = 25.0
_PROGRESS_S: Final = 0.1


class NotServing(Exception):
    """`loralane serve` ended before it was ready; the message holds its last lines."""


@asynccontextmanager
async def serving(
    arguments: Sequence[str], progress: Callable[[float], None] | None = None
) -> AsyncIterator[str]:
    """Start `loralane serve` and yield its URL once it is ready; stop it at the end.

    `progress` is called with the seconds since the start while the model loads. Raises NotServing.
    """
    command = [sys.executable, "-m", "loralane_router", "serve", "--port=0", *arguments]
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=log
        )
        try:
            yield await _url(process, log, progress)
        finally:
            await _stop(process)


async def _url(
    process: asyncio.subprocess.Process, log: IO[bytes], progress: Callable[[float], None] | None
) -> str:
    assert process.stdout is not None, "stdout is a pipe"
    ticking = asyncio.create_task(_tick(progress)) if progress else None
    try:
        async for line in process.stdout:
            if ready := _READY.search(line.decode(errors="replace")):
                return ready[1]
    finally:
        if ticking:
            ticking.cancel()
    status = await process.wait()
    log.seek(0)
    last = log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
    raise NotServing("\n".join([f"loralane serve ended with status {status}:", *last]))


async def _tick(progress: Callable[[float], None]) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        progress(loop.time() - began)
        await asyncio.sleep(_PROGRESS_S)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
