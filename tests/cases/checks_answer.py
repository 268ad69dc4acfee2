"""Checks of one answer: its status, its error, its texts and counts."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.cases.expect import CHECKS, Scope, check, each, prose, sentence
from tests.cases.replies import Reply
from tests.cases.shapes import missing
from tests.cases.tensors import NotUnderstood

_ROOT: Final = Path(__file__).parents[2]
_GUIDES: Final = (_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md")))


def _told(reply: Reply) -> str:
    return f"{reply.status} {reply.failure or ''} {reply.message[:120]!r}"


@each("status")
def _status(value: Any, reply: Reply) -> str | None:
    return None if reply.status == value else f"not {value}: {_told(reply)}"


@check("status_in")
def _status_in(value: Any, scope: Scope) -> Iterator[str]:
    """An empty name is documented to mean the base: then the answer must be the base's."""
    if not scope.answers:
        yield "there is no reply to look at"
    for reply in scope.answers:
        if reply.asks_by_empty_name and reply.status == 200:
            yield from CHECKS["output"]("base", scope.of([reply]))
        elif reply.status not in value:
            yield f"{reply.name}: not in {value}: {_told(reply)}"


@each("never_status")
def _never_status(value: Any, reply: Reply) -> str | None:
    never = value if isinstance(value, list) else [value]
    return _told(reply) if reply.status in never or reply.status == 0 else None


@check("error_mentions_any")
def _mentions(value: Any, scope: Scope) -> Iterator[str]:
    refused = [reply for reply in scope.answers if reply.status >= 400]
    if not refused:
        yield "nothing was refused"
    for reply in refused:
        if not any(str(term).lower() in reply.message.lower() for term in value):
            yield f"{reply.name}: names none of {value}: {_told(reply)}"


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


@check("text", "stream_concat")
def _text(value: Any, scope: Scope) -> Iterator[str]:
    for reply in scope.answers:
        if reply.text != value:
            yield f"{reply.name}: text {reply.text!r}, not {value!r}; {_told(reply)}"


@check("steps_text")
def _texts(value: Any, scope: Scope) -> Iterator[str]:
    for i, (text, reply) in enumerate(zip(value, scope.answers, strict=True)):
        if reply.text != text:
            yield f"step {i}: text {reply.text!r}, not {text!r}; {_told(reply)}"


@check("stream_concat_equals_nonstream")
def _same_streamed(_: Any, scope: Scope) -> Iterator[str]:
    texts: dict[str, set[str | None]] = {}
    for reply in scope.answers:
        asked = json.dumps({**reply.sent, "stream": None}, sort_keys=True)
        texts.setdefault(asked, set()).add(reply.text)
    for asked, found in texts.items():
        if len(found) > 1:
            yield f"streamed and not, {asked[:80]} has {found}"


@each("no_replacement_char")
def _no_replacement(_: Any, reply: Reply) -> str | None:
    return "U+FFFD in its text" if "\ufffd" in reply.message else None


@each("generated_special_not_in_text")
def _no_special(_: Any, reply: Reply) -> str | None:
    found = re.search(r"<(bos|eos|pad|unk)>", reply.text or "")
    return f"text holds {found[0]}" if found else None


@each("finish_reason")
def _finish(value: Any, reply: Reply) -> str | None:
    allowed = value if isinstance(value, list) else [value]
    reasons = reply.finish_reasons
    return None if reasons and set(reasons) <= set(allowed) else f"finish reasons {reasons}"


def _usage(name: str) -> None:
    @each(name)
    def _count(value: Any, reply: Reply) -> str | None:
        found = reply.usage.get(name)
        return None if found == value else f"{name} {found}, not {value}: {_told(reply)}"


for _name in ("prompt_tokens", "completion_tokens"):
    _usage(_name)


@check("choices")
def _choices(value: Any, scope: Scope) -> Iterator[str]:
    wanted = value if isinstance(value, list) else [value] * len(scope.answers)
    for count, reply in zip(wanted, scope.answers, strict=True):
        if len(reply.choices) != count:
            yield f"{reply.name}: {len(reply.choices)} choices, not {count}"


@each("indexes")
def _indexes(value: Any, reply: Reply) -> str | None:
    return None if sorted(reply.choices) == value else f"indexes {sorted(reply.choices)}"


@each("choices_equal")
def _choices_equal(_: Any, reply: Reply) -> str | None:
    return None if len(set(reply.choices.values())) == 1 else f"choices {reply.choices}"


