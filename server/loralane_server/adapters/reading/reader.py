"""The tensors of one layer, read when it is needed: by range, folded in float32, checked, cast.

Rows multiply lanes of others by 0, and 0 x NaN is NaN, so nothing that is not finite passes.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from loralane_server.adapters.formats.abilities import unable
from loralane_server.adapters.formats.base_shape import Abilities, module_name
from loralane_server.adapters.formats.index import AdapterIndex
from loralane_server.adapters.formats.targets import Rows, Target
from loralane_server.adapters.reading.factors import (
    Factors,
    Folded,
    Half,
    fold,
    serve_together,
    served,
)
from loralane_server.adapters.reading.load_files import LoadFiles
from loralane_server.adapters.reading.ranges import read_tensors
from loralane_server.adapters.reading.scratch import Spares, fresh
from loralane_server.adapters.reading.table_reader import TableFiles
from loralane_server.adapters.sources.files import Reads
from loralane_server.device.seam import ENDS, TableRows, TargetTensors
from loralane_server.errors import AdapterIncompatible
from loralane_server.model.base_weights import BaseWeights


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """Milliseconds that reading took."""

    #: Until the files were open; on the hub this is the download.
    open_ms: float = 0.0
    read_ms: float = 0.0
    #: Folding, checking, casting.
    cast_ms: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class LayerTensors:
    """One layer of one adapter, ready for the lanes: CPU tensors in the shard's dtype.

    By module name; dense, A as `Abilities.a_by_columns` says, the others contiguous; nobody may
    write to them. Gain and shift are float32.
    """

    #: `ENDS` for the embedding and the head.
    layer: int
    targets: dict[str, TargetTensors]
    nbytes: int
    #: Of the `ENDS` only.
    tables: dict[str, TableRows] = field(default_factory=dict)
    #: Zero when it came from memory.
    times: ReadTimes = field(default_factory=ReadTimes)


class Reader:
    """Reads layers for a shard that computes in `dtype`; any thread.

    `base` gives the base's own weights, for adapters that are relative to them (DoRA, biases);
    `abilities` are the device's.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        reads: Reads,
        base: BaseWeights | None = None,
        abilities: Abilities = Abilities(),  # noqa: B008 - frozen
    ) -> None:
        self._abilities = abilities
        self._dtype = dtype
        self._reads = reads
        self._base = base
        #: Casting computes: of many loads at once, one takes a core from the steps, not all.
        self._casting = threading.Lock()
        self._spares = Spares()

    def read_layer(self, index: AdapterIndex, files: LoadFiles, layer: int) -> LayerTensors:
        """Read exactly this layer's tensors; a layer without targets reads nothing.

        Raises:
            AdapterCorrupt: truncated, changed since it was resolved, or not finite.
            AdapterIncompatible: relative to the base's weights, which are not at hand; or with
                tables that are not the base's own, which the device does not apply.
            AdapterTooLarge: tables that turn out to differ from the base's are above the budget.
            AdapterNotFound, SourceUnavailable: as `files`.
        """
        began, opening_ms = time.perf_counter(), files.open_ms
        files.scratch.clear()  # what was read before has been served
        factors = self._factors(index, files, layer, files.scratch.room)
        tables: Mapping[str, TableRows] = {}
        if layer == ENDS and index.tables:
            reading = TableFiles(files, self._reads, self._dtype, self._base)
            tables, factors = reading.read(index.tables, factors)
            if tables and not self._abilities.ends:
                names = [copy.ref.name for copy in index.tables.copies]
                raise unable(self._abilities, f"its own {' and '.join(tables)}", names)
        read = time.perf_counter()
        with self._casting:
            began_casting = time.perf_counter()
            served_layer = self.serve(layer, factors, tables)
            cast_ms = (time.perf_counter() - began_casting) * 1e3
        open_ms = files.open_ms - opening_ms
        times = ReadTimes(open_ms, (read - began) * 1e3 - open_ms, cast_ms)
        return replace(served_layer, times=times)

    def prepare(self) -> None:
        """Make memory ready for a load like the last; to be called when nobody waits for one."""
        self._spares.refill()

    def read_factors(self, index: AdapterIndex, files: LoadFiles, layer: int) -> dict[str, Factors]:
        """Read this layer's targets as trained, in float32, by module name.

        Raises as `read_layer`, but does not look for what is not finite. `AdapterIncompatible` also
        where there is more than factors: tables that are not the base's own.
        """
        factors = self._factors(index, files, layer, fresh)
        if layer == ENDS and index.tables:
            reading = TableFiles(files, self._reads, self._dtype, self._base)
            tables, _ = reading.read(index.tables, factors)
            if tables:
                raise AdapterIncompatible(
                    f"{index.reference} brings its own {', '.join(tables)}, so it is more than LoRA"
                )
        return {module: own.in_float32() for module, own in factors.items()}

    def serve(
        self,
        layer: int,
        factors: Mapping[str, Factors],
        tables: Mapping[str, TableRows] = MappingProxyType({}),
    ) -> LayerTensors:
        """Fold, cast and check; `tables` are taken as they are. Raises as `read_layer`."""
        targets = self._targets(layer, factors)
        nbytes = sum(target.nbytes for target in targets.values())
        nbytes += sum(table.rows.nbytes for table in tables.values())
        return LayerTensors(layer, targets, nbytes, dict(tables))

    def _factors(
        self,
        index: AdapterIndex,
        files: LoadFiles,
        layer: int,
        room: Callable[[int], Tensor],
    ) -> dict[str, Factors]:
        targets = index.layer(layer)
        refs = [ref for target in targets for ref in target.refs]
        stored = read_tensors(refs, files, self._reads, room)
        return {target.module: _factors_of(target, stored) for target in targets}

    def _targets(self, layer: int, factors: Mapping[str, Factors]) -> dict[str, TargetTensors]:
        halves: list[Half] = []
        vectors: list[tuple[Tensor | None, Tensor | None]] = []
        for module, own in factors.items():
            name = module_name(layer, module)
            b, gain, shift = Half(own.b, f"{name}.lora_B", own.scale), None, None
            if not own.is_plain:
                _check_parts(own, name)
                folded = self._folded(layer, module, own)
                b = Half(folded.b, f"{name}.lora_B")
                gain = self._vector(folded.gain, f"{name}: its magnitudes")
                shift = self._vector(folded.shift, f"{name}: its bias")
            a = Half(own.a, f"{name}.lora_A", by_columns=self._abilities.a_by_columns)
            halves += [a, b]
            vectors.append((gain, shift))
        copies = serve_together(halves, self._dtype, self._spares.room)
        pairs = zip(copies[::2], copies[1::2], vectors, strict=True)
        targets = (TargetTensors(a, b, gain, shift) for a, b, (gain, shift) in pairs)
        return dict(zip(factors, targets, strict=True))

    @staticmethod
    def _vector(vector: Tensor | None, name: str) -> Tensor | None:
        return None if vector is None else served(vector, torch.float32, name)

    def _folded(self, layer: int, module: str, factors: Factors) -> Folded:
        if factors.bias is None and factors.magnitude is None:
            return fold(factors, None, None)
        if self._base is None:
            name = module_name(layer, module)
            raise AdapterIncompatible(f"{name}: the base's weights, which it needs, are not here")
        weight = partial(self._base.weight, layer, module)
        return fold(factors, weight, self._base.bias(layer, module))


def _check_parts(factors: Factors, name: str) -> None:
    """Find what is not finite where it is; once folded, another part would be blamed for it."""
    parts = {
        f"{name}.lora_A": factors.a,
        f"{name}.lora_B": factors.b,
        f"{name}: its magnitudes": factors.magnitude,
    }
    for part, tensor in parts.items():
        if tensor is not None:
            served(tensor, torch.float32, part)


def _factors_of(target: Target, stored: Mapping[str, Tensor]) -> Factors:
    """The target's tensors as stored; a target without A and B gets empty ones."""

    def rows(part: Rows | None) -> Tensor | None:
        return None if part is None else stored[part.ref.name][part.begin : part.end]

    b, bias = rows(target.b), rows(target.bias)
    if target.a is None or b is None:
        assert bias is not None, "a target without A and B replaces a bias"
        return Factors(torch.empty(0, target.columns), torch.empty(0, len(bias)), 0.0, bias=bias)
    return Factors(
        stored[target.a.name],
        b.T,
        target.scale,
        lora_bias=rows(target.lora_bias),
        bias=bias,
        magnitude=rows(target.magnitude),
    )
