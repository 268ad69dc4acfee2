"""Adapters on the Hugging Face hub: metadata with the caller's token, headers by range, files late.

Every resolution asks the hub with the caller's own token, also when the files lie in the local
cache: `hf_hub_download` alone would serve a cached private adapter to whoever is refused online.
In offline mode (`HF_HUB_OFFLINE`) nobody can be asked, and cached adapters are open to all callers.
"""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from huggingface_hub import hf_hub_download, try_to_load_from_cache

from loralane_server.adapters.files import (
    Reads,
    StatIdentity,
    identity_of,
    opened,
    read_header,
    read_whole,
)
from loralane_server.adapters.headers import PREFIX_BYTES, FileHeader, header_end, parse_header
from loralane_server.adapters.hub_http import (
    METADATA_TIMEOUT_S,
    HubClient,
    HubToken,
    RemoteFile,
    hub_errors,
    is_offline,
    not_cached,
)
from loralane_server.adapters.located import (
    MAX_SHARDS_FILE_BYTES,
    SHARDS_FILE,
    WEIGHTS_FILE,
    Located,
    check_shards,
    no_weights,
    parse_shards,
)
from loralane_server.adapters.references import HubPlace
from loralane_server.adapters.spec import CONFIG_FILE, MAX_CONFIG_BYTES
from loralane_server.errors import AdapterCorrupt, AdapterNotFound

_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Which hub; None = what huggingface_hub takes from the environment."""

    endpoint: str | None = None
    cache_dir: Path | None = None
    #: For one metadata request, from its start to its last byte.
    timeout_s: float = METADATA_TIMEOUT_S


class HubSource:
    """Finds adapters on a hub. Its identity for a file is commit, checksum and size."""

    def __init__(self, reads: Reads, settings: HubSettings) -> None:
        self._reads = reads
        self._client = HubClient(settings.endpoint, settings.timeout_s)
        self._cache_dir = settings.cache_dir

    def locate(self, reference: str, place: HubPlace, token: HubToken) -> Located:
        """Ask for config and weights with this token; read config and headers.

        Raises:
            AdapterNotFound: no such repository, revision or file, or offline and not cached.
            AdapterForbidden: the token does not reach it.
            SourceUnavailable: the hub does not answer in time.
            AdapterCorrupt, AdapterIncompatible: it is no adapter that we read.
        """
        look = _Look(self._client, self._cache_dir, place, token)
        config = look.find(CONFIG_FILE)
        look.place = HubPlace(place.repo, config.commit)
        config_bytes = look.content(config, MAX_CONFIG_BYTES)
        found = [config]
        weight_map = None
        try:
            weights = [look.find(WEIGHTS_FILE)]
        except AdapterNotFound:
            shards, weight_map = self._shards(look)
            found.append(shards)
            weights = [look.find(name) for name in sorted(set(weight_map.values()))]
        headers = tuple(look.header(file, self._reads) for file in weights)
        if weight_map is not None:
            check_shards(weight_map, headers)
        opener = _Opener(look, place, {file.name: file for file in found + weights})
        return Located(
            reference=reference,
            kind="hub",
            config=config_bytes,
            headers=headers,
            identity=tuple(_line(file) for file in found + weights),
            open_file=opener,
            is_on_disk=opener.is_on_disk,
        )

    def _shards(self, look: "_Look") -> tuple[RemoteFile, dict[str, str]]:
        try:
            shards = look.find(SHARDS_FILE)
        except AdapterNotFound as exc:
            raise no_weights(look.has) from exc
        return shards, parse_shards(look.content(shards, MAX_SHARDS_FILE_BYTES))


class _Look:
    """One caller's view of one repository: the local cache where it is current, else the hub."""

    def __init__(
        self, client: HubClient, cache_dir: Path | None, place: HubPlace, token: HubToken
    ) -> None:
        self.client = client
        self.cache_dir = cache_dir
        self.place = place
        self.token = token

    def find(self, name: str) -> RemoteFile:
        if not is_offline():
            return self.client.head(self.place, name, self.token)
        path = self.cached(name, self.place.revision)
        if path is None:
            raise not_cached(f"{name} of {self.place.repo}")
        etag = Path(os.path.realpath(path)).name
        return RemoteFile(name, path.parent.name, etag, path.stat().st_size)

    def has(self, name: str) -> bool:
        try:
            self.find(name)
        except AdapterNotFound:
            return False
        return True

    def cached(self, name: str, revision: str) -> Path | None:
        path = try_to_load_from_cache(
            self.place.repo, name, cache_dir=self.cache_dir, revision=revision
        )
        return Path(path) if isinstance(path, str) else None

    def content(self, file: RemoteFile, limit: int) -> bytes:
        if file.size > limit:
            raise AdapterCorrupt(f"{file.name} is larger than {limit} bytes")
        path = self.cached(file.name, file.commit)
        if path is not None:
            return read_whole(path, limit)[0]
        return self.client.read(self.place, file, 0, file.size, self.token)

    def header(self, file: RemoteFile, reads: Reads) -> FileHeader:
        path = self.cached(file.name, file.commit)
        if path is not None and path.stat().st_size == file.size:
            return read_header(path, file.name, reads)[0]
        prefix = self._bytes(file, 0, min(PREFIX_BYTES, file.size))
        rest = self._bytes(file, len(prefix), header_end(prefix, file.size, file.name))
        reads.add_header(len(prefix) + len(rest))
        return parse_header(prefix + rest, file.size, file.name)

    def _bytes(self, file: RemoteFile, begin: int, end: int) -> bytes:
        return self.client.read(self.place, file, begin, end, self.token)


