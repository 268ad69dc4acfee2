"""Adapters on the Hugging Face hub: metadata with the caller's token, headers by range, files late.

Every resolution asks the hub with the caller's own token, also when the files lie in the local
cache: `hf_hub_download` alone would serve a cached private adapter to whoever is refused online.
In offline mode (`HF_HUB_OFFLINE`) nobody can be asked, and cached adapters are open to all callers.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from loralane_server.adapters.sources.downloads import Downloads
from loralane_server.adapters.sources.files import Reads
from loralane_server.adapters.sources.hub_cache import CACHE, HubCache
from loralane_server.adapters.sources.hub_http import (
    NO_TOKEN,
    HubClient,
    HubToken,
    hub_file,
    is_offline,
    not_cached,
)
from loralane_server.adapters.sources.located import Located
from loralane_server.adapters.sources.references import HubPlace
from loralane_server.adapters.sources.remote import METADATA_TIMEOUT_S, RemoteFile, locate_remote
from loralane_server.errors import SourceUnavailable


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Which hub; None = what huggingface_hub takes from the environment."""

    endpoint: str | None = None
    cache_dir: Path | None = None
    #: For one metadata request, from its start to its last byte.
    timeout_s: float = METADATA_TIMEOUT_S


class HubSource:
    """Finds adapters on a hub. Its identity for a file is commit, checksum and size."""

    def __init__(
        self, reads: Reads, settings: HubSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reads = reads
        self._clock = clock
        self.client = HubClient(settings.endpoint, settings.timeout_s)
        self.cache = HubCache(settings.cache_dir)
        self.downloads = Downloads(CACHE, clock)

    def close(self) -> None:
        """Close idle connections."""
        self.client.close()

    def locate(self, reference: str, place: HubPlace, token: HubToken) -> Located:
        """Ask for config and weights with this token; read config and headers.

        Raises:
            AdapterNotFound: no such repository, revision or file, or offline and not cached.
            AdapterForbidden: the token does not reach it.
            SourceUnavailable: the hub does not answer in time.
            AdapterCorrupt, AdapterIncompatible: it is no adapter that we read.
        """
        folder = _HubFolder(self, place, token)
        return locate_remote(reference, "hub", folder, self._reads, self._clock)


class _HubFolder:
    """One caller's view of one repository: the local cache where it is current, else the hub."""

    __slots__ = ("_place", "_revision", "_source", "token")

    def __init__(self, source: HubSource, place: HubPlace, token: HubToken) -> None:
        self._source = source
        #: As it was asked for; offline mode must find the adapter by the same name.
        self._revision = place.revision
        #: At the commit, once a file was found: all the rest is of that commit.
        self._place = place
        #: Holds the caller's token until the files are here: a load may come long after its request
        #: was resolved.
        self.token = token

    def find(self, name: str) -> RemoteFile:
        file = self._found(name)
        if file.version != self._place.revision:
            self._place = HubPlace(self._place.repo, file.version)
            return file
        # One string for the commit: thousands of adapters are known.
        return replace(file, version=self._place.revision)

    def read(self, file: RemoteFile, begin: int, end: int) -> bytes:
        return self._source.client.read(self._place, file, begin, end, self.token)

    def cached(self, file: RemoteFile) -> Path | None:
        return self._source.cache.file(self._place.repo, file.name, file.version)

    def is_intact(self, path: Path, file: RemoteFile) -> bool:
        return self._source.downloads.is_intact(path, file.expected)

    def download(self, file: RemoteFile) -> Path:
        repo, cache = self._place.repo, self._source.cache
        blob = cache.blob(repo, file.etag)
        self._source.downloads.ensure(blob, file.expected, self._reader(file))
        cache.link(repo, file.name, file.version, blob)
        cache.remember(repo, self._revision, file.version)
        path = self.cached(file)
        if path is None:
            raise SourceUnavailable(f"{file.name} of {repo} vanished from {CACHE}; try again")
        return path

    def finish(self) -> None:
        self.token = NO_TOKEN

    def _found(self, name: str) -> RemoteFile:
        if not is_offline():
            return self._source.client.head(self._place, name, self.token)
        repo, revision = self._place.repo, self._place.revision
        path = self._source.cache.file(repo, name, revision)
        version = self._source.cache.version(repo, name, revision)
        if path is None or version is None:
            raise not_cached(f"{name} of {repo}")
        return hub_file(name, *version, path.stat().st_size)

    def _reader(self, file: RemoteFile) -> Callable[[int], Iterator[bytes]]:
        client, place, token = self._source.client, self._place, self.token
        return lambda begin: client.stream(place, file.name, begin, file.size, token)
