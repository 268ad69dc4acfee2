"""What a case expects, held against what came back.

An expectation is a JSON object whose keys are names of checks, ids of steps, or ways to pick steps
(`every_step`, `steps`, `step_3`, ...). Checks register themselves in `CHECKS`; a key that is none
of these is a failure, never a pass.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tests.cases.replies import Reply
from tests.cases.tensors import NotUnderstood

if TYPE_CHECKING:
    from tests.cases.aftermath import Run

#: Says something to people only.
_NOTES: Final = frozenset({"note", "mapping", "formula", "skip_if"})


@dataclass(frozen=True)
class Scope:
    """The replies that an expectation is about."""

    run: "Run"
    replies: tuple[Reply, ...]
    #: The expectation's own keys and those around it: some only qualify others.
    around: Mapping[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> tuple[Reply, ...]:
        """What the client did not cut off; loads and unloads only where nothing else is meant."""
        whole = tuple(r for r in self.replies if not r.disconnected)
        texts = tuple(r for r in whole if r.op not in ("load", "unload"))
        return texts or whole

    def of(self, replies: Iterable[Reply]) -> "Scope":
        """Return the same for fewer replies."""
        return Scope(self.run, tuple(replies), self.around)


Check = Callable[[Any, Scope], Iterable[str]]
CHECKS: Final[dict[str, Check]] = {}
#: (what a sentence looks like, the check of it).
PROSE: Final[list[tuple[re.Pattern[str], Callable[[re.Match[str], Scope], Iterable[str]]]]] = []


def check(*names: str) -> Callable[[Check], Check]:
    """Register a check that sees all replies at once; it yields what is wrong."""

    def register(function: Check) -> Check:
        CHECKS.update(dict.fromkeys(names, function))
        return function

    return register


def each(*names: str) -> Callable[[Callable[[Any, Reply], str | None]], Check]:
    """Register a check of one reply: it returns what is wrong, or None."""

    def register(function: Callable[[Any, Reply], str | None]) -> Check:
        def every(value: Any, scope: Scope) -> Iterator[str]:
            if not scope.answers:
                yield "there is no reply to look at"
            for reply in scope.answers:
                wrong = function(value, reply)
                if wrong is not None:
                    yield f"{reply.name}: {wrong}"

        return check(*names)(every)

    return register


def prose(
    pattern: str,
) -> Callable[[Callable[[re.Match[str], Scope], Iterable[str]]], None]:
    """Register the meaning of a sentence."""

    def register(function: Callable[[re.Match[str], Scope], Iterable[str]]) -> None:
        PROSE.append((re.compile(pattern), function))

    return register


def failures(expected: Any, scope: Scope) -> list[str]:
    """Return what is wrong; an empty list is a pass. Raises NotUnderstood."""
    if expected is None:
        return []
    if isinstance(expected, bool) or not isinstance(expected, int | str | list | dict):
        raise NotUnderstood(f"expectation {expected!r}")
    if isinstance(expected, int):
        return list(CHECKS["status"](expected, scope))
    if isinstance(expected, str):
        return sentence(expected, scope)
    if isinstance(expected, list):
        if not all(isinstance(item, int) for item in expected):
            raise NotUnderstood(f"expectation {expected!r}")
        return list(CHECKS["status_in"](expected, scope))
    inner = Scope(scope.run, scope.replies, {**scope.around, **expected})
    return [wrong for key, value in expected.items() for wrong in _key(key, value, inner)]


def sentence(text: str, scope: Scope) -> list[str]:
    """Return what is wrong by a sentence. Raises NotUnderstood for one of no known form."""
    for pattern, function in PROSE:
        found = pattern.fullmatch(text)
        if found is not None:
            return list(function(found, scope))
    raise NotUnderstood(f"expectation {text!r}")


def _key(key: str, value: Any, scope: Scope) -> list[str]:
    if key in _NOTES:
        return []
    if key == "any_of":
        return _any_of(value, scope)
    if key == "steps":
        return _steps(value, scope)
    picked = _picked(key, scope)
    if picked is not None:
        return failures(value, Scope(scope.run, picked, _qualifiers(scope.around)))
    if key in CHECKS:
        return list(CHECKS[key](value, scope))
    raise NotUnderstood(f"expectation {key!r}")


def _qualifiers(around: Mapping[str, Any]) -> dict[str, Any]:
    """What an outer expectation says of every output in it."""
    return {k: v for k, v in around.items() if k in ("scaling", "tolerance", "or_reject")}


def _picked(key: str, scope: Scope) -> tuple[Reply, ...] | None:
    """The replies that a key names; None where it names none."""
    named = tuple(r for r in scope.replies if r.id == key or (r.id is None and r.label == key))
    if named:
        return named
    if key in ("load", "unload"):
        return tuple(r for r in scope.replies if r.op == key)
    if key == "every_step":
        return scope.answers
    if key == "every_adapter":
        return tuple(r for r in scope.answers if r.adapter is not None)
    if key == "async_steps":
        return tuple(r for r in scope.replies if r.is_async)
    found = re.fullmatch(r"step_(\d+)", key)
    if found is not None:
        return tuple(r for r in scope.replies if r.position == int(found[1]))
    return None


def _any_of(alternatives: Sequence[Any], scope: Scope) -> list[str]:
    """One must hold, for all replies together; that one may be beyond us, the others not."""
    told: list[str] = []
    for alternative in alternatives:
        try:
            wrong = failures(alternative, scope)
        except NotUnderstood as exc:
            wrong = [f"runner does not understand {exc}"]
        if not wrong:
            return []
        told.append(wrong[0])
    return ["none of: " + " | ".join(told)]


def _steps(expected: Sequence[Any], scope: Scope) -> list[str]:
    by_position = [[r for r in scope.replies if r.position == i] for i in range(len(expected))]
    around = _qualifiers(scope.around)
    return [
        f"step {i}: {wrong}"
        for i, (one, replies) in enumerate(zip(expected, by_position, strict=True))
        for wrong in failures(one, Scope(scope.run, tuple(replies), around))
    ]
