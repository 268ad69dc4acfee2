"""What is known once a case's steps are done: its replies, and the server as it is then."""

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httpx

from tests.cases.case import Case
from tests.cases.complete import complete
from tests.cases.hub_script import files_of
from tests.cases.materialise import Adapter
from tests.cases.oracle import Continuation, Scaling
from tests.cases.pings import pinged
from tests.cases.replies import Reply
from tests.cases.server import NEIGHBOUR, Server, is_alive
from tests.cases.steps import Steps
from tests.cases.tensors import NotUnderstood
from tests.cases.watch import wait_idle
from tests.cases.wire import describe, json_request, native_body, send

_IDLE_S = 10.0
_PROBE_TOKENS = 6


@dataclass
class Run:
    """One case, carried out. Checks only read it."""

    case: Case
    server: Server
    steps: Steps
    #: Log of the server since the case began.
    log: str
    metrics_before: httpx.Response
    metrics_after: httpx.Response
    models: Any
    alive: bool
    #: What is wrong with the base or with another adapter after the case; None = nothing.
    neighbour_fault: str | None
    #: Seconds from the last step until nothing ran; None = it never came to that.
    idle_after_s: float | None
    health_s: list[float] = field(default_factory=list)

    @property
    def replies(self) -> tuple[Reply, ...]:
        """All but those of background load."""
        return tuple(r for r in self.steps.replies if r.label != "background")

    def adapter_of(self, reply: Reply) -> Adapter | None:
        """Return the adapter that a reply's request names; None = base. Raises NotUnderstood."""
        if reply.adapter is None:
            return None
        reference = self.steps.aliases.get(reply.adapter, reply.adapter)
        name = self._names.get(reference)
        return self.case.named(name) if name is not None else self._hub_adapter(reference)

    @cached_property
    def _names(self) -> Mapping[str, str]:
        return {self.steps.path_of(name): name for name in self.case.adapters}

    def _hub_adapter(self, reference: str) -> Adapter:
        repo, _, revision = reference.partition("@")
        entry = self.case.setup.get("hub", {}).get(repo)
        cached = self.case.setup.get("hub_cache", {}).get("models--" + repo.replace("/", "--"))
        entry = cached if entry is None else entry
        if isinstance(entry, Mapping):
            revisions = entry.get("revisions", {"main": entry.get("files", "a1")})
            entry = revisions.get(revision or "main")
        if not isinstance(entry, str):
            raise NotUnderstood(f"what adapter {reference!r} is")
        if "padded" in entry:
            raise NotUnderstood(f"dense_merge of {entry!r}")
        files_of(entry, self.case.named)
        return self.case.named(entry.removesuffix("-files"))

    def merged(
        self, reply: Reply, adapter: Adapter | None, scaling: Scaling = None
    ) -> Continuation:
        """Return the oracle's answer to a reply's request, with this adapter or the base."""
        if reply.prompt is None:
            raise NotUnderstood(f"the prompt of {reply.name}, so its output")
        if adapter is None:
            return self.server.oracle.base(reply.prompt, reply.max_tokens)
        return self.server.oracle.merged(adapter, scaling, reply.prompt, reply.max_tokens)

    def completed(self, reply: Reply, adapter: Adapter) -> Continuation:
        """Return the oracle's answer with everything applied that the adapter's files hold."""
        if reply.prompt is None:
            raise NotUnderstood(f"the prompt of {reply.name}")
        return self.server.oracle.completed(adapter, complete, reply.prompt, reply.max_tokens)


async def watched(steps: Steps, *, health: bool) -> Run:
    """Carry out a case's steps and look at the server afterwards."""
    server, http = steps.server, steps.http
    log_start = server.log.stat().st_size
    before = await http.get("/metrics")
    with pinged(server.url) if health else contextlib.nullcontext([]) as latencies:
        await steps.run()
    ended = time.monotonic()
    idle = await wait_idle(http, _IDLE_S)
    idle_after_s = time.monotonic() - ended if idle else None
    fault = await _neighbour_fault(steps)
    return Run(
        case=steps.case,
        server=server,
        steps=steps,
        log=server.log.read_bytes()[log_start:].decode(errors="replace"),
        metrics_before=before,
        metrics_after=await http.get("/metrics"),
        models=(await http.get("/v1/models")).json(),
        alive=await is_alive(http),
        neighbour_fault=fault,
        idle_after_s=idle_after_s,
        health_s=latencies,
    )


async def _neighbour_fault(steps: Steps) -> str | None:
    """Ask the base and an adapter that the case has nothing to do with."""
    for name in (None, NEIGHBOUR):
        fault = await _probe_fault(steps, name)
        if fault is not None and (name is None or steps.server.serves_adapters):
            return fault
    return None


async def learn(steps: Steps) -> None:
    """Note whether a fresh server serves adapters at all."""
    steps.server.serves_adapters = await _probe_fault(steps, NEIGHBOUR) is None


async def _probe_fault(steps: Steps, name: str | None) -> str | None:
    server, base = steps.server, steps.base
    step = {"op": "generate", "adapter": name, "prompt": "x", "max_tokens": _PROBE_TOKENS}
    reply, body = Reply("generate", "/generate"), native_body(step)
    describe(reply, body, base, server.base_id)
    await send(steps.http, reply, json_request("/generate", body))
    assert reply.prompt is not None
    if name is None:
        right = server.oracle.base(reply.prompt, _PROBE_TOKENS)
    else:
        right = server.oracle.merged(server.neighbour, None, reply.prompt, _PROBE_TOKENS)
    found = [token["id"] for token in reply.tokens]
    is_exact = base.dtype == "float32" and not base.script
    if reply.status == 200 and (found == list(right.ids) or not is_exact):
        return None
    return f"{name or 'base'} answers {reply.status} {found} {reply.message[:80]}"
