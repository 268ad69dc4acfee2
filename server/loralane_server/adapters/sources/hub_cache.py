"""The layout of huggingface_hub's cache, so that its tools and ours find each other's files.

    models--org--name/refs/main -> the commit, as text
    models--org--name/snapshots/COMMIT/adapter_config.json -> ../../blobs/ETAG
    models--org--name/blobs/ETAG

Every file appears at once, by a rename.
"""

import hashlib
import os
import re
import uuid
from pathlib import Path
from typing import Final

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.file_download import repo_folder_name

from loralane_server.adapters.sources.downloads import disk_errors

#: How errors name the cache.
CACHE: Final = "the hub cache (HF_HOME)"
#: An etag comes from a server: only what cannot be a path becomes part of one.
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_\-]{0,127}")


class HubCache:
    """The cache of one hub; `folder` None = where huggingface_hub keeps its own."""

    __slots__ = ("_folder",)

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def file(self, repo: str, name: str, revision: str) -> Path | None:
        """The real path of a file at a revision, if it is there."""
        entry = self._entry(repo, name, revision)
        return None if entry is None else Path(os.path.realpath(entry))

    def version(self, repo: str, name: str, revision: str) -> tuple[str, str] | None:
        """Commit and etag of a file as they were when it was cached, if it is there."""
        entry = self._entry(repo, name, revision)
        if entry is None:
            return None
        return entry.parent.name, entry.readlink().name if entry.is_symlink() else ""

    def blob(self, repo: str, etag: str) -> Path:
        """Where a file's bytes are kept, whether they are there or not."""
        name = etag if _FILE_NAME.fullmatch(etag) else hashlib.sha256(etag.encode()).hexdigest()
        return self._repo(repo) / "blobs" / name

    def link(self, repo: str, name: str, commit: str, blob: Path) -> None:
        """Make a blob findable as a file of a commit; raises as `disk_errors`."""
        entry = self._repo(repo) / "snapshots" / commit / name
        with disk_errors(CACHE, entry):
            entry.parent.mkdir(parents=True, exist_ok=True)
            beside = _beside(entry)
            try:
                beside.symlink_to(os.path.relpath(blob, entry.parent))
                beside.replace(entry)
            finally:
                beside.unlink(missing_ok=True)

    def remember(self, repo: str, revision: str, commit: str) -> None:
        """Let offline mode find a commit by its branch or tag; raises as `disk_errors`."""
        if revision == commit:
            return
        ref = self._repo(repo) / "refs" / revision
        with disk_errors(CACHE, ref):
            ref.parent.mkdir(parents=True, exist_ok=True)
            beside = _beside(ref)
            try:
                beside.write_text(commit)
                beside.replace(ref)
            finally:
                beside.unlink(missing_ok=True)

    def _entry(self, repo: str, name: str, revision: str) -> Path | None:
        path = try_to_load_from_cache(repo, name, cache_dir=self._folder, revision=revision)
        return Path(path) if isinstance(path, str) else None

    def _repo(self, repo: str) -> Path:
        folder = self._folder or Path(constants.HF_HUB_CACHE)
        return folder / repo_folder_name(repo_id=repo, repo_type="model")


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.incomplete")
