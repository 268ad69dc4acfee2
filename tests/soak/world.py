"""A server whose lanes and host cache hold only some of its adapters."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.cases import base as tiny
from tests.product import Served, serve
from tests.soak.fingerprints import Fingerprint, Reference
from tests.soak.shelf import Shelf, fill

#: Room for about a dozen of the adapters, and for about fifty on the host.
_LANES, _HOST_BYTES = 128, 2 << 20
#: Little, so that what grows is not KV pages that are touched for the first time.
_KV_BYTES: Final = 8 << 20
_ROWS: Final = 16


@dataclass(frozen=True)
class SoakWorld:
    """Adapters on a disk, a server that reads them, and what the base says."""

    served: Served
    shelf: Shelf
    base: Fingerprint


@contextmanager
def soak_world(folder: Path, adapters: int, changing: int, versions: int) -> Iterator[SoakWorld]:
    """Compute all fingerprints, write the files, and serve them."""
    reference = Reference()
    shelf = fill(folder / "adapters", reference, adapters, changing, versions)
    tiny.write_base(reference.base, dict(reference.weights), folder / "model")
    flags = [
        f"--lanes={_LANES}",
        f"--host-cache={_HOST_BYTES}",
        f"--max-rows={_ROWS}",
        f"--kv-memory={_KV_BYTES}",
    ]
    with serve(
        str(folder / "model"), f"--adapter-root={shelf.root}", "--dtype=float32", "--threads=1",
        *flags,
    ) as served:  # fmt: skip
        yield SoakWorld(served, shelf, reference.base_fingerprint)
