"""The gateway on a real port, in front of a router whose answers can be worked out by hand.

Run as a script it serves the same fake and prints `ready URL`: so tests/clients can reach it.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import httpx
import pytest
import uvicorn
from loralane_proto import shard_pb2 as pb
from loralane_router.adapters.facts import AdapterEntry, AdapterFacts, LoadTimes, Page
from loralane_router.config import RouterConfig
from loralane_router.errors import RequestError, invalid
from loralane_router.gateway.app import create_app
from loralane_router.gateway.connections import GatheringProtocol
from loralane_router.gateway.limits import Limits
from loralane_router.metrics.counters import Metrics
from loralane_router.requests import Delta, OutToken, TextRequest
from loralane_router.router import ModelInfo
from starlette.types import ASGIApp, Receive, Scope, Send

EOS = OutToken(0, "</s>", -0.25, special=True)
BASE = ModelInfo("base/tiny", "FakeForCausalLM", "float32", "cpu", 128, 10_000, (0,), "0.1.0")

#: Adapters that cannot be served, and why.
BROKEN = {
    "org/nope": RequestError(pb.ERROR_KIND_NOT_FOUND, "no adapter org/nope"),
    "nope": RequestError(pb.ERROR_KIND_NOT_FOUND, "no adapter nope"),
    "org/secret": RequestError(pb.ERROR_KIND_FORBIDDEN, "no access to org/secret"),
    "org/wide": RequestError(pb.ERROR_KIND_INCOMPATIBLE, "does not fit", tensors=["a.weight"]),
    "org/bad": RequestError(pb.ERROR_KIND_CORRUPT, "not safetensors"),
    "org/huge": RequestError(pb.ERROR_KIND_TOO_LARGE, "rank 4096"),
    "org/loading": RequestError(pb.ERROR_KIND_LOADING, "loading", retry_after_s=2.2),
    "org/busy": RequestError(pb.ERROR_KIND_OVERLOADED, "queue is full"),
    "dummy": RequestError(pb.ERROR_KIND_NOT_FOUND, "no adapter dummy"),
}


def entry(name: str, reference: str) -> AdapterEntry:
    facts = AdapterFacts(
        digest=f"digest-of-{reference}",
        reference=reference,
        tier="device",
        rank=8,
        lanes=8,
        bytes=4096,
        host_bytes=8192,
        targets=2,
        modules=("q_proj", "v_proj"),
        ttl_s=60.0,
        load_ms=1.5,
        load_times=LoadTimes(0.125, 0.25, 0.5, 1.0, 2.0),
    )
    return AdapterEntry(name, reference, facts)


class FakeGeneration:
    """One token a character. A text with `hold` waits for the gate before its first token, one with
    `pause` after it, and `break` fails after its third."""

    queue_s = 0.25
    cold_ms = 7.0
    #: Every prompt begins with a token that is always cached.
    cached_tokens = 1

    def __init__(self, router: "FakeRouter", request: TextRequest, prompt: str, room: int) -> None:
        given = request.parameters
        self.prompt_tokens = len(prompt)
        self.adapter = request.adapter
        self.adapter_digest = f"digest-of-{request.adapter}" if request.adapter else ""
        self.seed = 42 if given.seed is None else given.seed
        self.max_tokens = room if given.max_tokens is None else given.max_tokens
        self._router = router
        self._given = given
        self._prompt = prompt
        self._closed = False
        self.is_fallback = False

    async def settled(self) -> None:
        """A prompt with `late` waits for the gate, and then for the base to answer."""
        if "late" in self._prompt:
            await self._router.gate.wait()
            self.fall_back()

    def fall_back(self) -> None:
        self.adapter = self.adapter_digest = ""
        self.is_fallback = True

    async def __aiter__(self) -> AsyncIterator[Delta]:
        if "hold" in self._prompt:
            await self._router.gate.wait()
        await self.settled()
        for index, delta in enumerate(self._deltas()):
            if index == 1 and "pause" in self._prompt:
                await self._router.gate.wait()
            if index == 3 and "break" in self._prompt:
                raise RequestError(pb.ERROR_KIND_UNAVAILABLE, "the shard died")
            if index == 3 and "boom" in self._prompt:
                raise RuntimeError("a bug")
            yield delta

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._router.leave()

    def _deltas(self) -> Iterator[Delta]:
        answer = " ".join(reversed(self._prompt.split(" ")))
        answer += f"+{self.adapter}" if self.adapter else ""
        answer += f"#{self.seed}" if self._given.temperature > 0 else ""
        found = [answer.find(stop) for stop in self._given.stop if stop in answer]
        end = min([*found, len(answer)])
        if self.max_tokens <= len(answer[:end]):
            reason, end, eos = "length", self.max_tokens, ()
        else:
            reason, eos = ("stop", (self._token("!"),)) if found else ("eos", (EOS,))
        shown = answer[:end]
        for index, char in enumerate(shown):
            last = index == len(shown) - 1 and not eos
            yield Delta(char, (self._token(char),), reason if last else None)
        if eos:
            yield Delta("", eos, reason)

    def _token(self, char: str) -> OutToken:
        top = [(ord(char) + i, chr(ord(char) + i), -0.5 - i) for i in range(3)]
        return OutToken(ord(char), char, -0.5, False, tuple(top[: self._given.top_logprobs]))


class FakeRouter:
    """Answers with the prompt's words reversed, `+adapter`, and `#seed` where it samples."""

    def __init__(self) -> None:
        self.config = RouterConfig(shards=("127.0.0.1:1",))
        self.metrics = Metrics()
        self.info = BASE
        self.ready = True
        #: Why nobody more may wait, and why nothing can be served at all.
        self.full: RequestError | None = None
        self.down: RequestError | None = None
        self.capacity = {"rows_total": 8, "lanes_free": 0}
        self.gate = asyncio.Event()
        self.requests: list[TextRequest] = []
        self.running = 0
        self.changed = asyncio.Condition()
        self._adapters = {"loud": entry("loud", "org/loud"), "org/a": entry("org/a", "org/a")}

    def check_ready(self) -> None:
        if self.down is not None:
            raise self.down

    async def open(self, request: TextRequest) -> FakeGeneration:
        if self.full is not None:
            raise self.full
        self.requests.append(request)
        adapter = "" if request.adapter == BASE.model_id else request.adapter
        if request.merge is not None:
            adapter = "&".join(name for name, _ in request.merge.members)
        if adapter in BROKEN:
            raise BROKEN[adapter]
        prompt = self._prompt(request)
        room = BASE.max_model_len - len(prompt)
        if room < (request.parameters.max_tokens or 1):
            raise invalid(f"longer than the context of {BASE.max_model_len}", "max_tokens")
        self._enter()
        if "queue" in prompt:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.leave()
                raise
        return FakeGeneration(self, replace(request, adapter=adapter), prompt, room)

    def _prompt(self, request: TextRequest) -> str:
        if isinstance(request.prompt, str):
            kept = request.parameters.truncate
            return request.prompt[-kept:] if kept else request.prompt
        parts = (p if isinstance(p, int) else p.content for p in request.prompt)
        return "".join(chr(p) if isinstance(p, int) else p for p in parts)

    def _enter(self) -> None:
        self.running += 1
        self._tell()

    def leave(self) -> None:
        self.running -= 1
        self._tell()

    def _tell(self) -> None:
        async def tell() -> None:
            async with self.changed:
                self.changed.notify_all()

        self._telling = asyncio.ensure_future(tell())

    async def until_running(self, count: int) -> None:
        async with asyncio.timeout(5), self.changed:
            await self.changed.wait_for(lambda: self.running == count)

    def tokenize(self, text: str) -> list[tuple[int, str, int, int]]:
        return [(ord(char), char, i, i + 1) for i, char in enumerate(text)]

    def adapters(self, limit: int, after: str = "") -> Page:
        behind = sorted(name for name in self._adapters if name > after)
        entries = tuple(self._adapters[name] for name in behind[:limit])
        return Page(entries, len(self._adapters), len(behind) > limit)

    def adapter(self, name: str) -> AdapterEntry | None:
        return self._adapters.get(name)

    def put(self, entry: AdapterEntry) -> None:
        self._adapters[entry.name] = entry

    async def list_adapters(self, limit: int, after: str = "") -> Page:
        return self.adapters(limit, after)

    async def validate_adapter(
        self, reference: str, token: str | None, *, tensors: bool
    ) -> tuple[AdapterFacts, tuple[str, ...]]:
        if reference in BROKEN:
            raise BROKEN[reference]
        notes = (f"read with {token}",) if tensors else ()
        return entry(reference, reference).facts, notes

    async def load_adapter(
        self, name: str, reference: str, token: str | None, ttl_s: float | None = None
    ) -> AdapterEntry:
        if reference in BROKEN:
            raise BROKEN[reference]
        loaded = entry(name, reference)
        facts = replace(loaded.facts, ttl_s=loaded.facts.ttl_s if ttl_s is None else ttl_s)
        self._adapters[name] = replace(loaded, facts=facts)
        return self._adapters[name]

    async def unload_adapter(self, name: str) -> tuple[int, int]:
        if name == "org/a":
            raise RequestError(pb.ERROR_KIND_IN_USE, "rows use org/a")
        self._adapters.pop(self._known(name))
        return 4096, 8

    async def pin_adapter(self, name: str, pinned: bool) -> AdapterEntry:
        known = self._adapters[self._known(name)]
        self._adapters[name] = replace(known, facts=replace(known.facts, pinned=pinned))
        return self._adapters[name]

    def _known(self, name: str) -> str:
        if name not in self._adapters:
            raise RequestError(pb.ERROR_KIND_NOT_FOUND, f"no adapter {name}")
        return name


