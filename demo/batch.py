"""One question to the base and to every adapter at once, over the OpenAI API."""

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

MAX_TOKENS: Final = 48
_COUNTER: Final = re.compile(r"^loralane_(steps|generated_tokens)_total (\S+)$", re.MULTILINE)


class RequestFailed(Exception):
    """The server refused a request or broke off its answer; the message is the server's."""


@dataclass(frozen=True, slots=True)
class Models:
    """What the server serves: the base and the adapters on top of it, by the names to ask for."""

    base: str
    adapters: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The base first."""
        return (self.base, *self.adapters)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one model said, and how long its first text took, in milliseconds."""

    model: str
    text: str
    first_ms: float


@dataclass(frozen=True, slots=True)
class Batch:
    """What all models said to one question, and what the server counted meanwhile."""

    answers: tuple[Answer, ...]
    tokens: int
    steps: int


async def list_models(client: httpx.AsyncClient) -> Models:
    """Ask the server for its base and its adapters."""
    reply = (await client.get("/v1/models")).raise_for_status()
    listed: list[dict[str, Any]] = reply.json()["data"]
    base = next(model["id"] for model in listed if model["parent"] is None)
    return Models(base, tuple(model["id"] for model in listed if model["parent"] is not None))


async def ask_all(client: httpx.AsyncClient, models: Sequence[str], question: str) -> Batch:
    """Send all requests at once; the answers come in the order of `models`.

    Raises RequestFailed.
    """
    before = await _counters(client)
    answers = await asyncio.gather(*(_ask(client, model, question) for model in models))
    after = await _counters(client)
    tokens, steps = (after[name] - before[name] for name in ("generated_tokens", "steps"))
    return Batch(tuple(answers), tokens, steps)


async def _counters(client: httpx.AsyncClient) -> dict[str, int]:
    """Return the server's counters of steps and generated tokens by name."""
    metrics = (await client.get("/metrics")).raise_for_status().text
    return {found[1]: int(float(found[2])) for found in _COUNTER.finditer(metrics)}


async def _ask(client: httpx.AsyncClient, model: str, question: str) -> Answer:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    sent = time.perf_counter()
    first_ms = 0.0
    texts: list[str] = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.is_error:
            raise RequestFailed(f"{model}: {(await reply.aread()).decode(errors='replace')}")
        async for line in reply.aiter_lines():
            text = _text(model, line)
            if text and not first_ms:
                first_ms = (time.perf_counter() - sent) * 1000
            texts.append(text)
    return Answer(model, "".join(texts), first_ms)


def _text(model: str, line: str) -> str:
    """Return the text that one line of the stream brings. Raises RequestFailed."""
    payload = line.removeprefix("data:").strip()
    if not line.startswith("data:") or payload == "[DONE]":
        return ""
    event = json.loads(payload)
    if "error" in event:
        raise RequestFailed(f"{model}: {event['error']}")
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
