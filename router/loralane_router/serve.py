"""The router process: HTTP and gRPC in front of one Router, and with `serve` a shard of its own.

HTTP answers from the start, so that probes can tell "loading" from "dead"; requests get 503 until
the shard serves.
"""

import asyncio
import contextlib
import errno
import gc
import json
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import uvicorn

from loralane_router.config import RouterConfig
from loralane_router.gateway.app import create_app
from loralane_router.gateway.connections import GatheringProtocol
from loralane_router.inference import InferenceServer
from loralane_router.router import Router
from loralane_router.shard_process import ShardEnded, ShardProcess

_log = logging.getLogger(__name__)

#: How long running requests may take to finish after a signal.
_GRACE_S: Final = 10
#: How long an error may take to reach those that did not.
_LAST_WORDS_S: Final = 2
#: How long the shard may take to end after that.
_SHARD_GRACE_S: Final = 10.0
#: SDKs keep connections; closing them early races with their next request.
_KEEP_ALIVE_S: Final = 75


class CannotStart(Exception):
    """The process cannot start; the message says what to change."""


async def run(config: RouterConfig, shard_command: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM (0), or until the shard of `shard_command` ends (1).

    Raises CannotStart, e.g. when a port is taken.
    """
    listener = bind(config.host, config.port)
    router = Router(config)
    http = _HttpServer(router)
    stop, give_up = _stop_on_signals(http)
    shard = await ShardProcess.start(shard_command) if shard_command else None
    grpc_server = InferenceServer(router)
    serving = asyncio.create_task(http.serve([listener]))
    starting = asyncio.create_task(_start(router, shard, grpc_server, listener))
    ending = {asyncio.create_task(_told(stop))}
    if shard is not None:
        ending.add(asyncio.create_task(shard.wait_ended()))
    try:
        await _first_end(starting, ending)
        await _finish(http, serving, grpc_server, give_up)
    except ShardEnded as exc:
        _log.error("%s", exc)
        return 1
    finally:
        for task in (starting, *ending):
            task.cancel()
        await asyncio.gather(starting, *ending, return_exceptions=True)
        await router.close()
        http.should_exit = True
        await asyncio.gather(serving, grpc_server.close(_LAST_WORDS_S))
        if shard is not None:
            await shard.stop(_SHARD_GRACE_S)
    return 0


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet. Raises CannotStart."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets that say they are TCP; with it, the
    # tokens of a stream on a reused connection wait for the client's delayed acknowledgements.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        reason = exc.strerror or str(exc)
        flag = "--port" if exc.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise CannotStart(f"cannot serve on {host}:{port}: {reason}; try another {flag}") from exc
    return listener


def invitation(host: str, port: int, model_id: str, adapters: Sequence[str]) -> str:
    """Return the line that tells a person what to do next."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{shown}:{port}"
    model = adapters[0] if adapters else model_id
    body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 16})
    curl = f"curl {url}/v1/completions -H 'content-type: application/json' -d '{body}'"
    return f"loralane serves {model_id} on {url}  try: {curl}"


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: this process has its own."""

    def __init__(self, router: Router) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(router),
                http=GatheringProtocol,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,  # nothing here asks who the client is
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_GRACE_S + _LAST_WORDS_S,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def _stop_on_signals(http: uvicorn.Server) -> tuple[asyncio.Event, asyncio.Event]:
    """Return what the first signal sets, and what a second one sets to give up on requests."""
    stop, give_up = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            http.force_exit = True
            give_up.set()
        stop.set()

    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, on_signal)
    return stop, give_up


async def _start(
    router: Router,
    shard: ShardProcess | None,
    grpc_server: InferenceServer,
    listener: socket.socket,
) -> None:
    """Bring the router up behind its HTTP port, and say so. Raises CannotStart."""
    config = router.config
    if config.grpc_port is not None:
        try:
            port = await grpc_server.start(config.host, config.grpc_port)
        except RuntimeError as exc:
            raise CannotStart(
                f"cannot serve gRPC on {config.host}:{config.grpc_port}; try another --grpc-port"
            ) from exc
        _log.info("gRPC on %s:%d", config.host, port)
    if shard is not None:
        await shard.wait_ready()
    await router.start()
    await router.wait_ready()
    names = [entry.name for entry in router.adapters(limit=1).entries]
    port = listener.getsockname()[1]
    # Going through what was imported would take each full collection 20 ms from the streams.
    gc.collect()
    gc.freeze()
    sys.stdout.write(invitation(config.host, port, router.info.model_id, names) + "\n")
    sys.stdout.flush()


async def _told(stop: asyncio.Event) -> None:
    await stop.wait()


async def _first_end(starting: asyncio.Task[None], ending: set[asyncio.Task[None]]) -> None:
    """Return when told to stop; raise what made the start fail or the shard end."""
    waiting = {starting, *ending}
    while True:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if done != {starting}:
            return


async def _finish(
    http: uvicorn.Server,
    serving: asyncio.Task[None],
    grpc_server: InferenceServer,
    give_up: asyncio.Event,
) -> None:
    """Stop accepting; return when running requests have finished, or may take no longer."""
    http.should_exit = True
    closing = asyncio.create_task(grpc_server.close(_GRACE_S + _LAST_WORDS_S))
    giving_up = asyncio.create_task(give_up.wait())
    either: set[asyncio.Future[Any]] = {asyncio.gather(serving, closing), giving_up}
    await asyncio.wait(either, timeout=_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
    giving_up.cancel()
