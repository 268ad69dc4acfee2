"""Checks of texts, counts and choices of one answer or of several."""

import json
import re
from collections.abc import Iterator
from typing import Any

from tests.cases.expect import Scope, check, each
from tests.cases.replies import Reply, told


@check("text", "stream_concat")
def _text(value: Any, scope: Scope) -> Iterator[str]:
    for reply in scope.answers:
        if reply.text != value:
            yield f"{reply.name}: text {reply.text!r}, not {value!r}; {told(reply)}"


@check("steps_text")
def _texts(value: Any, scope: Scope) -> Iterator[str]:
    for i, (text, reply) in enumerate(zip(value, scope.answers, strict=True)):
        if reply.text != text:
            yield f"step {i}: text {reply.text!r}, not {text!r}; {told(reply)}"


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
        return None if found == value else f"{name} {found}, not {value}: {told(reply)}"


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
