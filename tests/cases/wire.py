"""Requests of a case, sent over HTTP, and what they send described for the oracle."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any, Final
from urllib.parse import quote, urlsplit

import httpx
import jinja2

from tests.cases.base import Base, byte_tokenizer
from tests.cases.replies import Reply
from tests.cases.tensors import NotUnderstood

TIMEOUT_S: Final = 130
_TOKENIZER: Final = byte_tokenizer()
_GENERATE: Final = frozenset("op id adapter prompt max_tokens logprobs stream temperature".split())
#: Handed on in LoRAX's `parameters` as they are.
_NATIVE: Final = frozenset(
    "api_token subfolder seed stop top_p top_k typical_p repetition_penalty adapter_source "
    "merged_adapters response_format ignore_eos_token truncate return_full_text".split()
)


def encode(text: str) -> tuple[int, ...]:
    """Return the ids of a prompt, BOS first."""
    return tuple(_TOKENIZER.encode(text).ids)


def native_body(step: dict[str, Any]) -> dict[str, Any]:
    """Return LoRAX's request for a `generate` or `stream` step. Raises NotUnderstood."""
    hang_up = {"disconnect_after_events", "disconnect_after_s"} if step["op"] == "stream" else set()
    if unknown := step.keys() - _GENERATE - _NATIVE - hang_up:
        raise NotUnderstood(f"{step['op']} with {sorted(unknown)}")
    parameters = {key: step[key] for key in _NATIVE & step.keys()}
    parameters |= {"max_new_tokens": step["max_tokens"], "details": True}
    if step.get("adapter") is not None:
        parameters["adapter_id"] = step["adapter"]
    if step.get("temperature"):
        parameters |= {"temperature": step["temperature"], "do_sample": True}
    if step.get("logprobs"):
        parameters["return_k_alternatives"] = step["logprobs"]
    return {"inputs": step["prompt"], "parameters": parameters}


def describe(reply: Reply, body: Any, base: Base, base_id: str) -> None:
    """Note what a request asks for: adapter, prompt ids, length."""
    reply.sent = body
    if not isinstance(body, dict):
        return
    parameters = body.get("parameters") or {}
    native = "inputs" in body
    adapter = parameters.get("adapter_id") if native else body.get("model")
    reply.adapter = None if adapter in (None, "", base_id) else adapter
    count = parameters.get("max_new_tokens") if native else body.get("max_tokens")
    reply.max_tokens = count if isinstance(count, int) else 0
    reply.encode = lambda: _prompt(body, base)


def _prompt(body: dict[str, Any], base: Base) -> tuple[int, ...] | None:
    prompt = body.get("inputs", body.get("prompt"))
    if isinstance(prompt, str):
        return encode(prompt)
    if isinstance(prompt, list) and prompt and all(isinstance(id, int) for id in prompt):
        return tuple(prompt)
    messages = body.get("messages")
    if isinstance(messages, list) and 0 < len(messages) < 100 and base.template is not None:
        return chat_ids(messages, base.template)
    return None


def chat_ids(messages: list[dict[str, Any]], template: str) -> tuple[int, ...]:
    """Return the ids of a chat, by a template that brings its own BOS."""
    turns = [{**turn, "content": _plain(turn.get("content"))} for turn in messages]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(template).render(
        messages=turns, bos_token="<bos>", eos_token="<eos>", add_generation_prompt=True
    )
    return tuple(_TOKENIZER.encode(text, add_special_tokens=False).ids)


def _plain(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


async def send(
    http: httpx.AsyncClient,
    reply: Reply,
    request: dict[str, Any],
    *,
    events: int | None = None,
    after_s: float | None = None,
) -> None:
    """Send one request and fill in the reply; hang up after so many events or seconds."""
    started = time.monotonic()
    try:
        async with asyncio.timeout(after_s if after_s is not None else TIMEOUT_S):
            async with http.stream(**request) as answer:
                reply.status = answer.status_code
                reply.headers = dict(answer.headers)
                await _receive(answer, reply, started, events)
    except TimeoutError:
        reply.disconnected = after_s is not None
        reply.failure = None if reply.disconnected else f"no answer in {TIMEOUT_S} s"
    except httpx.HTTPError as exc:
        reply.failure = f"{type(exc).__name__}: {exc}"
    reply.seconds = time.monotonic() - started


async def _receive(
    answer: httpx.Response, reply: Reply, started: float, events: int | None
) -> None:
    if not reply.is_stream:
        reply.body = await answer.aread()
        return
    async for line in answer.aiter_lines():
        reply.lines.append((time.monotonic() - started, line))
        events = None if events is None else events - line.startswith("data:")
        if events == 0:
            reply.disconnected = True
            break
    reply.body = "\n".join(line for _, line in reply.lines).encode()


def json_request(path: str, body: Any) -> dict[str, Any]:
    """Return a POST of JSON; NaN and lone surrogates are written as Python writes them."""
    content = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    return {"method": "POST", "url": path, "content": content, "headers": headers}


def unload_request(name: str) -> dict[str, Any]:
    """Return the request that unloads an adapter."""
    return {"method": "DELETE", "url": f"/v1/adapters/{quote(name, safe='')}"}


async def slow_upload(url: str, reply: Reply, hold_s: float) -> None:
    """Start a chunked upload and never end it; note the answer, if one comes while it is held."""
    where = urlsplit(url)
    started = time.monotonic()
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    head = (
        f"POST {reply.path} HTTP/1.1\r\nHost: {where.netloc}\r\n"
        "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    dripping = asyncio.create_task(_drip(writer, head.encode()))
    try:
        async with asyncio.timeout(hold_s):
            line = await reader.readline()
            reply.status = int(line.split()[1]) if line else 0
            async for header in _headers(reader):
                reply.headers |= dict([header])
    except (TimeoutError, OSError) as exc:
        reply.failure = f"no answer while the upload was held ({type(exc).__name__})"
    finally:
        dripping.cancel()
        writer.close()
    reply.seconds = time.monotonic() - started


async def _drip(writer: asyncio.StreamWriter, head: bytes) -> None:
    writer.write(head)
    while True:
        writer.write(b"1\r\n{\r\n")
        await writer.drain()
        await asyncio.sleep(1)


async def _headers(reader: asyncio.StreamReader) -> AsyncIterator[tuple[str, str]]:
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        yield name.lower(), value.strip()
