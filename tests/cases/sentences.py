"""What sentences in expectations mean. Those about outputs are with the checks of outputs."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.cases.expect import CHECKS, Scope, check, prose, sentence
from tests.cases.tensors import NotUnderstood

_ROOT: Final = Path(__file__).parents[2]
_GUIDES: Final = (_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md")))


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
