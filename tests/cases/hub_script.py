"""`setup.hub` and `setup.hub_cache` of a case: repositories of the fake hub, files of a cache."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tests.cases.fake_hub import Repo, Revision, Script
from tests.cases.materialise import Adapter, large_adapter
from tests.cases.tensors import NotUnderstood

#: Adapter by the name that a case gives it: `a1`, `a2`, ...
Named = Callable[[str], Adapter]

_FILES: Final = re.compile(r"(\w+?)(?:-files)?(?: padded to (\d+) MB)?")
_REPO_KEYS: Final = frozenset(
    {"files", "count_requests", "delay_s", "fail_first", "needs_token", "revisions"}
)
_SCRIPT_KEYS: Final = frozenset(
    {
        "status",
        "headers",
        "delay_s",
        "bytes_per_s",
        "close_after_bytes",
        "hang",
        "redirect_to_self",
    }
)


def read_repo(name: str, entry: Any, named: Named, salt: str) -> Repo:
    """Turn one entry of `setup.hub` into a repository. Raises NotUnderstood.

    Commits come from `salt`, so that two cases' repositories of one name are different ones. What
    an entry leaves out is as in `a1`.
    """
    if isinstance(entry, str):
        return _plain(name, {"main": entry}, named, salt)
    keys = {key for key in entry if not _is_file(key)}
    whole = keys & _SCRIPT_KEYS - {"delay_s"}
    if unknown := keys - _REPO_KEYS - whole:
        raise NotUnderstood(f"hub field {sorted(unknown)}")
    repo = _plain(name, entry.get("revisions", {"main": entry.get("files", "a1")}), named, salt)
    repo.needs_token = entry.get("needs_token")
    repo.weights_delay_s = entry.get("delay_s", 0)
    if whole or "fail_first" in entry:
        repo.scripts[""] = _script({k: entry[k] for k in whole | keys & {"fail_first"}})
    for file in filter(_is_file, entry):
        if isinstance(entry[file], Mapping):
            repo.scripts[file] = _script(entry[file])
        else:
            content = files_of(entry[file], named)[file]
            repo.revisions = {
                revision: replace(old, files={**old.files, file: content})
                for revision, old in repo.revisions.items()
            }
    return repo


def _is_file(key: str) -> bool:
    return "." in key


def _plain(name: str, revisions: Mapping[str, str], named: Named, salt: str) -> Repo:
    return Repo(
        {
            revision: Revision(_commit(salt, name, revision, files), files_of(files, named))
            for revision, files in revisions.items()
        }
    )


def _commit(*parts: str) -> str:
    return hashlib.sha1("\0".join(parts).encode()).hexdigest()


def files_of(text: str, named: Named) -> dict[str, bytes]:
    """Return the files that e.g. `a1`, `a2-files` or `a1 padded to 4 MB` means."""
    found = _FILES.fullmatch(text)
    if found is None:
        raise NotUnderstood(f"hub files {text!r}")
    if found[2]:
        return dict(large_adapter(int(found[2]) << 20).files)
    return dict(named(found[1]).files)


def _script(entry: Mapping[str, Any]) -> Script:
    if unknown := entry.keys() - _SCRIPT_KEYS - {"fail_first"}:
        raise NotUnderstood(f"hub file field {sorted(unknown)}")
    first = entry.get("fail_first", {})
    return Script(**{key: entry[key] for key in _SCRIPT_KEYS & entry.keys()} | first)


def write_cache(entries: Mapping[str, str], named: Named, cache: Path, salt: str) -> None:
    """Write adapters into a folder as huggingface_hub's cache lays them out."""
    for folder, files in entries.items():
        commit = _commit(salt, folder)
        place = cache / folder
        for part in ("refs", "blobs", f"snapshots/{commit}"):
            (place / part).mkdir(parents=True, exist_ok=True)
        (place / "refs" / "main").write_text(commit)
        for name, content in files_of(files, named).items():
            etag = hashlib.sha256(content).hexdigest()
            (place / "blobs" / etag).write_bytes(content)
            link = place / "snapshots" / commit / name
            link.symlink_to(Path("..") / ".." / "blobs" / etag)
