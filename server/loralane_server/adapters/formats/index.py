"""From tensor names to targets: which tensor changes which linear of the base, with which scale.

Every tensor must have a place in the base. One that has none makes the adapter incompatible:
dropping it would answer with something between the base and the adapter.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from loralane_server.adapters.formats.abilities import check_abilities
from loralane_server.adapters.formats.base_shape import BaseShape
from loralane_server.adapters.formats.headers import TensorRef
from loralane_server.adapters.formats.names import Part, Place, place_of
from loralane_server.adapters.formats.spec import MAX_RANK, AdapterSpec
from loralane_server.adapters.formats.tables import Tables, build_tables
from loralane_server.adapters.formats.targets import Parts, Target, build_targets, incompatible
from loralane_server.adapters.sources.located import Located
from loralane_server.device.seam import ENDS
from loralane_server.errors import AdapterCorrupt, AdapterTooLarge

#: What of a table's tensors `tables` reads; the rest is LoRA.
_TABLE_PARTS: frozenset[Part] = frozenset({"table", "tokens", "base"})


@dataclass(frozen=True, slots=True, eq=False)
class AdapterIndex:
    """Everything known about an adapter without reading a tensor; equal only to itself."""

    digest: str
    #: What it was first named.
    reference: str
    #: The largest of its targets, the `ENDS` too; at least 1, so that every adapter has a lane.
    rank: int
    #: Of its tensors as stored.
    bytes: int
    #: By (layer, module); the layer may be `ENDS`.
    targets: Mapping[tuple[int, str], Target]
    #: Names of the modules that it changes in any layer and at the `ENDS`, sorted.
    modules: tuple[str, ...]
    #: One entry for each layer of the base, empty where the adapter changes nothing.
    layers: tuple[tuple[Target, ...], ...]
    #: LoRA on the embedding and the head.
    ends: tuple[Target, ...]
    #: What replaces rows of the embedding and the head.
    tables: Tables

    def layer(self, n: int) -> tuple[Target, ...]:
        """The targets of layer n, or of the `ENDS`, by module name."""
        return self.ends if n == ENDS else self.layers[n]

    @property
    def is_plain(self) -> bool:
        """Whether it is pairs of A and B and nothing else, so that it can be merged with others.

        Copies of the base's tables count as nothing; that they are copies is seen when it is read.
        """
        plain = all(target.is_plain for target in self.targets.values())
        return plain and not self.tables.replaced


def build_index(
    spec: AdapterSpec, located: Located, base: BaseShape, max_rank: int = MAX_RANK
) -> AdapterIndex:
    """Map every tensor to its target and check it against the base and the config.

    `max_rank` is the largest rank that fits this shard's lanes. Pure: the same headers make the
    same index, so it may be forgotten and built again.

    Raises:
        AdapterIncompatible: a tensor that maps nowhere or lacks its other half, or a shape, rank
            or dtype that does not fit, or what the device does not apply; `tensors` names them.
        AdapterCorrupt: no tensors at all.
        AdapterTooLarge: more lanes than the shard has, or tables above the budget.
    """
    tensors = [tensor for header in located.headers for tensor in header.tensors]
    if not tensors:
        raise AdapterCorrupt("the adapter is empty: its safetensors file holds no tensors")
    found = _by_module(tensors, base)
    linears = {place: _without_tables(parts) for place, parts in found.items()}
    targets = build_targets({at: parts for at, parts in linears.items() if parts}, spec, base)
    tables = build_tables({m: parts for (n, m), parts in found.items() if n == ENDS}, spec, base)
    check_abilities(base.abilities, targets.values(), tables)
    rank = max((target.rank for target in targets.values()), default=0)
    _check_rank(rank, max_rank)
    by_layer: dict[int, list[Target]] = {}
    for target in targets.values():
        by_layer.setdefault(target.layer, []).append(target)
    changed = {module for _, module in targets} | {table.module for table in tables.replaced}
    return AdapterIndex(
        digest=_digest(located),
        reference=located.reference,
        rank=max(1, rank),
        bytes=sum(tensor.end - tensor.begin for tensor in tensors),
        targets=MappingProxyType(targets),
        modules=tuple(sorted(changed)),
        layers=tuple(tuple(by_layer.get(n, ())) for n in range(base.layers)),
        ends=tuple(by_layer.get(ENDS, ())),
        tables=tables,
    )


def _by_module(
    tensors: Iterable[TensorRef], base: BaseShape
) -> dict[tuple[int, str], dict[Part, TensorRef]]:
    found: dict[tuple[int, str], dict[Part, TensorRef]] = {}
    placed = [(tensor, place_of(tensor.name, base)) for tensor in tensors]
    unmapped = [tensor.name for tensor, place in placed if place is None]
    if unmapped:
        what = f"{len(unmapped)} tensors map to no linear of this base, the first of them"
        raise incompatible(what, unmapped)
    names: dict[str, str] = {}
    for tensor, place in placed:
        assert place is not None, "unmapped tensors were refused"
        _put(found.setdefault((place.layer, place.module), {}), place, tensor)
        names.setdefault(place.adapter, tensor.name)
    if len(names.keys() - {""}) > 1:
        raise incompatible("the file holds more than one adapter", names.values())
    return found


def _put(parts: dict[Part, TensorRef], place: Place, tensor: TensorRef) -> None:
    if place.part in parts:
        both = (parts[place.part].name, tensor.name)
        raise incompatible("two tensors are the same target", both)
    parts[place.part] = tensor


def _without_tables(parts: Parts) -> Parts:
    return {part: ref for part, ref in parts.items() if part not in _TABLE_PARTS}


def _check_rank(rank: int, max_rank: int) -> None:
    if rank > MAX_RANK:
        raise AdapterTooLarge(f"the adapter's rank {rank} is above {MAX_RANK}, the largest served")
    if rank > max_rank:
        raise AdapterTooLarge(f"the adapter's rank {rank} does not fit the shard; raise --lanes")


def _digest(located: Located) -> str:
    parts = [b"loralane adapter 1", located.config]
    for header in located.headers:
        parts += [header.file.encode(), str(header.size).encode(), header.raw]
    parts += [item.encode() for item in located.identity]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
