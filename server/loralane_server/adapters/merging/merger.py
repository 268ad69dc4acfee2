"""Makes merges known, and their layers: in float32 from the members' files, when one is loaded."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import torch

from loralane_server.adapters.formats.base_shape import FUSED, module_name
from loralane_server.adapters.formats.index import AdapterIndex
from loralane_server.adapters.formats.targets import Target
from loralane_server.adapters.merging.derived import Merge, summary_of_merge
from loralane_server.adapters.merging.merging import Recipe, merge
from loralane_server.adapters.reading.factors import Factors, served
from loralane_server.adapters.reading.load_files import LoadFiles
from loralane_server.adapters.reading.reader import LayerTensors, Reader, ReadTimes
from loralane_server.adapters.store.catalogue import Catalogue
from loralane_server.adapters.store.entries import (
    AdapterFiles,
    AdapterSummary,
    Derived,
    Entry,
    ReadLayer,
    is_on_disk,
)
from loralane_server.adapters.store.flights import Flights, landed
from loralane_server.adapters.store.workers import Workers


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
        self._max_rank = max_rank
        self._making: Flights[AdapterSummary] = Flights()

    def merge(self, asked: Merge) -> "Future[AdapterSummary]":
        """Make several adapters into one that can be loaded, like any other; reads no tensor.

        Each member was resolved for this caller. The future's errors are those of
        `summary_of_merge` and `files_of`.

        Raises:
            AdapterNotFound: a member was never resolved.
        """
        known = self._catalogue.find(asked.digest)
        if known is not None:
            return landed(self._catalogue.add(known))
        members = [self._catalogue.get(member) for member in asked.members]
        on_disk = all(map(is_on_disk, members))
        executor = self._workers.disk if on_disk else self._workers.remote
        return self._making.join(asked.digest, executor, lambda: self._make(asked))

    def _make(self, asked: Merge) -> AdapterSummary:
        indexes = [self._files_of(member).index for member in asked.members]
        summary = summary_of_merge(asked, indexes, self._max_rank)
        origin = Derived(partial(self._opened, asked), asked.members)
        return self._catalogue.add(Entry(summary, origin))

    def _opened(self, asked: Merge) -> ReadLayer:
        files = [self._files_of(name) for name in asked.members]
        opened = [(own.index, LoadFiles(own.open_file)) for own in files]
        return partial(self._read_layer, asked, opened)

    def _read_layer(
        self, asked: Merge, opened: Sequence[tuple[AdapterIndex, LoadFiles]], layer: int
    ) -> LayerTensors:
        began = time.perf_counter()
        members = [self._factors(index, files, layer) for index, files in opened]
        read = time.perf_counter()
        merged: dict[str, Factors] = {}
        for name, parts in _units(asked.recipe, [index for index, _ in opened], layer):
            merged |= _merged(asked, (layer, name), parts, members)
        tensors = self._reader.serve(layer, merged)
        cast_ms = (time.perf_counter() - read) * 1e3
        return replace(tensors, times=ReadTimes(read_ms=(read - began) * 1e3, cast_ms=cast_ms))

    def _factors(self, index: AdapterIndex, files: LoadFiles, layer: int) -> dict[str, Factors]:
        """One member's share, checked here so that an error names the member."""
        found = self._reader.read_factors(index, files, layer)
        for module, factors in found.items():
            name = f"{index.reference}: {module_name(layer, module)}"
            served(factors.a, torch.float32, f"{name}.lora_A")
            served(factors.b, torch.float32, f"{name}.lora_B")
        return found


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
    asked: Merge,
    at: tuple[int, str],
    parts: Sequence[str],
    members: Sequence[Mapping[str, Factors]],
) -> dict[str, Factors]:
    recipe = asked.recipe
    pairs = zip(recipe.weights, members, strict=True)
    having = [(weight, [own[part] for part in parts]) for weight, own in pairs if parts[0] in own]
    whole = merge(
        recipe,
        [weight for weight, _ in having],
        [_joined(own) for _, own in having],
        (asked.seed(*at, "A"), asked.seed(*at, "B")),
    )
    widths = [own.b.shape[1] for own in having[0][1]]
    rows = whole.b.split(widths, dim=1)
    return {part: Factors(whole.a, b, whole.scale) for part, b in zip(parts, rows, strict=True)}


def _joined(parts: Sequence[Factors]) -> Factors:
    """The fused linear of which these are the parts."""
    return Factors(parts[0].a, torch.cat([part.b for part in parts], dim=1), parts[0].scale)
