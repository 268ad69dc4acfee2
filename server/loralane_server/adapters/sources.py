"""From what a caller names to an adapter's files: aliases, folders below the roots, the hub."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loralane_server.adapters.files import Reads
from loralane_server.adapters.hub_http import HubToken
from loralane_server.adapters.hub_source import HubSettings, HubSource
from loralane_server.adapters.local_source import LocalPlace, LocalSource
from loralane_server.adapters.located import Located
from loralane_server.adapters.references import (
    HubPlace,
    check_reference,
    parse_hub_id,
    path_below,
)
from loralane_server.errors import AdapterNotFound

__all__ = ["HubSource", "LocalPlace", "LocalSource", "Located", "Place", "Sources"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a reference leads. `trusted` = the operator named it, as an alias."""

    at: LocalPlace | HubPlace
    trusted: bool = False


class Sources:
    """All places that adapters may come from, and the one rule that chooses among them.

    An alias wins; then an absolute path below a root; then a folder of that name below a root; then
    a hub id. Aliases may lead anywhere on this machine: the operator gave them.
    """

    def __init__(
        self,
        reads: Reads,
        *,
        aliases: Mapping[str, str],
        roots: Sequence[Path],
        hub: HubSettings,
    ) -> None:
        self.local = LocalSource(reads)
        self._hub = HubSource(reads, hub)
        self._roots = tuple(Path(os.path.realpath(root)) for root in roots)
        self._written_roots = self._roots + tuple(Path(root).absolute() for root in roots)
        self._aliases = {
            name: Place(_alias_place(reference), trusted=True)
            for name, reference in aliases.items()
        }

    def place(self, reference: str) -> Place:
        """Decide where a reference leads; looks at nothing outside the roots.

        Raises:
            InvalidRequest: nothing that may be named; no file and no network was touched.
            AdapterNotFound: neither an alias nor a folder, or a path that leads out of the roots.
        """
        known = self._aliases.get(reference)
        if known is not None:
            return known
        check_reference(reference)
        if reference.startswith("/"):
            return self._below_roots(path_below(reference, self._written_roots), reference)
        for root in self._roots:
            if _is_folder(root / reference):
                return self._below_roots(root / reference, reference)
        return Place(parse_hub_id(reference))

    def locate(self, reference: str, place: Place, token: str | None) -> Located:
        """Find the adapter; raises as its source does. The token also serves its download."""
        if isinstance(place.at, LocalPlace):
            return self.local.locate(reference, place.at)
        return self._hub.locate(reference, place.at, HubToken(token, ambient=place.trusted))

    def _below_roots(self, folder: Path, reference: str) -> Place:
        resolved = Path(os.path.realpath(folder))
        if not any(root in resolved.parents for root in self._roots):
            raise AdapterNotFound(f"adapter {reference!a} leads out of the --adapter-root")
        return Place(LocalPlace(resolved, self._roots))


def _alias_place(reference: str) -> LocalPlace | HubPlace:
    folder = Path(reference).expanduser()
    if folder.is_dir() or reference.startswith(("/", ".", "~")):
        return LocalPlace(folder.absolute())
    return parse_hub_id(reference)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name too long for this file system
        return False
