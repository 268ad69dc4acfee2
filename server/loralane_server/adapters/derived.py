"""Adapters made of adapters: what a merge is, whether it can be, and its layers.

A merge is an adapter of its own. Its digest says what it is made of and how, so queues, lanes,
caches and metrics know nothing of merging; a member whose files are replaced makes another merge.
Its layers are computed in float32 from the members' files when it is loaded.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from loralane_server.adapters.base_shape import FUSED, module_name
from loralane_server.adapters.catalogue import Catalogue
from loralane_server.adapters.entries import (
    AdapterFiles,
    AdapterSummary,
    Derived,
    Entry,
    is_on_disk,
)
from loralane_server.adapters.factors import Factors, served
from loralane_server.adapters.flights import Flights
from loralane_server.adapters.index import AdapterIndex
from loralane_server.adapters.merging import Recipe, merge
from loralane_server.adapters.reader import LayerTensors, Reader
from loralane_server.adapters.spec import MAX_RANK
from loralane_server.adapters.targets import Target
from loralane_server.adapters.workers import Workers
from loralane_server.errors import AdapterIncompatible, AdapterTooLarge

#: A longer name says only how many members there are.
_MOST_NAME_CHARS: Final = 240


@dataclass(frozen=True, slots=True)
class Merge:
    """Which adapters are merged, and how."""

    recipe: Recipe
    #: Their digests, one for each weight.
    members: tuple[str, ...]

    @property
    def digest(self) -> str:
        """The merge's identity: of its recipe and its members', in order."""
        recipe = self.recipe
        how = (recipe.strategy, recipe.density.hex(), recipe.majority_sign)
        weights = (weight.hex() for weight in recipe.weights)
        pairs = (item for pair in zip(self.members, weights, strict=True) for item in pair)
        return _sha256("loralane merge 1", *how, *pairs).hex()

    def seed(self, layer: int, module: str, half: str) -> int:
        """Return the seed of what DARE draws of all members' A's, or B's, of one target.

        A function of the members alone: every shard draws the same, for any weights and density.
        """
        drawn = _sha256("loralane dare 1", *self.members, str(layer), module, half)
        return int.from_bytes(drawn[:8], "little")


class Merger:
    """Makes merges of adapters that are known; any thread.

    `files_of` gives a member's index and the way to its bytes, and may wait; `max_rank` is the
    largest rank that fits the shard's lanes.
    """

    def __init__(
        self,
        reader: Reader,
        catalogue: Catalogue,
        workers: Workers,
        files_of: Callable[[str], AdapterFiles],
        max_rank: int,
    ) -> None:
        self._reader = reader
        self._catalogue = catalogue
        self._workers = workers
        self._files_of = files_of
        self._max_rank = min(max_rank, MAX_RANK)
        self._making: Flights[AdapterSummary] = Flights()

    def merge(self, asked: Merge) -> "Future[AdapterSummary]":
        """Make several adapters into one that can be loaded, like any other; reads no tensor.

        Each member was resolved for this caller. Of the future:

        Raises:
            AdapterIncompatible: a member is not plain LoRA, or ranks differ where they may not.
            AdapterTooLarge: more lanes than the shard has.
            AdapterNotFound: a member was never resolved, or its files are gone.
            AdapterCorrupt, SourceUnavailable: as `files_of`.
        """
        known = self._catalogue.find(asked.digest)
        members = [self._catalogue.find(member) for member in asked.members]
        in_memory = known is not None or None in members  # then `make` does not wait
        on_disk = all(member is not None and is_on_disk(member) for member in members)
        workers = self._workers
        executor = workers.memory if in_memory else workers.disk if on_disk else workers.remote
        return self._making.join(asked.digest, executor, lambda: self._make(asked))

    def _make(self, asked: Merge) -> AdapterSummary:
        entry = self._catalogue.find(asked.digest)
        if entry is None:
            indexes = [self._files_of(member).index for member in asked.members]
            entry = Entry(
                summary_of_merge(asked, indexes, self._max_rank),
                Derived(partial(self._read_layer, asked), asked.members),
            )
        return self._catalogue.add(entry)

    def _read_layer(self, merge: Merge, layer: int) -> LayerTensors:
        files = [self._files_of(member) for member in merge.members]
        members = [self._factors(own, layer) for own in files]
        merged: dict[str, Factors] = {}
        for name, parts in _units(merge.recipe, [own.index for own in files], layer):
            merged |= _merged(merge, (layer, name), parts, members)
        return self._reader.serve(layer, merged)

    def _factors(self, files: AdapterFiles, layer: int) -> dict[str, Factors]:
        """One member's share, checked here so that an error names the member."""
        found = self._reader.read_factors(files.index, files.open_file, layer)
        for module, factors in found.items():
            name = f"{files.index.reference}: {module_name(layer, module)}"
            served(factors.a, torch.float32, f"{name}.lora_A")
            served(factors.b, torch.float32, f"{name}.lora_B")
        return found


