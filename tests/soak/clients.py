"""Clients that ask, load, unload and replace adapters all at once, and compare every answer."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import httpx

from tests.soak.fingerprints import PROMPTS, TOKENS, Fingerprint
from tests.soak.shelf import Shelf, Slot

#: Of a hundred turns of a client; the others ask an adapter.
_BASE, _REPLACE, _UNLOAD, _LOAD, _LIST = 8, 4, 4, 3, 1
#: Half of the requests go to so many adapters.
_HOT: Final = 12
_SHOWN: Final = 10


@dataclass
class Record:
    """What happened. Owned by the event loop of the clients."""

    counts: Counter[str] = field(default_factory=Counter)
    #: Answers that were none of those they may be.
    wrong: list[str] = field(default_factory=list)
    #: Refusals that nothing of what the clients did explains.
    unexpected: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether every answer was right."""
        return not self.wrong and not self.unexpected

    def lines(self) -> list[str]:
        """Return the record as text."""
        told = [f"{count:9} {name}" for name, count in sorted(self.counts.items())]
        told += [f"{len(self.wrong):9} WRONG ANSWERS, {len(self.unexpected)} unexpected refusals"]
        return told + self.wrong[:_SHOWN] + self.unexpected[:_SHOWN]


@dataclass(frozen=True)
class Moment:
    """What a slot had been through when a request was sent."""

    replaced: int
    unloaded: int
    unloading: int

    @classmethod
    def of(cls, slot: Slot) -> "Moment":
        """Return the present."""
        return cls(slot.replaced, slot.unloaded, slot.unloading)

    def excuses(self, slot: Slot, status: int) -> bool:
        """Whether a refusal is what a race with an unloading or a replacement may end in."""
        if status == 404:
            return bool(self.unloading) or slot.unloaded > self.unloaded
        return status == 424 and slot.replaced > self.replaced


class Client:
    """One user: one thing at a time, for as long as it is told to go on."""

    def __init__(self, http: httpx.AsyncClient, shelf: Shelf, base: Fingerprint, record: Record,
                 seed: int) -> None:  # fmt: skip
        self._http = http
        self._shelf = shelf
        self._base = base
        self._record = record
        self._draw = Random(f"client {seed}")

    async def run(self, goes_on: Callable[[], bool]) -> None:
        """Take turns until told to stop."""
        while goes_on():
            await self._turn()

    async def _turn(self) -> None:
        at = self._draw.randrange(100)
        for share, turn in (
            (_BASE, self._ask_base), (_REPLACE, self._replace), (_UNLOAD, self._unload),
            (_LOAD, self._load), (_LIST, self._list),
        ):  # fmt: skip
            if at < share:
                return await turn()
            at -= share
        return await self._ask()

    def _slot(self) -> Slot:
        slots = self._shelf.slots
        return self._draw.choice(slots[:_HOT] if self._draw.random() < 0.5 else slots)

    async def _ask(self) -> None:
        slot = self._slot()
        sent = Moment.of(slot)
        prompt = self._draw.choice(PROMPTS)
        status, ids, told = await self._generate(slot.name, prompt)
        if status == 200:
            may_be = [f.answers[prompt] for f in slot.fingerprints(sent.replaced)]
            self._judge(slot.name, prompt, ids, may_be)
        elif sent.excuses(slot, status):
            self._record.counts[f"refused in a race, {status}"] += 1
        else:
            self._record.unexpected.append(f"{slot.name}: {status} {told}")

    async def _ask_base(self) -> None:
        prompt = self._draw.choice(PROMPTS)
        status, ids, told = await self._generate("", prompt)
        if status == 200:
            self._record.counts["base requests"] += 1
            self._judge("the base", prompt, ids, [self._base.answers[prompt]])
        else:
            self._record.unexpected.append(f"the base: {status} {told}")

    def _judge(
        self, name: str, prompt: str, ids: tuple[int, ...], may_be: Sequence[tuple[int, ...]]
    ) -> None:
        self._record.counts["requests answered"] += 1
        self._record.counts["tokens compared"] += len(ids)
        if ids not in may_be:
            self._record.wrong.append(f"{name} after {prompt!r}: {ids}, expected {may_be}")

    async def _generate(self, adapter: str, prompt: str) -> tuple[int, tuple[int, ...], str]:
        """Return status, token ids, and the text of a refusal; half of the answers are streams."""
        parameters = {"adapter_id": adapter, "max_new_tokens": TOKENS, "details": True}
        body = {"inputs": prompt, "parameters": parameters}
        if self._draw.random() < 0.5:
            reply = await self._http.post("/generate_stream", json=body)
            events = [
                json.loads(line[5:]) for line in reply.text.splitlines() if line[:5] == "data:"
            ]
            tokens = [event["token"] for event in events if "token" in event]
        else:
            reply = await self._http.post("/generate", json=body)
            tokens = reply.json()["details"]["tokens"] if reply.status_code == 200 else []
        if float(reply.headers.get("x-loralane-adapter-cold-ms", 0)) > 0:
            self._record.counts["answers that waited for their adapter"] += 1
        return reply.status_code, tuple(token["id"] for token in tokens), reply.text[:300]

    async def _replace(self) -> None:
        changing = [slot for slot in self._shelf.slots if len(slot.versions) > 1]
        if changing:
            self._shelf.replace(self._draw.choice(changing))
            self._record.counts["replacements on the disk"] += 1

    async def _unload(self) -> None:
        slot = self._slot()
        slot.unloaded += 1
        slot.unloading += 1
        reply = await self._http.delete(f"/v1/adapters/{slot.name}")
        slot.unloading -= 1
        self._count("unload", reply, {200, 404, 409})

    async def _load(self) -> None:
        slot = self._slot()
        sent = Moment.of(slot)
        reply = await self._http.post(
            "/v1/adapters", json={"name": slot.name, "reference": slot.name}
        )
        excused = {reply.status_code} if sent.excuses(slot, reply.status_code) else set()
        if "retry-after" in reply.headers:
            excused.add(429)  # a load does not wait for lanes that are all in use
        self._count("load", reply, {200, 201} | excused)

    async def _list(self) -> None:
        reply = await self._http.get("/v1/adapters")
        self._count("list", reply, {200})

    def _count(self, what: str, reply: httpx.Response, expected: set[int]) -> None:
        self._record.counts[f"{what}, {reply.status_code}"] += 1
        if reply.status_code not in expected:
            self._record.unexpected.append(f"{what}: {reply.status_code} {reply.text[:300]}")


async def crowd(
    url: str,
    shelf: Shelf,
    base: Fingerprint,
    clients: int,
    goes_on: Callable[[Record], bool],
    **http: Any,
) -> Record:
    """Run so many clients at once while `goes_on`; return what happened."""
    record = Record()
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, limits=limits, **http) as session,
        asyncio.TaskGroup() as group,
    ):
        for seed in range(clients):
            client = Client(session, shelf, base, record, seed)
            group.create_task(client.run(lambda: goes_on(record)))
    return record
