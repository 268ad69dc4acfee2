"""Checks of the form of answers: what each client looks for."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from tests.cases.expect import Scope, check, each
from tests.cases.replies import Reply
from tests.cases.shapes import mismatch, missing, pick


@each("shape")
def _shape(value: Any, reply: Reply) -> str | None:
    return mismatch(reply.json, value)


@each("json")
def _json(value: Any, reply: Reply) -> str | None:
    return mismatch(reply.json, value)


@each("json_path")
def _json_path(value: Any, reply: Reply) -> str | None:
    for path, shape in value.items():
        found = pick(reply.json, path)
        wrong = [what for item in found if (what := mismatch(item, shape))]
        if wrong or not found:
            return f"{path}: {wrong[0] if wrong else 'missing'}"
    return None


@each("needs")
def _needs(value: Any, reply: Reply) -> str | None:
    body = reply.json
    if isinstance(body, list) and len(body) == 1:
        body = body[0]
    lacks = [lack for path in value for lack in missing(body, path)]
    return f"lacks {lacks}" if lacks else None


@each("needs_per_event")
def _needs_per_event(value: Any, reply: Reply) -> str | None:
    lacks = [lack for event in reply.events for path in value for lack in missing(event, path)]
    return f"events lack {lacks[:3]}" if lacks or not reply.events else None


@each("last")
def _last(value: Any, reply: Reply) -> str | None:
    event = reply.events[-1] if reply.events else {}
    lacks = [lack for path in value for lack in missing(event, path)]
    return f"its last event lacks {lacks}" if lacks else None


@each("no_key")
def _no_key(value: Any, reply: Reply) -> str | None:
    return f"it has a key {value!r}" if value in (reply.json or {}) else None


@each("object")
def _object(value: Any, reply: Reply) -> str | None:
    found = (reply.json or {}).get("object")
    return None if found == value else f"object {found!r}"


@each("echo_model")
def _echo_model(value: Any, reply: Reply) -> str | None:
    found = (reply.json or {}).get("model")
    return None if found == value else f"model {found!r}"


@each("error_shape")
def _error_shape(value: Any, reply: Reply) -> str | None:
    shapes = {
        "openai": {"error": {"message": "str", "type": "str"}},
        "native": {"error": "str", "error_type": "str"},
    }
    return mismatch(reply.json, shapes[value])


@check("error_body")
def _error_body(value: Any, scope: Scope) -> Iterator[str]:
    for reply in scope.answers:
        wrong = mismatch(reply.json, value) if reply.status >= 400 else None
        if wrong:
            yield f"{reply.name}: {wrong}"


@check("strict_json", "json_valid", "no_nan", "no_nan_or_infinity_literals")
def _strict(_: Any, scope: Scope) -> Iterator[str]:
    """Every body and every event is JSON as the standard has it, so without NaN."""

    def refuse(literal: str) -> None:
        raise ValueError(f"the literal {literal}")

    for reply in scope.answers:
        texts = [d for d in reply.data if d != "[DONE]"] if reply.is_stream else [reply.message]
        for text in texts:
            try:
                json.loads(text, parse_constant=refuse)
            except ValueError as exc:
                yield f"{reply.name}: {exc}: {text[:80]!r}"


@each("every_data_line_json")
def _every_line(_: Any, reply: Reply) -> str | None:
    for data in reply.data:
        try:
            json.loads(data)
        except ValueError:
            return f"a data line is no JSON: {data[:80]!r}"
    return None if reply.data else "no data lines"


@each("no_done_marker")
def _no_done(_: Any, reply: Reply) -> str | None:
    return "it ends with [DONE]" if "[DONE]" in reply.data else None


@each("ends_with")
def _ends_with(value: Any, reply: Reply) -> str | None:
    lines = [line for _, line in reply.lines if line]
    return None if lines and lines[-1] == value else f"it ends with {lines[-1:]}"


@each("every_event")
def _every_event(value: Any, reply: Reply) -> str | None:
    """`token{id,text}, generated_text null`: of every event but the last."""
    for part in re.split(r", (?![^{]*\})", value):
        name, _, is_null = part.partition(" ")
        path = re.sub(r"(\w)\{", r"\1.{", name)
        for event in reply.events[:-1]:
            if is_null == "null" and event.get(name) is not None:
                return f"an event has {name}"
            if not is_null and (lacks := missing(event, path)):
                return f"an event lacks {lacks}"
    return None if reply.events else "no events"


@each("every_chunk")
def _every_chunk(value: Any, reply: Reply) -> str | None:
    for entry in value:
        path, _, wanted = entry.partition("=")
        for event in reply.events:
            found = pick(event, path)
            if not found or (wanted and found != [wanted]):
                return f"a chunk has {path} {found}"
    return None if reply.events else "no chunks"


@each("same_id")
def _same_id(_: Any, reply: Reply) -> str | None:
    ids = {event.get("id") for event in reply.events}
    return None if len(ids) == 1 else f"ids {ids}"


@each("first_delta")
def _first_delta(value: Any, reply: Reply) -> str | None:
    key, _, wanted = value.partition(" ")
    found = pick(reply.events[0] if reply.events else {}, f"choices[0].delta.{key}")
    return None if found == [wanted] else f"its first delta has {key} {found}"


@each("usage_chunk")
def _usage_chunk(value: Any, reply: Reply) -> str | None:
    chunk = reply.events[-1] if reply.events else {}
    lacks = [key for key in value["usage"] if key not in (chunk.get("usage") or {})]
    same = chunk.get("choices") == value["choices"]
    return None if same and not lacks else f"its last chunk is {str(chunk)[:120]}"


@each("no_truthy_error_key")
def _no_error(_: Any, reply: Reply) -> str | None:
    parts = reply.events if reply.is_stream else [reply.json or {}]
    return "it has an error" if any(part.get("error") for part in parts) else None


def _completion_logprobs(reply: Reply) -> list[dict[str, Any]]:
    parts = reply.events if reply.is_stream else [reply.json or {}]
    choices = (c for part in parts for c in part.get("choices", ()))
    return [c["logprobs"] for c in choices if c.get("logprobs")]


def _tops(logprobs: dict[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield (sampled token, its alternatives) of either dialect."""
    for entry in logprobs.get("content") or ():
        yield entry["token"], {t["token"]: t["logprob"] for t in entry.get("top_logprobs", ())}
    tops = logprobs.get("top_logprobs") or ()
    yield from zip(logprobs.get("tokens") or (), tops, strict=False)


