"""The few requests that we make to the hub, bounded in time, and its errors turned into ours."""

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from huggingface_hub import constants, get_hf_file_metadata, get_session, hf_hub_url
from huggingface_hub.errors import (
    FileMetadataError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    hf_raise_for_status,
)

from loralane_server.adapters.references import HubPlace
from loralane_server.errors import (
    AdapterCorrupt,
    AdapterForbidden,
    AdapterNotFound,
    ShardError,
    SourceUnavailable,
)

#: For one request about metadata, from its start to its last byte.
METADATA_TIMEOUT_S: Final = 10.0
#: httpx.HTTPError or httpx2.HTTPError, whichever the installed huggingface_hub is built on.
_TRANSPORT_ERROR: Final[type[Exception]] = HfHubHTTPError.__bases__[0]
_NOT_FOUND: Final = {
    "RepoNotFound": "no such repository, or this token may not see it",
    "RevisionNotFound": "no such revision",
    "EntryNotFound": "no such file",
}


@dataclass(frozen=True, slots=True)
class HubToken:
    """What authorises a request: a caller's token, none, or (for aliases) the shard's own login."""

    secret: str | None = field(default=None, repr=False)
    #: Without a secret: use the login of this machine, if there is one.
    ambient: bool = False

    @property
    def value(self) -> str | bool | None:
        """The `token` argument that huggingface_hub expects."""
        return self.secret or (None if self.ambient else False)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of the hub as it was when it was asked for."""

    name: str
    commit: str
    #: sha256 for large files, git's blob hash for small ones.
    etag: str
    size: int


class HubClient:
    """Asks one hub; `endpoint` None = `HF_ENDPOINT` or huggingface.co."""

    def __init__(self, endpoint: str | None, timeout_s: float) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s

    def head(self, place: HubPlace, name: str, token: HubToken) -> RemoteFile:
        """What a file is now; also the check that this token may read it.

        Raises:
            AdapterNotFound: no such repository, revision or file; the message says which.
            AdapterForbidden, SourceUnavailable: see `hub_errors`.
        """
        with hub_errors(place, name):
            found = get_hf_file_metadata(
                self._url(place, name),
                token=token.value,
                timeout=self._timeout_s,
                endpoint=self.endpoint,
            )
        if found.commit_hash is None or found.size is None:
            raise SourceUnavailable(
                f"{name} of {place.repo}: the answer is not from a Hugging Face hub "
                "(no commit or size); check HF_ENDPOINT and proxies"
            )
        return RemoteFile(name, found.commit_hash, found.etag or "", found.size)

    def read(
        self, place: HubPlace, file: RemoteFile, begin: int, end: int, token: HubToken
    ) -> bytes:
        """The bytes `[begin, end)` of a file, and no more."""
        if begin >= end:
            return b""
        headers = build_hf_headers(
            token=token.value,
            headers={"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"},
        )
        with hub_errors(place, file.name):
            return self._range(self._url(place, file.name), headers, begin, end)

    def _range(self, url: str, headers: dict[str, str], begin: int, end: int) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        content = bytearray()
        with get_session().stream("GET", url, headers=headers, timeout=self._timeout_s) as answer:
            hf_raise_for_status(answer)
            skip = 0 if answer.status_code == 206 else begin
            for chunk in answer.iter_raw():  # as it comes: a hub that drips is noticed
                content += chunk
                if len(content) >= skip + end - begin:
                    return bytes(content[skip : skip + end - begin])
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{len(content)} bytes in {self._timeout_s:g} s")
        raise ConnectionError("the answer ended early")

    def _url(self, place: HubPlace, name: str) -> str:
        return hf_hub_url(place.repo, name, revision=place.revision, endpoint=self.endpoint)


@contextmanager
def hub_errors(place: HubPlace, name: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into ours: not found, forbidden, or worth a retry.

    Raises:
        AdapterNotFound: no such repository, revision or file.
        AdapterForbidden: gated, private, or a bad token.
        SourceUnavailable: no connection, a timeout, a busy hub, a full disk, offline mode.
    """
    try:
        yield
    except (_TRANSPORT_ERROR, OSError, ValueError, RuntimeError) as exc:
        raise _translated(exc, f"{name} of {place.repo} at {place.revision}") from exc


def _translated(error: BaseException, what: str) -> ShardError:
    if isinstance(error, LocalEntryNotFoundError | ValueError) and error.__cause__ is not None:
        return _translated(error.__cause__, what)
    if isinstance(error, HfHubHTTPError):
        return _refused(error, what)
    if isinstance(error, OfflineModeIsEnabled | LocalEntryNotFoundError):
        return not_cached(what)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SourceUnavailable(f"{what}: no space left on the disk of the hub cache")
    if isinstance(error, FileMetadataError):
        return SourceUnavailable(f"{what}: the answer is not from a Hugging Face hub")
    return SourceUnavailable(f"{what}: the hub does not answer ({type(error).__name__})")


def _refused(error: HfHubHTTPError, what: str) -> ShardError:
    status = error.response.status_code
    code = error.response.headers.get("X-Error-Code", "")
    if code in _NOT_FOUND:
        return AdapterNotFound(f"{what}: {_NOT_FOUND[code]}")
    if code == "GatedRepo":
        return AdapterForbidden(f"{what}: the repository is gated; send a token that has access")
    if status in (401, 403):
        return AdapterForbidden(f"{what}: no such repository, or this token may not read it")
    if status == 404:
        return AdapterNotFound(f"{what}: not found")
    if status == 416:
        return AdapterCorrupt(f"{what} is truncated: it is shorter than its header says")
    retry_after = error.response.headers.get("Retry-After", "")
    return SourceUnavailable(
        f"{what}: the hub answers {status}",
        retry_after_ms=1000 * int(retry_after)
        if retry_after.isascii() and retry_after.isdigit()
        else 0,
    )


def not_cached(what: str) -> AdapterNotFound:
    """The error of offline mode for what is not in the local cache."""
    return AdapterNotFound(
        f"{what}: not in the local cache, and offline mode (HF_HUB_OFFLINE) is on"
    )


def is_offline() -> bool:
    """Whether huggingface_hub may not use the network."""
    return bool(constants.HF_HUB_OFFLINE)