class _Opener:
    """Downloads an adapter's files when they are first opened, and verifies them once.

    Holds the caller's token until then: a load may come long after its request was resolved.
    """

    def __init__(self, look: _Look, asked: HubPlace, files: dict[str, RemoteFile]) -> None:
        self._look: Final = look
        self._asked: Final = asked
        self._files: Final = files
        #: Files whose bytes were verified, with what names them on the disk.
        self._verified: dict[str, tuple[Path, StatIdentity]] = {}

    def __call__(self, name: str) -> Path:
        known = self._verified.get(name)
        if known is not None and identity_of(known[0]) == known[1]:
            return known[0]
        file = self._files[name]
        path = self._download(file, force=False)
        if not _is_intact(path, file):
            path = self._download(file, force=True)
            if not _is_intact(path, file):
                raise AdapterCorrupt(f"{name} does not have the checksum that the hub names")
        self._verified[name] = path, identity_of(path)
        return path

    def is_on_disk(self) -> bool:
        return all(self._look.cached(file.name, file.commit) for file in self._weights)

    @property
    def _weights(self) -> list[RemoteFile]:
        return [file for file in self._files.values() if file.name.endswith(".safetensors")]

    def _download(self, file: RemoteFile, *, force: bool) -> Path:
        if not force and (path := self._look.cached(file.name, file.commit)):
            return path
        with hub_errors(self._asked, file.name):
            # The config by the revision as it was asked for, so that offline mode finds it later.
            self._fetch(CONFIG_FILE, self._asked.revision, force=False)
            path = self._fetch(file.name, file.commit, force=force)
        if self.is_on_disk():
            self._look.token = HubToken()
        return path

    def _fetch(self, name: str, revision: str, *, force: bool) -> Path:
        return Path(
            hf_hub_download(
                self._asked.repo,
                name,
                revision=revision,
                cache_dir=self._look.cache_dir,
                token=self._look.token.value,
                endpoint=self._look.client.endpoint,
                force_download=force,
            )
        )


def _is_intact(path: Path, file: RemoteFile) -> bool:
    with opened(path) as descriptor:
        if os.fstat(descriptor).st_size != file.size:
            return False
        if not _SHA256.fullmatch(file.etag):
            return True
        with os.fdopen(os.dup(descriptor), "rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest() == file.etag


def _line(file: RemoteFile) -> str:
    return f"{file.name}:{file.commit}:{file.etag}:{file.size}"