def summary_of_merge(
    merge: Merge, indexes: Sequence[AdapterIndex], max_rank: int
) -> AdapterSummary:
    """Describe a merge; `bytes` is what is read to make it. Raises as `Merger.merge`."""
    for index in indexes:
        if not index.is_plain:
            raise AdapterIncompatible(f"{index.reference} cannot be merged: {_beyond_lora(index)}")
    ranks: defaultdict[tuple[int, str], list[tuple[int, str]]] = defaultdict(list)
    for index in indexes:
        for place, target in index.targets.items():
            ranks[place].append((target.rank, index.reference))
    rank = max(_rank(merge.recipe, place, found) for place, found in sorted(ranks.items()))
    if rank > max_rank:
        raise AdapterTooLarge(
            f"merged, the adapters are of rank {rank}, which does not fit the shard: "
            f"at most {max_rank} do; merge fewer, or raise --lanes (up to rank {MAX_RANK})"
        )
    return AdapterSummary(
        digest=merge.digest,
        reference=_name(merge, [index.reference for index in indexes]),
        kind="merge",
        rank=rank,
        bytes=sum(index.bytes for index in indexes),
        targets=len(ranks),
        modules=tuple(sorted({module for _, module in ranks})),
    )


def _rank(recipe: Recipe, place: tuple[int, str], found: Sequence[tuple[int, str]]) -> int:
    if recipe.strategy == "cat":
        return sum(rank for rank, _ in found)
    (rank, first), *others = found
    for other, reference in others:
        if other != rank:
            raise AdapterIncompatible(
                f"{recipe.strategy} merges adapters of one rank, but at {module_name(*place)} "
                f"{first} is of rank {rank} and {reference} of rank {other}; "
                "the strategy cat adds adapters of any ranks"
            )
    return rank


def _beyond_lora(index: AdapterIndex) -> str:
    if index.tables:
        return "it replaces rows of the embedding or the head"
    target = next(target for target in index.targets.values() if not target.is_plain)
    what = "DoRA's magnitudes" if target.magnitude else "biases"
    return f"it has {what}, and only LoRA's A and B can be merged"


def _name(merge: Merge, references: Sequence[str]) -> str:
    recipe = merge.recipe
    pairs = zip(references, recipe.weights, strict=True)
    parts = ["+".join(f"{reference}*{weight!r}" for reference, weight in pairs)]
    if recipe.prunes:
        parts.append(f"density={recipe.density!r}")
    if recipe.majority_sign != "total":
        parts.append(f"majority_sign={recipe.majority_sign}")
    name = f"merge:{recipe.strategy}({','.join(parts)})"
    if len(name) <= _MOST_NAME_CHARS:
        return name
    return f"merge:{recipe.strategy}({len(references)} adapters,{merge.digest[:16]})"


def _units(
    recipe: Recipe, indexes: Sequence[AdapterIndex], layer: int
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield what is merged as one: a linear's name, and the modules that it is here.

    What pruning keeps of a fused linear depends on all of its rows. So where every member has it
    fused, it is merged as a whole.
    """
    targets = [target for index in indexes for target in index.layer(layer)]
    left = {target.module for target in targets}
    for name, parts in FUSED.items():
        own = [target for target in targets if target.module in parts]
        if own and recipe.prunes and all(map(_is_slice, own)):
            left -= set(parts)
            yield name, parts
    yield from ((module, (module,)) for module in sorted(left))


def _is_slice(target: Target) -> bool:
    return target.b is not None and target.b.end - target.b.begin < target.b.ref.shape[0]


def _merged(
    merged: Merge,
    at: tuple[int, str],
    parts: Sequence[str],
    members: Sequence[Mapping[str, Factors]],
) -> dict[str, Factors]:
    recipe = merged.recipe
    pairs = zip(recipe.weights, members, strict=True)
    having = [(weight, [own[part] for part in parts]) for weight, own in pairs if parts[0] in own]
    whole = merge(
        recipe,
        [weight for weight, _ in having],
        [_joined(own) for _, own in having],
        (merged.seed(*at, "A"), merged.seed(*at, "B")),
    )
    widths = [own.b.shape[1] for own in having[0][1]]
    rows = whole.b.split(widths, dim=1)
    return {part: Factors(whole.a, b, whole.scale) for part, b in zip(parts, rows, strict=True)}


def _joined(parts: Sequence[Factors]) -> Factors:
    """The fused linear of which these are the parts."""
    return Factors(parts[0].a, torch.cat([part.b for part in parts], dim=1), parts[0].scale)


def _sha256(*parts: str) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part.encode()).to_bytes(8, "little"))
        digest.update(part.encode())
    return digest.digest()
