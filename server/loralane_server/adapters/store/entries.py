"""What is kept of an adapter while it is only known: a summary, and the way back to its layers.

A shard may know ten thousand adapters and hold the tensors of ten. So an entry is small, and the
full index is made again from the headers when the adapter is loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from loralane_server.adapters.formats.index import AdapterIndex
from loralane_server.adapters.reading.reader import LayerTensors
from loralane_server.adapters.sources.located import WEIGHTS_FILE, Located

_ONE_FILE: Final = (WEIGHTS_FILE,)

#: Gives one layer, or the `ENDS`; called from worker threads, for each layer at most once a load.
ReadLayer = Callable[[int], LayerTensors]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterSummary:
    """What is known of an adapter without its index; equal only to itself."""

    digest: str
    #: What it was first named.
    reference: str
    #: Where it comes from: a source's name, or "merge".
    kind: str
    #: The largest of its targets.
    rank: int
    #: Of its tensors as stored.
    bytes: int
    #: How many (layer, module) it changes.
    targets: int
    #: Names of the modules that it changes in any layer, sorted.
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class FromFiles:
    """An adapter that lies in files: `Located` without config and headers, to be read again."""

    kind: Literal["local", "hub", "s3"]
    identity: tuple[str, ...]
    open_file: Callable[[str], Path]
    is_on_disk: Callable[[], bool]
    #: Names of its safetensors files, in the order of the digest.
    weights: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Derived:
    """An adapter that is computed from others."""

    #: Opens the others; called once a load, on a worker, and may wait.
    opened: Callable[[], ReadLayer]
    #: Digests of those that it is made of; they stay known as long as it is.
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """An adapter that is known, and where its layers come from."""

    summary: AdapterSummary
    origin: FromFiles | Derived


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter's full index and the way to its bytes, as `Reader` takes them."""

    index: AdapterIndex
    open_file: Callable[[str], Path]


def summary_of(index: AdapterIndex, kind: str) -> AdapterSummary:
    """Return what to keep of an index."""
    return AdapterSummary(
        digest=index.digest,
        reference=index.reference,
        kind=kind,
        rank=index.rank,
        bytes=index.bytes,
        targets=len(index.targets),
        modules=index.modules,
    )


def entry_of(index: AdapterIndex, located: Located) -> Entry:
    """Return what to keep of an adapter that was found and understood."""
    names = tuple(header.file for header in located.headers)
    origin = FromFiles(
        located.kind,
        located.identity,
        located.open_file,
        located.is_on_disk,
        _ONE_FILE if names == _ONE_FILE else names,
    )
    return Entry(summary_of(index, located.kind), origin)


def is_on_disk(entry: Entry) -> bool:
    """Whether the files of the adapter can be opened without a network."""
    return isinstance(entry.origin, FromFiles) and entry.origin.is_on_disk()
