"""Carries out a case's steps, in order, and keeps every reply."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.cases import wire
from tests.cases.base import Base
from tests.cases.case import Case
from tests.cases.placeholders import fill
from tests.cases.replies import Reply
from tests.cases.server import Server
from tests.cases.step_forms import KEYS, Step, inner, overwrite, remove, replaced
from tests.cases.tensors import NotUnderstood
from tests.cases.watch import read_metrics, wait_idle


class Steps:
    """One case on its way. Everything here runs on one event loop."""

    def __init__(self, case: Case, server: Server, http: httpx.AsyncClient, folder: Path) -> None:
        self.case = case
        self.server = server
        self.http = http
        #: Where the case's adapters are.
        self.folder = folder
        self.base: Base = Base()
        self.replies: list[Reply] = []
        self.marks: dict[str, float] = {}
        #: Names that `load` steps gave.
        self.aliases: dict[str, str] = {}
        #: Resident bytes of the server before the first step and after each round of a repeat.
        self.resident: list[int] = []
        self._pending: list[asyncio.Task[None]] = []
        self._ops: dict[str, Callable[[Step, int], Awaitable[None]]] = {
            "generate": self._generate,
            "stream": self._generate,
            "http": self._http,
            "http_slowloris": self._slowloris,
            "load": self._load,
            "unload": self._unload,
            "parallel": self._parallel,
            "async": self._async,
            "background": self._background,
            "repeat": self._repeat,
            "for_each": self._for_each,
            "for_each_adapter": self._for_each,
            "sleep": self._sleep,
            "wait": self._wait,
            "rm": self._rm,
            "copy": self._copy,
            "mark": self._mark,
        }

    async def run(self) -> None:
        """Carry out all steps, and wait for those that run beside them."""
        self.resident.append(self.server.resident_bytes())
        try:
            for position, step in enumerate(self.case.request):
                await self._do(step, position)
            beside = [task for task in self._pending if task.get_name() != "background"]
            await asyncio.gather(*beside)
        finally:
            for task in self._pending:
                task.cancel()
            await asyncio.gather(*self._pending, return_exceptions=True)
        self.resident.append(self.server.resident_bytes())

    def path_of(self, name: str) -> str:
        """Return what `$ADAPTER(name)` means."""
        return str(self.folder / name)

    async def _do(self, step: Step, position: int) -> None:
        op = self._ops.get(step["op"])
        if op is None:
            raise NotUnderstood(f"step {step['op']!r}")
        known = KEYS.get(step["op"])
        public = {key for key in step if not key.startswith("_")} - {"op", "id"}
        if known is not None and (unknown := public - known):
            raise NotUnderstood(f"{step['op']} with {sorted(unknown)}")
        await op(step, position)

    async def _all(self, steps: Sequence[Step], position: int) -> None:
        for step in steps:
            await self._do(step, position)

    def _filled(self, value: Any, **more: str) -> Any:
        meanings: dict[str, Callable[[str], str]] = {
            "BASE": lambda _: self.server.base_id,
            "TMP": lambda _: str(self.server.tmp),
            "ADAPTER": self.path_of,
        }
        return fill(value, meanings | {k: (lambda _, v=v: v) for k, v in more.items()})

    def _reply(self, step: Step, position: int, path: str) -> Reply:
        reply = Reply(
            step["op"], path, step.get("id"), position, label=step.get("_label"),
            is_async=bool(step.get("_async")),
        )  # fmt: skip
        self.replies.append(reply)
        return reply

    async def _send(self, reply: Reply, request: Step, **hang_up: Any) -> None:
        asked = self.server.hub.total
        await wire.send(self.http, reply, request, **hang_up)
        reply.hub_requests = self.server.hub.total - asked

    async def _generate(self, step: Step, position: int) -> None:
        given = self._filled({k: v for k, v in step.items() if not k.startswith("_")})
        streams = given.get("stream") or given["op"] == "stream" or "_fault" in step
        path = "/generate_stream" if streams else "/generate"
        reply = self._reply(step, position, path)
        body = wire.native_body(given)
        wire.describe(reply, body, self.base, self.server.base_id)
        fault = asyncio.create_task(self._break(step, reply)) if "_fault" in step else None
        await self._send(
            reply,
            wire.json_request(path, body),
            events=given.get("disconnect_after_events"),
            after_s=given.get("disconnect_after_s"),
        )
        if fault is not None:
            await fault

    async def _break(self, step: Step, reply: Reply) -> None:
        """Unload an adapter by force once its stream has said so much."""
        deadline = time.monotonic() + wire.TIMEOUT_S
        while len(reply.lines) < 2 * step["_fault"] and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await self.http.request(**wire.unload_request(str(reply.adapter)))

    async def _http(self, step: Step, position: int) -> None:
        reply = self._reply(step, position, step["path"])
        request: Step = {"method": step["method"], "url": step["path"], "content": b""}
        if "json" in step:
            body = self._filled(step["json"])
            request = {**wire.json_request(step["path"], body), "method": step["method"]}
            wire.describe(reply, body, self.base, self.server.base_id)
        elif "raw_hex" in step:
            request["content"] = bytes.fromhex(step["raw_hex"])
        elif "raw_body" in step:
            request["content"] = self._filled(step["raw_body"]).encode()
        if step["method"] != "GET" and "json" not in step:
            request["headers"] = {"content-type": "application/json"}
        own = {name.lower(): value for name, value in step.get("headers", {}).items()}
        request["headers"] = request.get("headers", {}) | own
        await self._send(
            reply,
            request,
            events=step.get("disconnect_after_events"),
            after_s=step.get("disconnect_after_s"),
        )

    async def _slowloris(self, step: Step, position: int) -> None:
        reply = self._reply(step, position, step["path"])
        await wire.slow_upload(self.server.url, reply, step["hold_s"])

    async def _load(self, step: Step, position: int) -> None:
        reference = self._filled(step["adapter"])
        body = {"name": step.get("name", reference), "reference": reference}
        body |= {key: step[key] for key in ("api_token", "pin") if key in step}
        self.aliases[body["name"]] = reference
        reply = self._reply(step, position, "/v1/adapters")
        await self._send(reply, wire.json_request(reply.path, body))

    async def _unload(self, step: Step, position: int) -> None:
        request = wire.unload_request(self._filled(step["adapter"]))
        await self._send(self._reply(step, position, request["url"]), request)

    async def _parallel(self, step: Step, position: int) -> None:
        once = self._each(step) if step.get("for_each_adapter") else inner(step)
        every = [one for _ in range(step.get("times", 1)) for one in once]
        async with asyncio.TaskGroup() as group:
            for one in every:
                group.create_task(self._do(one, position))

    async def _async(self, step: Step, position: int) -> None:
        for one in inner(step):
            task = asyncio.create_task(self._do({**one, "_async": True}, position))
            self._pending.append(task)
        await asyncio.sleep(0.05)  # lets the requests leave before the next step's

    async def _background(self, step: Step, position: int) -> None:
        """Load that lasts as long as told, or until the steps beside it are done."""

        async def client(number: int) -> None:
            ends = time.monotonic() + step["for_s"]
            mine = inner(step)
            while time.monotonic() < ends:
                await self._do({**mine[number % len(mine)], "_label": "background"}, position)

        for number in range(step["concurrency"]):
            self._pending.append(asyncio.create_task(client(number), name="background"))

    async def _repeat(self, step: Step, position: int) -> None:
        for _ in range(step["times"]):
            await self._all(inner(step), position)
            self.resident.append(self.server.resident_bytes())

    async def _for_each(self, step: Step, position: int) -> None:
        await self._all(self._each(step), position)

    def _each(self, step: Step) -> list[Step]:
        values = step.get("values")
        pairs = (
            [(name, self.path_of(name)) for name in self.case.adapters]
            if values is None
            else [(self._filled(value), self._filled(value)) for value in values]
        )
        return [
            {**replaced(one, "$EACH", value), "_label": label}
            for label, value in pairs
            for one in inner(step)
        ]

    async def _sleep(self, step: Step, _: int) -> None:
        await asyncio.sleep(step["s"])

    async def _wait(self, step: Step, _: int) -> None:
        if step["until"] != "idle":
            raise NotUnderstood(f"wait until {step['until']!r}")
        await wait_idle(self.http, step["timeout_s"])

    async def _rm(self, step: Step, _: int) -> None:
        await asyncio.to_thread(remove, Path(self._filled(step["path"])))

    async def _copy(self, step: Step, _: int) -> None:
        source, target = (Path(self._filled(step[end])) for end in ("from", "to"))
        await asyncio.to_thread(overwrite, source, target)

    async def _mark(self, step: Step, _: int) -> None:
        self.marks[step["metric"]] = read_metrics(await self.http.get("/metrics"), step["metric"])
