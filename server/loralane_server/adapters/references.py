"""What a caller may name: the grammar of adapter references, decided without touching anything.

    org/name               on the hub, its main branch
    org/name@revision      on the hub: a branch, a tag or a commit
    /folder/below/a/root   a folder below an --adapter-root
    some/folder            the same, relative to a root, where that folder exists

An alias (given by the operator) wins over all of these; a folder below a root wins over the hub.
Nothing is ever looked up in the working directory. Everything else is refused: `..`, `~`, URLs,
backslashes, control characters, paths outside the roots, names that the hub itself would refuse.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from loralane_server.errors import AdapterNotFound, InvalidRequest

MAX_LENGTH: Final = 1024
DEFAULT_REVISION: Final = "main"
_REVISION: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-/]{0,99}")


@dataclass(frozen=True, slots=True)
class HubPlace:
    """A repository of the hub at a revision."""

    repo: str
    revision: str = DEFAULT_REVISION


def check_reference(reference: str) -> None:
    """Raise for what can be neither a path below a root nor a hub id.

    `AdapterNotFound` for a path that could lead out of the roots, else `InvalidRequest`.
    """
    if not reference.strip() or reference != reference.strip():
        raise _invalid(reference, "is empty or has blanks around it")
    if len(reference) > MAX_LENGTH:
        raise _invalid(reference, f"is longer than {MAX_LENGTH} characters")
    if not reference.isprintable():
        raise _invalid(reference, "holds characters that cannot be printed")
    if "://" in reference or "\\" in reference or reference.startswith("~"):
        raise _invalid(reference, "is a URL or no plain path")
    if not {".", ".."}.isdisjoint(reference.split("/")):
        raise _out_of_reach(reference, "walks through . or ..")


def path_below(reference: str, roots: tuple[Path, ...]) -> Path:
    """The folder that an absolute path names, if it lies below a root as it is written.

    Raises:
        AdapterNotFound: it does not; symbolic links are for the caller to check.
    """
    path = Path(os.path.normpath(reference))
    if not any(root in path.parents for root in roots):
        raise _out_of_reach(reference, "is not below an --adapter-root")
    return path


def parse_hub_id(reference: str) -> HubPlace:
    """Read `org/name` or `org/name@revision` by the hub's own rules.

    Raises:
        AdapterNotFound: a single word, which is neither an alias nor a folder.
        InvalidRequest: no name that the hub could hold.
    """
    repo, at, revision = reference.partition("@")
    try:
        validate_repo_id(repo)
    except HFValidationError as exc:
        raise _invalid(
            reference, "is no alias, no folder below an --adapter-root, no hub id"
        ) from exc
    if not repo.isascii():
        raise _invalid(reference, "is no hub id: only ASCII letters, digits, - _ . are allowed")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision or revision.endswith("/")):
        raise _invalid(reference, "names no revision that the hub could hold")
    if "/" not in repo:
        raise AdapterNotFound(
            f"no alias and no folder is named {_show(reference)}; a hub id has the form org/name"
        )
    return HubPlace(repo, revision or DEFAULT_REVISION)


def _invalid(reference: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"adapter {_show(reference)} {why}")


def _out_of_reach(reference: str, why: str) -> AdapterNotFound:
    """The same answer whether something is there or not."""
    return AdapterNotFound(f"adapter {_show(reference)} {why}")


def _show(reference: str) -> str:
    text = ascii(reference)
    return text if len(text) <= 120 else f"{text[:117]}..."