@each("distinct_choices_possible")
def _choices_distinct(_: Any, reply: Reply) -> str | None:
    return None if len(set(reply.choices.values())) > 1 else "all choices are one"


@each("each_index_has_one_finish_reason")
def _one_reason_each(_: Any, reply: Reply) -> str | None:
    same = len(reply.finish_reasons) == len(reply.choices)
    return None if same else f"{len(reply.choices)} choices end {reply.finish_reasons}"


@check("same_as_step")
def _same_as_step(value: Any, scope: Scope) -> Iterator[str]:
    other = next(r for r in scope.run.replies if r.position == value)
    for reply in scope.answers:
        if reply.choices != other.choices:
            yield f"choices {reply.choices}, in step {value} {other.choices}"


@check("usage_counts_all_choices")
def _usage_of_all(_: Any, scope: Scope) -> Iterator[str]:
    for reply in scope.answers:
        full = len(reply.choices) * reply.max_tokens
        count = reply.usage.get("completion_tokens")
        whole = reply.status == 200 and set(reply.finish_reasons) == {"length"}
        if whole and count is not None and count != full:
            yield f"{reply.name}: usage counts {count} of {full} tokens"


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


@prose(r"(\d{3})(?:/(\d{3}))?(?: after drain)?")
def _statuses(found: re.Match[str], scope: Scope) -> Iterator[str]:
    yield from CHECKS["status_in"]([int(s) for s in found.groups() if s], scope)


@prose(r"(\d{3}) or clamped")
def _or_clamped(found: re.Match[str], scope: Scope) -> Iterator[str]:
    yield from CHECKS["status_in"]([200, int(found[1])], scope)


@prose(r"4xx naming (.+)")
def _naming(found: re.Match[str], scope: Scope) -> Iterator[str]:
    yield from CHECKS["status_in"](list(range(400, 429)), scope)
    yield from CHECKS["error_mentions_any"]([found[1], *found[1].split()], scope)


@prose(r"field unknown and ignored")
def _ignored(_: re.Match[str], scope: Scope) -> Iterator[str]:
    yield from CHECKS["status"](200, scope)


@prose(r"same as (\w+)")
def _same_status(found: re.Match[str], scope: Scope) -> Iterator[str]:
    other = next((r for r in scope.run.replies if r.id == found[1]), None)
    if other is None:
        raise NotUnderstood(f"a step {found[1]!r}")
    yield from CHECKS["status"](other.status, scope)


@prose(r"documented alias list maps (.+) to base")
def _documented_alias(found: re.Match[str], scope: Scope) -> Iterator[str]:
    """The guides name every alias, and the answer is the base's."""
    guides = "".join(path.read_text() for path in _GUIDES)
    names = re.findall(r"'([^']+)'", found[1])
    yield from (f"no guide names `{name}`" for name in names if f"`{name}`" not in guides)
    yield from CHECKS["status"](200, scope)
    for reply in scope.answers:
        if reply.prompt is not None and reply.usage.get("prompt_tokens") != len(reply.prompt):
            yield f"{reply.name}: not the base's prompt"


@prose(r"documented: .*")
def _documented(found: re.Match[str], _: Scope) -> Iterator[str]:
    yield f"the guides do not say so: {found[0]!r}"


@check("never")
def _never(value: Any, scope: Scope) -> Iterator[str]:
    """The fault itself, in words or as an output."""
    if isinstance(value, str):
        yield from sentence(f"never {value}", scope)
        return
    for key, what in value.items():
        name = f"never_{key}"
        if name not in CHECKS:
            raise NotUnderstood(f"never {key!r}")
        yield from CHECKS[name](what, scope)


@prose(r"never engine crash or a hang")
def _no_crash(_: re.Match[str], scope: Scope) -> Iterator[str]:
    yield from CHECKS["server_alive"](True, scope)
    yield from (f"{r.name}: {r.failure}" for r in scope.answers if r.failure)


@prose(r"never treats it as a hub adapter and downloads")
def _no_download(_: re.Match[str], scope: Scope) -> Iterator[str]:
    yield from CHECKS["no_hub_traffic"](True, scope)


@prose(r"never a negative number read as a huge unsigned one")
def _no_negative(_: re.Match[str], scope: Scope) -> Iterator[str]:
    for reply in scope.answers:
        if reply.max_tokens < 0 and reply.status == 200:
            yield f"max_tokens {reply.max_tokens} was accepted"