@check("sum_exp_top_le")
def _sum(value: Any, scope: Scope) -> Iterator[str]:
    for reply in scope.answers:
        for logprobs in _completion_logprobs(reply):
            for token, top in _tops(logprobs):
                total = sum(math.exp(p) for p in (top or {}).values())
                if total > value:
                    yield f"{reply.name}: alternatives of {token!r} sum to {total}"


@check("sampled_token_included")
def _sampled(_: Any, scope: Scope) -> Iterator[str]:
    for reply in scope.answers:
        for logprobs in _completion_logprobs(reply):
            for token, top in _tops(logprobs):
                if top and token not in top:
                    yield f"{reply.name}: {token!r} is not among {sorted(top)}"


@check("completions_top_logprobs_keys")
def _keys(value: Any, scope: Scope) -> Iterator[str]:
    assert value == "token strings", value
    for reply in scope.answers:
        for logprobs in _completion_logprobs(reply):
            tops = [top for top in logprobs.get("top_logprobs") or () if top]
            if tops and all(key.isdecimal() for top in tops for key in top):
                yield f"{reply.name}: alternatives are keyed by {list(tops[0])}"


@check("text_offset_monotonic")
def _offsets(_: Any, scope: Scope) -> Iterator[str]:
    for reply in scope.answers:
        found = [o for lp in _completion_logprobs(reply) for o in lp.get("text_offset") or ()]
        if found != sorted(found):
            yield f"{reply.name}: offsets {found}"