@contextlib.asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[str]:
    """Serve on a free port of the loopback; yield the URL."""
    listener = socket.create_server(("127.0.0.1", 0))  # who connects early waits in its backlog
    config = uvicorn.Config(
        app, http=GatheringProtocol, log_config=None, access_log=False, lifespan="off"
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # signals belong to pytest
    task = asyncio.create_task(server.serve(sockets=[listener]))
    yield "http://{}:{}".format(*listener.getsockname())
    server.should_exit = True
    await task


@pytest.fixture
def limits() -> Limits:
    return Limits(body_bytes=256 * 1024, body_s=0.2, quiet_s=0.05)


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


class Current:
    """The application of the test that runs; one server serves them all, as it starts slowly."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


@pytest.fixture(scope="session")
async def server() -> AsyncIterator[tuple[Current, str]]:
    current = Current()
    async with serving(current) as address:
        yield current, address


@pytest.fixture
async def url(
    server: tuple[Current, str], router: FakeRouter, limits: Limits
) -> AsyncIterator[str]:
    current, address = server
    current.app = create_app(router, limits)
    yield address
    router.gate.set()


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=10) as client:
        yield client


async def _main() -> None:
    async with serving(create_app(FakeRouter())) as address:
        sys.stdout.write(f"ready {address}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
