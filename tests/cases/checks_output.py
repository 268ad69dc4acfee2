"""Checks of what was generated, against the oracle and against other replies."""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np

from tests.cases.base import byte_tokenizer
from tests.cases.expect import CHECKS, Scope, check, failures, prose, sentence
from tests.cases.oracle import Continuation, Scaling
from tests.cases.replies import Reply
from tests.cases.tensors import NotUnderstood

_TOLERANCE: Final = 1e-4
_TOKENIZER: Final = byte_tokenizer()
#: Of LoRA tensors only, whatever else the adapter holds.
_MERGE: Final = re.compile(
    r"dense_merge(?:\((\w+)\)| of LoRA only| without \w+| of the upcast values)?"
)
#: The names that case files have for all that an adapter's files hold, applied.
_COMPLETE: Final = re.compile(
    r"dora_reference|full_replacement_reference|merge incl\. replaced \w+|"
    r"dense_merge plus replaced bias|y = Wx \+ s\*\(B A x \+ b\)|E' = E \+ s\*\(B A\)\^T|"
    r"head' = E \+ s\*?BA, input embeddings unchanged|rows [\d, ]+ replaced in embeddings"
)


@check("output", "every_output")
def _output(value: Any, scope: Scope) -> Iterator[str]:
    """Sentences that are no merge are looked up when they are needed: nothing may pass by luck."""
    if not scope.answers:
        yield "there is no output to look at"
    rejected = scope.around.get("or_reject", {})
    for reply in scope.answers:
        if reply.op not in ("generate", "stream", "http"):
            continue
        if reply.status != 200 and reply.id in rejected:
            yield from failures(rejected[reply.id], scope.of([reply]))
        else:
            yield from _difference(value, reply, scope)


@prose(_MERGE.pattern + r"|base")
def _plain_output(found: re.Match[str], scope: Scope) -> Iterator[str]:
    yield from _output(found[0], scope)


def _difference(value: str, reply: Reply, scope: Scope) -> Iterator[str]:
    if reply.status != 200:
        yield f"{reply.name}: no output: {reply.status} {reply.failure or reply.message[:160]}"
        return
    right = _expected(value, reply, scope, scope.around.get("scaling"))
    tolerance = scope.around.get("tolerance", {}).get("logprob_abs", _TOLERANCE)
    wrong = _compare(reply, right, tolerance)
    if wrong:
        yield f"{reply.name}: not {value}: {wrong}"


def _expected(value: str, reply: Reply, scope: Scope, scaling: Scaling) -> Continuation:
    """What the oracle says. Raises NotUnderstood for an output that it cannot compute."""
    if value == "base":
        return scope.run.merged(reply, None)
    if _COMPLETE.fullmatch(value):
        whole = scope.run.adapter_of(reply)
        if whole is None:
            raise NotUnderstood(f"{value!r} for {reply.name}, which names no adapter")
        return scope.run.completed(reply, whole)
    found = _MERGE.fullmatch(value)
    if found is None:
        raise NotUnderstood(f"output {value!r}")
    adapter = scope.run.case.named(found[1]) if found[1] else scope.run.adapter_of(reply)
    if adapter is None:
        raise NotUnderstood(f"dense_merge for {reply.name}, which names no adapter")
    return scope.run.merged(reply, adapter, scaling)


def _compare(reply: Reply, right: Continuation, tolerance: float) -> str | None:
    """Compare ids and log-probabilities, or texts where the route tells no ids.

    Where the oracle's own two best tokens are closer than the tolerance, either is right, and
    what follows cannot be compared.
    """
    close = np.flatnonzero(right.margins < tolerance)
    until = int(close[0]) if close.size else len(right.ids)
    if not reply.tokens:
        text = _TOKENIZER.decode(list(right.ids), skip_special_tokens=True)
        return None if reply.text == text or close.size else f"{reply.text!r}, not {text!r}"
    found = [token["id"] for token in reply.tokens if not _is_filler(token)]
    if found[:until] != list(right.ids)[:until] or (not close.size and len(found) != until):
        return f"tokens {found[:12]}, not {list(right.ids)[:12]}"
    return _logprob_fault(reply.tokens[:until], right, tolerance)


def _is_filler(token: dict[str, Any]) -> bool:
    """An event that stands for no token: text that was held back until the end."""
    return bool(token["special"] and token["id"] == 0)


def _logprob_fault(
    tokens: Sequence[dict[str, Any]], right: Continuation, tolerance: float
) -> str | None:
    for step, token in enumerate(tokens):
        seen = [token, *token.get("alternative_tokens", ())]
        for one in seen:
            off = abs(one["logprob"] - right.logprobs[step, one["id"]])
            if not off <= tolerance:
                return f"log-probability of token {one['id']} at {step} is off by {off:.2g}"
    return None


@check("never_output")
def _never_output(value: Any, scope: Scope) -> Iterator[str]:
    for name in value if isinstance(value, list) else [value]:
        for reply in scope.answers:
            if _is_forbidden(name, reply, scope, scope.around.get("scaling")):
                yield f"{reply.name}: the answer is {name}"


def _is_forbidden(name: str, reply: Reply, scope: Scope, scaling: Scaling) -> bool:
    if reply.status != 200:
        return False
    if name == "base" and reply.adapter is None:
        return False  # the base was asked for, by an empty name
    try:
        right = _expected(name, reply, scope, scaling)
    except NotUnderstood:
        if _MERGE.fullmatch(name) is None or scope.run.adapter_of(reply) is not None:
            raise
        return False
    return _compare(reply, right, _TOLERANCE) is None and not _is_wanted(right, reply, scope)


