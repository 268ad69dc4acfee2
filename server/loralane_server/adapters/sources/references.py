"""What a caller may name: the grammar of adapter references, decided without touching anything.

    org/name               on the hub, its main branch
    org/name@revision      on the hub: a branch, a tag or a commit
    /folder/below/a/root   a folder below an --adapter-root
    s3://bucket/some/name  below an --adapter-root of this form
    some/name              the same two, relative to a root, where there is such an adapter

An alias (given by the operator) wins over all of these; a folder below a root wins over S3, and S3
over the hub. Nothing is ever looked up in the working directory. Everything else is refused: `..`,
`~`, URLs, backslashes, control characters, what is outside the roots, names that the hub itself
would refuse, sub-folders of its repositories.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not in its __all__

from loralane_server.errors import AdapterNotFound, InvalidRequest

MAX_LENGTH: Final = 1024
DEFAULT_REVISION: Final = "main"
S3_SCHEME: Final = "s3://"
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]")
_REVISION: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-/]{0,99}")


@dataclass(frozen=True, slots=True)
class HubPlace:
    """A repository of the hub at a revision."""

    repo: str
    revision: str = DEFAULT_REVISION


@dataclass(frozen=True, slots=True)
class S3Place:
    """A folder of a bucket: all keys that begin with `key` and a slash."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{S3_SCHEME}{self.bucket}/{self.key}"


@dataclass(frozen=True, slots=True)
class S3Root:
    """A prefix of a bucket below which clients may name adapters; `prefix` "" = all of it."""

    bucket: str
    prefix: str = ""

    def below(self, name: str) -> S3Place | None:
        """The place of this name below the prefix; None = no key has such a name."""
        if not _plain_segments(name):
            return None
        return S3Place(self.bucket, f"{self.prefix}/{name}" if self.prefix else name)

    def holds(self, place: S3Place) -> bool:
        """Whether a place lies below the prefix."""
        return place.bucket == self.bucket and (
            not self.prefix or place.key.startswith(f"{self.prefix}/")
        )

    def __str__(self) -> str:
        return f"{S3_SCHEME}{self.bucket}/{self.prefix}".rstrip("/")


#: What --adapter-root may be.
AdapterRoot = Path | S3Root


def parse_root(text: str) -> AdapterRoot:
    """Read a value of --adapter-root: a folder, or s3://bucket/prefix. Raises `ValueError`."""
    if not text.startswith(S3_SCHEME):
        return Path(text)
    bucket, _, prefix = text.removeprefix(S3_SCHEME).rstrip("/").partition("/")
    if not _BUCKET.fullmatch(bucket) or (prefix and not _plain_segments(prefix)):
        raise ValueError(f"--adapter-root {text!a} is not of the form s3://bucket/prefix")
    return S3Root(bucket, prefix)


def parse_s3(reference: str) -> S3Place:
    """Read `s3://bucket/some/name`; raises as `check_reference`, and for keys without a name."""
    rest = reference.removeprefix(S3_SCHEME)
    check_reference(rest)
    bucket, _, key = rest.partition("/")
    if not _BUCKET.fullmatch(bucket) or not _plain_segments(key):
        raise _invalid(reference, "is not of the form s3://bucket/some/name")
    return S3Place(bucket, key)


def s3_below(reference: str, roots: tuple[S3Root, ...]) -> S3Place:
    """The place that an s3:// reference names, if it lies below a root.

    Raises:
        AdapterNotFound: it does not.
        InvalidRequest: not such a reference.
    """
    place = parse_s3(reference)
    if not any(root.holds(place) for root in roots):
        raise _out_of_reach(reference, "is not below an --adapter-root")
    return place


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
    if repo.count("/") > 1 and "//" not in repo:
        raise _invalid(
            reference,
            "names a subfolder of a hub repository, which is not served; copy the subfolder below "
            "an --adapter-root, or into a repository of its own",
        )
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


def _plain_segments(key: str) -> bool:
    """Whether no part of a key is empty or walks: stores behind S3's protocol may be folders."""
    return {"", ".", ".."}.isdisjoint(key.split("/")) and key.isprintable() and "\\" not in key


def _invalid(reference: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"adapter {_show(reference)} {why}")


def _out_of_reach(reference: str, why: str) -> AdapterNotFound:
    """The same answer whether something is there or not."""
    return AdapterNotFound(f"adapter {_show(reference)} {why}")


def _show(reference: str) -> str:
    text = ascii(reference)
    return text if len(text) <= 120 else f"{text[:117]}..."
