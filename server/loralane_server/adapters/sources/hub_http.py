"""The few requests that we make to the hub, bounded in time, and its errors turned into ours."""

import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import httpx
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import (
    FileMetadataError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # not in its __all__

from loralane_server.adapters.sources.references import HubPlace
from loralane_server.adapters.sources.refusals import retry_after_ms
from loralane_server.adapters.sources.remote import RemoteFile
from loralane_server.errors import (
    AdapterCorrupt,
    AdapterForbidden,
    AdapterNotFound,
    InvalidRequest,
    ShardError,
    SourceUnavailable,
)

#: httpx.HTTPError or httpx2.HTTPError, whichever the installed huggingface_hub is built on.
_TRANSPORT_ERROR: Final[type[Exception]] = HfHubHTTPError.__bases__[0]
_MAX_REDIRECTS: Final = 5
_TOKEN: Final = re.compile(r"[!-~]{1,1024}")
#: It becomes a folder of the cache.
_COMMIT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_\-]{0,63}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
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

    def __post_init__(self) -> None:
        """Raise `InvalidRequest` for what would not be sent as one header, without showing it."""
        if self.secret is not None and not _TOKEN.fullmatch(self.secret):
            raise InvalidRequest("the hub token holds characters that no token has, or too many")

    @property
    def value(self) -> str | bool | None:
        """The `token` argument that huggingface_hub expects."""
        return self.secret or (None if self.ambient else False)


#: Nobody's token.
NO_TOKEN: Final = HubToken()


def hub_file(name: str, commit: str, etag: str, size: int) -> RemoteFile:
    """A file of the hub: its etag is the sha256 of large files, git's blob hash of small ones."""
    return RemoteFile(name, commit, etag, size, "sha256" if _SHA256.fullmatch(etag) else "")


class HubClient:
    """Asks one hub; `endpoint` None = `HF_ENDPOINT` or huggingface.co. Any thread may call.

    Bodies come through a client of our own: huggingface_hub's retries by itself, without a bound
    in total, and shares 100 connections with everything else in the process.
    """

    def __init__(self, endpoint: str | None, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        #: Guarded by the lock; made when first needed, since it reads certificates.
        self._bodies: httpx.Client | None = None

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            if self._bodies is not None:
                self._bodies.close()

    def head(self, place: HubPlace, name: str, token: HubToken) -> RemoteFile:
        """What a file is now; also the check that this token may read it.

        The token goes to the hub's own host and to none that it redirects to.

        Raises:
            AdapterNotFound: no such repository, revision or file; the message says which.
            AdapterForbidden, SourceUnavailable: see `hub_errors`.
        """
        with hub_errors(place, name):
            found = get_hf_file_metadata(
                self._url(place, name),
                token=token.value,
                timeout=self._timeout_s,
                endpoint=self._endpoint,
            )
        commit = found.commit_hash or ""
        if found.size is None or not found.etag or not _COMMIT.fullmatch(commit):
            raise SourceUnavailable(
                f"{name} of {place.repo}: the answer is not from a Hugging Face hub "
                "(no commit, size or etag); check HF_ENDPOINT and proxies"
            )
        return hub_file(name, commit, found.etag, found.size)

    def read(
        self, place: HubPlace, file: RemoteFile, begin: int, end: int, token: HubToken
    ) -> bytes:
        """The bytes `[begin, end)` of a file, and no more.

        Raises:
            SourceUnavailable: they do not come in time.
            As `stream`.
        """
        deadline = time.monotonic() + self._timeout_s
        content = bytearray()
        for chunk in self.stream(place, file.name, begin, end, token):
            content += chunk
            if len(content) >= end - begin:
                return bytes(content[: end - begin])
            if time.monotonic() > deadline:  # a hub that drips is noticed
                break
        raise SourceUnavailable(
            f"{file.name} of {place.repo}: the hub does not answer in full "
            f"({len(content)} of {end - begin} bytes in {self._timeout_s:g} s)"
        )

    def stream(
        self, place: HubPlace, name: str, begin: int, end: int, token: HubToken
    ) -> Iterator[bytes]:
        """The bytes of a file from `begin` on, as they come; may go on behind `end`.

        Raises as `hub_errors`, also in the middle.
        """
        headers = build_hf_headers(
            token=token.value,
            headers={"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"},
        )
        url = self._url(place, name)
        with hub_errors(place, name):
            if is_offline():
                raise OfflineModeIsEnabled(name)
            with self._client.stream("GET", url, headers=headers) as answer:
                if answer.is_error:
                    raise _refused(answer.status_code, answer.headers, _what(place, name))
                skip = 0 if answer.status_code == httpx.codes.PARTIAL_CONTENT else begin
                for chunk in answer.iter_raw():
                    yield chunk[skip:]
                    skip = max(0, skip - len(chunk))

    @property
    def _client(self) -> httpx.Client:
        with self._lock:
            if self._bodies is None:
                self._bodies = body_client(self._timeout_s)
            return self._bodies

    def _url(self, place: HubPlace, name: str) -> str:
        return hf_hub_url(place.repo, name, revision=place.revision, endpoint=self._endpoint)


def body_client(timeout_s: float, transport: httpx.BaseTransport | None = None) -> httpx.Client:
    """A client for bodies: as many connections as threads, a few redirects, none to plain HTTP.

    httpx drops the Authorization header where a redirect leaves the origin that it was meant for.
    """
    return httpx.Client(
        follow_redirects=True,
        max_redirects=_MAX_REDIRECTS,
        timeout=timeout_s,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=16),
        event_hooks={"response": [_stay_encrypted]},
        transport=transport,
    )


def _stay_encrypted(answer: httpx.Response) -> None:
    if not answer.has_redirect_location or answer.request.url.scheme != "https":
        return
    if answer.request.url.join(answer.headers["Location"]).scheme != "https":
        raise httpx.UnsupportedProtocol("a redirect from https to plain http")


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
    except (_TRANSPORT_ERROR, httpx.HTTPError, OSError, ValueError, RuntimeError) as exc:
        raise _translated(exc, _what(place, name)) from exc


def _what(place: HubPlace, name: str) -> str:
    return f"{name} of {place.repo} at {place.revision}"


def _translated(error: BaseException, what: str) -> ShardError:
    if isinstance(error, HfHubHTTPError):
        return _refused(error.response.status_code, error.response.headers, what)
    if isinstance(error, OfflineModeIsEnabled | LocalEntryNotFoundError):
        return not_cached(what)
    if isinstance(error, FileMetadataError):
        return SourceUnavailable(f"{what}: the answer is not from a Hugging Face hub")
    return SourceUnavailable(f"{what}: the hub does not answer ({type(error).__name__})")


def _refused(status: int, headers: Mapping[str, str], what: str) -> ShardError:
    code = headers.get("X-Error-Code", "")
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
    return SourceUnavailable(
        f"{what}: the hub answers {status}",
        retry_after_ms=retry_after_ms(headers.get("Retry-After", "")),
    )


def not_cached(what: str) -> AdapterNotFound:
    """The error of offline mode for what is not in the local cache."""
    return AdapterNotFound(
        f"{what}: not in the local cache, and offline mode (HF_HUB_OFFLINE) is on"
    )


def is_offline() -> bool:
    """Whether huggingface_hub may not use the network."""
    return bool(constants.HF_HUB_OFFLINE)
