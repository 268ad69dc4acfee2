"""From the bytes of a request to a checked record, or an error that names the field.

Bodies are decoded once, to plain JSON values: so fields that are known but not implemented can be
refused by a table, while unknown ones are ignored as OpenAI and LoRAX do.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from loralane_router.errors import RequestError, invalid
from loralane_router.gateway.begun import Begun
from loralane_router.gateway.failures import BodyRefused
from loralane_router.gateway.limits import Limits
from loralane_router.requests import bearer_key

_Form = TypeVar("_Form", bound=msgspec.Struct)

#: Field → the values that change nothing (null always is one).
Neutral = Mapping[str, tuple[object, ...]]

#: A body that is too long is still read so far, unstored: a client that is writing hears no answer.
_DRAIN: Final = 16

_AT: Final = re.compile(r"(?P<what>.*) - at `\$\.?(?P<path>.*)`")
_MISSING: Final = re.compile(r"Object missing required field `(?P<field>\w+)`")


async def read_json(request: Request, limits: Limits) -> dict[str, Any]:
    """Return the body, a JSON object. Raises BodyRefused (400, 408, 413) or ClientDisconnect."""
    return decode(await read(request, limits))


def decode(raw: bytes) -> dict[str, Any]:
    """Return the JSON object that a body is. Raises BodyRefused (400)."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as exc:
        raise BodyRefused(400, "invalid_json", f"the body is not valid JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise BodyRefused(400, "invalid_json", "the body must be a JSON object")
    return body


async def read(request: Request, limits: Limits) -> bytes:
    """Return the body as it came. Raises BodyRefused (408, 413) or ClientDisconnect."""
    arriving = Begun(_arrived(request, limits))
    if not arriving.waits:
        return await arriving
    try:
        async with asyncio.timeout(limits.body_s):
            return await arriving
    except TimeoutError as exc:
        message = f"the body did not arrive within {limits.body_s:g} s"
        raise BodyRefused(408, "body_timeout", message) from exc


async def _arrived(request: Request, limits: Limits) -> bytes:
    declared = header(request, b"content-length")
    if declared.isdecimal() and int(declared) > _DRAIN * limits.body_bytes:
        raise _too_long(limits)
    chunks: list[bytes] = []
    total, more = 0, True
    while more and total <= _DRAIN * limits.body_bytes:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk, more = message.get("body", b""), message.get("more_body", False)
        total += len(chunk)
        if total <= limits.body_bytes:
            chunks.append(chunk)
        else:
            chunks.clear()
    if total > limits.body_bytes:
        raise _too_long(limits)
    return b"".join(chunks)


def _too_long(limits: Limits) -> BodyRefused:
    message = f"the body is longer than {limits.body_bytes} bytes"
    return BodyRefused(413, "body_too_large", message)


def header(request: Request, name: bytes) -> str:
    """Return the first value of a header, "" if it was not sent; `name`: in lower case."""
    for found, value in request.scope["headers"]:
        if found == name:
            return bytes(value).decode("latin-1")
    return ""


def bearer(request: Request) -> str | None:
    """Return the key of an `Authorization: Bearer` header."""
    return bearer_key(header(request, b"authorization"))


def hub_key(request: Request) -> str | None:
    """Return the bearer key if it looks like a hub token.

    OpenAI clients always send some key, and the hub refuses even public files to a wrong token.
    """
    key = bearer(request)
    return key if key is not None and key.startswith("hf_") else None


def parse(body: dict[str, Any], form: type[_Form], neutral: Neutral) -> _Form:
    """Return `body` as a record. Raises RequestError (400) with the name of the field at fault."""
    refuse_unsupported(body, neutral)
    try:
        return msgspec.convert(body, form)
    except (msgspec.ValidationError, RecursionError) as exc:
        raise _named(str(exc)) from exc


def refuse_unsupported(body: Mapping[str, Any], neutral: Neutral) -> None:
    """Raise RequestError (400) for a field that would change the answer and is not implemented."""
    for field in body.keys() & neutral.keys():
        value = body[field]
        if value is not None and value not in neutral[field]:
            raise invalid(f"{field} is not supported; leave it out", field)


def _named(message: str) -> RequestError:
    what, path = message, ""
    if match := _AT.fullmatch(message):
        what, path = match["what"], match["path"]
    if match := _MISSING.fullmatch(what):
        path = f"{path}.{match['field']}".removeprefix(".")
        return invalid(f"{path} is required", path)
    return invalid(f"{path or 'the body'}: {what[0].lower()}{what[1:]}", path or None)
