"""From what a caller names to an adapter's files: aliases, folders below the roots, S3, the hub."""

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loralane_server.adapters.sources.files import Reads
from loralane_server.adapters.sources.hub_http import HubToken
from loralane_server.adapters.sources.hub_source import HubSettings, HubSource
from loralane_server.adapters.sources.local_source import LocalPlace, LocalSource
from loralane_server.adapters.sources.located import Located
from loralane_server.adapters.sources.references import (
    S3_SCHEME,
    AdapterRoot,
    HubPlace,
    S3Place,
    S3Root,
    check_reference,
    parse_hub_id,
    parse_s3,
    path_below,
    s3_below,
)
from loralane_server.adapters.sources.refusals import Refusals
from loralane_server.adapters.sources.s3_source import S3Settings, S3Source
from loralane_server.errors import AdapterError, AdapterForbidden, AdapterNotFound, ShardError

__all__ = ["HubSource", "LocalPlace", "LocalSource", "Located", "Place", "Sources"]

_MAX_SETTLED: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Candidates:
    """Where a relative name may be, if S3 roots are given: below each of them, then on the hub."""

    places: tuple[S3Place | HubPlace, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a reference leads. `trusted` = the operator named it, as an alias."""

    at: LocalPlace | S3Place | HubPlace | Candidates
    trusted: bool = False


class Sources:
    """All places that adapters may come from, and the one rule that chooses among them.

    An alias wins; then what is named in full: an absolute path or an s3:// key below a root, a hub
    id with a revision. Any other name is relative: a folder of that name below a root wins, then
    one below an S3 root, in the order of the roots, then the hub. Where such a name was found on S3
    or the hub is where it is looked for from then on, until it is gone from there; so a known hub
    id costs S3 no request. Aliases may lead anywhere: the operator gave them.

    What S3 or the hub refused is refused again without asking, for this caller and a short while.
    """

    def __init__(
        self,
        reads: Reads,
        *,
        aliases: Mapping[str, str],
        roots: Sequence[AdapterRoot],
        hub: HubSettings,
        s3: S3Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.local = LocalSource(reads)
        self._hub = HubSource(reads, hub, clock)
        self._s3 = S3Source(reads, s3 or S3Settings(), clock)
        folders = [Path(root) for root in roots if not isinstance(root, S3Root)]
        self._roots = tuple(Path(os.path.realpath(folder)) for folder in folders)
        self._written_roots = self._roots + tuple(folder.absolute() for folder in folders)
        self._s3_roots = tuple(root for root in roots if isinstance(root, S3Root))
        self._aliases = {
            name: Place(_alias_place(reference), trusted=True)
            for name, reference in aliases.items()
        }
        self._refusals = Refusals(clock)
        #: Makes token hashes meaningless outside this process.
        self._salt = os.urandom(16)
        self._lock = threading.Lock()
        #: Guarded by the lock; where relative names were found, the oldest first.
        self._settled: OrderedDict[str, S3Place | HubPlace] = OrderedDict()

    def place(self, reference: str) -> Place:
        """Decide where a reference leads; looks at nothing outside the roots, asks no network.

        Raises:
            InvalidRequest: nothing that may be named; no file and no network was touched.
            AdapterNotFound: neither an alias nor a folder, or a path that leads out of the roots.
        """
        known = self._aliases.get(reference)
        if known is not None:
            return known
        if reference.startswith(S3_SCHEME):
            return Place(s3_below(reference, self._s3_roots))
        check_reference(reference)
        if reference.startswith("/"):
            return self._below_roots(path_below(reference, self._written_roots), reference)
        for root in self._roots:
            if _is_folder(root / reference):
                return self._below_roots(root / reference, reference)
        return Place(self._candidates(reference) or parse_hub_id(reference))

    def locate(self, reference: str, place: Place, token: str | None) -> Located:
        """Find the adapter; raises as its source does. The token also serves its download.

        Local folders are looked at every time; S3 and the hub are not asked again for a while for
        what they refused to the same caller.
        """
        if isinstance(place.at, LocalPlace):
            return self.local.locate(reference, place.at)
        key = self._key(reference, token)
        self._refusals.check(key)
        try:
            return self._ask(reference, place, HubToken(token or None, ambient=place.trusted))
        except ShardError as exc:
            self._refusals.refused(key, exc)
            raise

    def accept(self, reference: str, place: Place, token: str | None) -> None:
        """Forget earlier refusals: what was located can be served."""
        if not isinstance(place.at, LocalPlace):
            self._refusals.succeeded(self._key(reference, token))

    def refuse(self, reference: str, place: Place, token: str | None, error: AdapterError) -> None:
        """Remember that what was located is of no use here, so that it is not asked for again."""
        if not isinstance(place.at, LocalPlace):
            self._refusals.refused(self._key(reference, token), error)

    def close(self) -> None:
        """Close idle connections."""
        self._hub.close()
        self._s3.close()

    def check(self) -> None:
        """Assert what must hold between calls."""
        self._refusals.check_bounds()
        with self._lock:
            assert len(self._settled) <= _MAX_SETTLED

    def _ask(self, reference: str, place: Place, token: HubToken) -> Located:
        if isinstance(place.at, Candidates):
            return self._search(reference, place.at, token)
        return self._ask_one(reference, place.at, token)

    def _ask_one(
        self, reference: str, at: LocalPlace | S3Place | HubPlace, token: HubToken
    ) -> Located:
        if isinstance(at, LocalPlace):
            return self.local.locate(reference, at)
        if isinstance(at, S3Place):
            return self._s3.locate(reference, at)
        return self._hub.locate(reference, at, token)

    def _search(self, reference: str, candidates: Candidates, token: HubToken) -> Located:
        """Ask one place after the other; a place that does not answer ends the search.

        S3 says "forbidden" of what is missing where a bucket may not be listed, so that goes on to
        the next place too. What the last place says is the answer.
        """
        with self._lock:
            settled = self._settled.get(reference)
        places = list(candidates.places)
        places.sort(key=lambda at: at != settled)  # stable: the others keep their order
        refused: dict[S3Place | HubPlace, AdapterError] = {}
        for at in places:
            try:
                located = self._ask_one(reference, at, token)
            except (AdapterNotFound, AdapterForbidden) as exc:
                refused[at] = exc
            else:
                self._settle(reference, at)
                return located
        raise refused[candidates.places[-1]]

    def _settle(self, reference: str, at: S3Place | HubPlace) -> None:
        with self._lock:
            self._settled[reference] = at
            self._settled.move_to_end(reference)
            if len(self._settled) > _MAX_SETTLED:
                self._settled.popitem(last=False)

    def _candidates(self, reference: str) -> Candidates | None:
        if "@" in reference:
            return None
        found = [root.below(reference) for root in self._s3_roots]
        places: list[S3Place | HubPlace] = [place for place in found if place is not None]
        if not places:
            return None
        with suppress(ShardError):  # no hub could hold it, but a bucket can
            places.append(parse_hub_id(reference))
        return Candidates(tuple(places))

    def _key(self, reference: str, token: str | None) -> tuple[str, bytes]:
        secret = (token or "").encode("utf-8", "replace")
        return reference, hashlib.blake2b(secret, key=self._salt, digest_size=16).digest()

    def _below_roots(self, folder: Path, reference: str) -> Place:
        resolved = Path(os.path.realpath(folder))
        if not any(root in resolved.parents for root in self._roots):
            raise AdapterNotFound(f"adapter {reference!a} leads out of the --adapter-root")
        return Place(LocalPlace(resolved, self._roots))


def _alias_place(reference: str) -> LocalPlace | S3Place | HubPlace:
    if reference.startswith(S3_SCHEME):
        return parse_s3(reference)
    folder = Path(reference).expanduser()
    if folder.is_dir() or reference.startswith(("/", ".", "~")):
        return LocalPlace(folder.absolute())
    return parse_hub_id(reference)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name too long for this file system
        return False