def _is_wanted(fault: Continuation, reply: Reply, scope: Scope) -> bool:
    """Whether an answer that the case wants is the fault's, token by token: nothing tells them
    apart, e.g. an embedding row that the prompt does not use.
    """
    ways = [scope.around, *scope.around.get("any_of", ())]
    wanted = [way["output"] for way in ways if isinstance(way, Mapping) and "output" in way]
    return any(
        right.ids == fault.ids and np.allclose(right.logprobs, fault.logprobs, atol=1e-9)
        for right in (_expected(name, reply, scope, None) for name in wanted)
    )


@check("never_scaling")
def _never_scaling(value: Any, scope: Scope) -> Iterator[str]:
    for reply in scope.answers:
        if _is_forbidden("dense_merge", reply, scope, value):
            yield f"{reply.name}: scaled by {value}"


@check("never_outcome")
def _never_outcome(value: Any, scope: Scope) -> Iterator[str]:
    if value != "LoRA applied, head and embeddings ignored":
        raise NotUnderstood(f"never outcome {value!r}")
    yield from CHECKS["never_output"]("dense_merge of LoRA only", scope)


@check("scaling")
def _scaling(value: Any, scope: Scope) -> Iterator[str]:
    """Qualifies `output`; by itself it names what cannot be seen."""
    if not {"output", "every_output"} & scope.around.keys():
        yield from CHECKS["output"]("dense_merge", scope)


@check("tolerance", "or_reject")
def _qualifier(_: Any, scope: Scope) -> Iterator[str]:
    if not {"output", "every_output"} & scope.around.keys():
        raise NotUnderstood("a tolerance without an output")
    yield from ()


@check("outputs")
def _outputs(value: Any, scope: Scope) -> Iterator[str]:
    for id, output in value.items():
        replies = _with_id(scope, id)
        yield from sentence(output, scope.of(replies))


def _with_id(scope: Scope, id: str) -> list[Reply]:
    """The replies of an id; `a*` is an id, and stands for what begins so."""
    found = [r for r in scope.run.replies if r.id is not None and fnmatchcase(r.id, id)]
    if not found:
        raise NotUnderstood(f"a step {id!r}")
    return found


def _said(reply: Reply) -> object:
    return tuple(token["id"] for token in reply.tokens) or reply.text or reply.status


@check("equal")
def _equal(value: Any, scope: Scope) -> Iterator[str]:
    groups = [value] if isinstance(value[0], str) else value
    for group in groups:
        said = {id: _said(reply) for id in group for reply in _with_id(scope, id)}
        if len(set(said.values())) > 1 or any(s is None for s in said.values()):
            yield f"not equal: {said}"


@check("all_equal")
def _all_equal(value: Any, scope: Scope) -> Iterator[str]:
    for id in value:
        replies = _with_id(scope, id)
        refused = [r for r in replies if r.status != 200]
        if refused:
            told = refused[0].failure or refused[0].message[:120]
            yield f"{id}: {len(refused)} answer {refused[0].status} {told}"
        elif len({_said(reply) for reply in replies}) > 1:
            yield f"{id}: {len({_said(r) for r in replies})} different answers"


@check("text_equal")
def _text_equal(value: Any, scope: Scope) -> Iterator[str]:
    replies = [reply for id in value for reply in _with_id(scope, id)]
    if len({_said(reply) for reply in replies}) > 1:
        yield f"different answers among {value}"
    tolerance = scope.around.get("logprob_abs_tol")
    if tolerance is None:
        return
    rows = [[token["logprob"] for token in reply.tokens] for reply in replies]
    if any(len(row) != len(rows[0]) for row in rows):
        yield "different lengths"
    elif np.ptp(np.array(rows), axis=0).max() > tolerance:
        yield f"log-probabilities differ by {np.ptp(np.array(rows), axis=0).max():.2g}"


@check("logprob_abs_tol")
def _logprob_tolerance(_: Any, scope: Scope) -> Iterator[str]:
    if "text_equal" not in scope.around:
        raise NotUnderstood("logprob_abs_tol without text_equal")
    yield from ()


@check("serial_equals_parallel")
def _serial(_: Any, scope: Scope) -> Iterator[str]:
    by_adapter: dict[str | None, set[object]] = {}
    for reply in scope.answers:
        by_adapter.setdefault(reply.adapter, set()).add(_said(reply))
    yield from (f"{name} answers differently" for name, s in by_adapter.items() if len(s) > 1)


@prose(r"equal (\w+)")
def _equal_to(found: re.Match[str], scope: Scope) -> Iterator[str]:
    other = _with_id(scope, found[1])[0]
    for reply in scope.answers:
        if _said(reply) != _said(other):
            yield f"{reply.name}: not as {found[1]}"


@prose(r"never stream continues with base or with another adapter")
def _no_switch(_: re.Match[str], scope: Scope) -> Iterator[str]:
    """A stream that ran to its end has its adapter's tokens and no others."""
    for reply in scope.answers:
        if reply.is_stream and reply.finish_reasons:
            yield from _difference("dense_merge", reply, scope)


@prose(r"base template used")
def _base_template(_: re.Match[str], scope: Scope) -> Iterator[str]:
    yield from CHECKS["rendered"]("documented choice", scope)


@check("rendered", "no_python_objects_in_prompt")
def _rendered(_: Any, scope: Scope) -> Iterator[str]:
    """The documented choice is the base's template; a prompt's length shows which was used."""
    for reply in scope.answers:
        assert reply.prompt is not None
        count = reply.usage.get("prompt_tokens")
        if reply.status == 200 and count != len(reply.prompt):
            yield f"{reply.name}: a prompt of {count} tokens, the base's template makes another"
