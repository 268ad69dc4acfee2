"""Checks of one answer: its status, its error, its texts and counts."""

import re
from collections.abc import Iterator
from typing import Any

from tests.cases.expect import CHECKS, Scope, check, each
from tests.cases.replies import Reply, told
from tests.cases.shapes import missing


@each("status")
def _status(value: Any, reply: Reply) -> str | None:
    return None if reply.status == value else f"not {value}: {told(reply)}"


@check("status_in")
def _status_in(value: Any, scope: Scope) -> Iterator[str]:
    """An empty name is documented to mean the base: then the answer must be the base's."""
    if not scope.answers:
        yield "there is no reply to look at"
    for reply in scope.answers:
        if reply.asks_by_empty_name and reply.status == 200:
            yield from CHECKS["output"]("base", scope.of([reply]))
        elif reply.status not in value:
            yield f"{reply.name}: not in {value}: {told(reply)}"


@each("never_status")
def _never_status(value: Any, reply: Reply) -> str | None:
    never = value if isinstance(value, list) else [value]
    return told(reply) if reply.status in never or reply.status == 0 else None


@check("error_mentions_any")
def _mentions(value: Any, scope: Scope) -> Iterator[str]:
    refused = [reply for reply in scope.answers if reply.status >= 400]
    if not refused:
        yield "nothing was refused"
    for reply in refused:
        if not any(str(term).lower() in reply.message.lower() for term in value):
            yield f"{reply.name}: names none of {value}: {told(reply)}"


@each("content_type")
def _content_type(value: Any, reply: Reply) -> str | None:
    found = reply.headers.get("content-type", "")
    return None if found.startswith(value) else f"content type {found!r}"


@each("header", "header_present")
def _header(value: Any, reply: Reply) -> str | None:
    return None if value.lower() in reply.headers else f"no header {value!r}"


@each("latency_s_max", "within_s")
def _latency(value: Any, reply: Reply) -> str | None:
    return None if reply.seconds <= value else f"took {reply.seconds:.1f} s"


@each("ttft_s_max")
def _first(value: Any, reply: Reply) -> str | None:
    return None if reply.first_s <= value else f"first token after {reply.first_s:.1f} s"


@each("closed_within_s")
def _closed(value: Any, reply: Reply) -> str | None:
    if reply.failure:
        return f"not closed: {reply.failure}"
    return None if reply.seconds <= value else f"closed after {reply.seconds:.1f} s"


@each("no_file_content_in_error")
def _no_content(_: Any, reply: Reply) -> str | None:
    leaks = [text for text in ("root:", "lora_alpha", "peft_type") if text in reply.message]
    return f"its error holds {leaks}" if leaks else None


@check("error_text_never_matches")
def _never_matches(value: Any, scope: Scope) -> Iterator[str]:
    for reply in scope.answers:
        if value in reply.message:
            yield f"{reply.name}: says {value!r}"


@check("consistent")
def _consistent(_: Any, scope: Scope) -> Iterator[str]:
    """An empty text is accepted by all routes, or by none."""
    empty = [r for r in scope.answers if _asks_with_empty_text(r.sent)]
    if len({reply.status == 200 for reply in empty}) > 1:
        yield "empty texts answer " + ", ".join(f"{r.path} {r.status}" for r in empty)


def _asks_with_empty_text(sent: Any) -> bool:
    prompt = sent.get("inputs", sent.get("prompt")) if isinstance(sent, dict) else None
    return prompt == "" or (isinstance(prompt, list) and "" in prompt)


@check("other_status")
def _other_status(value: Any, scope: Scope) -> Iterator[str]:
    """error_type -> status, wherever one of them is seen."""
    for reply in scope.answers:
        kind = reply.json.get("error_type") if isinstance(reply.json, dict) else None
        if kind in value and reply.status != value[kind]:
            yield f"{reply.name}: {kind} with {reply.status}"


@each("last_event")
def _last_event(value: Any, reply: Reply) -> str | None:
    event = reply.events[-1] if reply.is_stream and reply.events else {}
    if value == "error object, or finish_reason set":
        ended = bool(reply.finish_reasons) or "error" in event or reply.status >= 400
        return None if ended else f"it ends with {str(event)[:100]}"
    missing = [part for part in value.split(" + ") if _lacks(event, part)]
    return f"its last event lacks {missing}" if missing else None


def _lacks(event: Any, part: str) -> list[str]:
    return missing(event, re.sub(r"(\w)\{", r"\1.{", part))
