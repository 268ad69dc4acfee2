"""From tensor names to targets: which tensor changes which linear of the base, with which scale.

Every tensor must map to exactly one target of the base. One that does not makes the adapter
incompatible: dropping it would answer with something between the base and the adapter.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from loralane_server.adapters.headers import TensorRef
from loralane_server.adapters.located import Located
from loralane_server.adapters.spec import (
    MAX_RANK,
    AdapterSpec,
    BaseShape,
    block_of,
    module_name,
)
from loralane_server.errors import AdapterCorrupt, AdapterIncompatible, AdapterTooLarge

#: What `reader` can turn into float32.
DTYPES: Final = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})

#: Names that wrappers insert anywhere; they say nothing about the module.
_WRAPPERS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
#: What may stand before `layers`: wrappers of the whole model, in any number.
_ROOTS: Final = frozenset({"base_model", "model", "language_model"})
_SUFFIXES: Final = {
    ("lora_A", "weight"): "A",
    ("lora_B", "weight"): "B",
    ("lora_A", "default", "weight"): "A",
    ("lora_B", "default", "weight"): "B",
}
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Target:
    """One linear that the adapter changes: W + scale * (B @ A)."""

    layer: int
    module: str
    rank: int
    scale: float
    #: [rank, in]
    a: TensorRef
    #: [out, rank]
    b: TensorRef


@dataclass(frozen=True, slots=True, eq=False)
class AdapterIndex:
    """Everything known about an adapter without reading a tensor; equal only to itself."""

    digest: str
    #: What it was first named.
    reference: str
    #: The largest of its targets.
    rank: int
    #: Of its tensors as stored.
    bytes: int
    targets: Mapping[tuple[int, str], Target]
    #: Names of the modules that it changes in any layer, sorted.
    modules: tuple[str, ...]
    #: One entry for each layer of the base, empty where the adapter changes nothing.
    layers: tuple[tuple[Target, ...], ...]

    def layer(self, n: int) -> tuple[Target, ...]:
        """The targets of layer n, by module name."""
        return self.layers[n]


def build_index(
    spec: AdapterSpec, located: Located, base: BaseShape, max_rank: int = MAX_RANK
) -> AdapterIndex:
    """Map every tensor to its target and check it against the base and the config.

    `max_rank` is the largest rank that fits this shard's lanes.

    Raises:
        AdapterIncompatible: a tensor that maps nowhere or lacks its other half, or a shape, rank
            or dtype that does not fit; `tensors` names them.
        AdapterCorrupt: no tensors at all.
        AdapterTooLarge: more lanes than the shard has.
    """
    tensors = [tensor for header in located.headers for tensor in header.tensors]
    if not tensors:
        raise AdapterCorrupt("the adapter is empty: its safetensors file holds no tensors")
    pairs = sorted(_pairs(tensors, base).items())
    targets = {place: _target(place, halves, spec, base) for place, halves in pairs}
    rank = max(target.rank for target in targets.values())
    if rank > MAX_RANK:
        raise AdapterTooLarge(f"the adapter's rank {rank} is above {MAX_RANK}, the largest served")
    if rank > max_rank:
        raise AdapterTooLarge(f"the adapter's rank {rank} does not fit the shard; raise --lanes")
    return AdapterIndex(
        digest=_digest(located),
        reference=located.reference,
        rank=rank,
        bytes=sum(tensor.end - tensor.begin for tensor in tensors),
        targets=MappingProxyType(targets),
        modules=tuple(sorted({module for _, module in targets})),
        layers=tuple(
            tuple(target for target in targets.values() if target.layer == n)
            for n in range(base.layers)
        ),
    )


def _pairs(
    tensors: Iterable[TensorRef], base: BaseShape
) -> dict[tuple[int, str], dict[str, TensorRef]]:
    pairs: dict[tuple[int, str], dict[str, TensorRef]] = {}
    unmapped: list[str] = []
    for tensor in tensors:
        place = _place(tensor.name, base)
        if place is None:
            unmapped.append(tensor.name)
            continue
        layer, module, half = place
        halves = pairs.setdefault((layer, module), {})
        if half in halves:
            both = (halves[half].name, tensor.name)
            raise _incompatible("two tensors are the same target", both)
        halves[half] = tensor
    if unmapped:
        found = f"{len(unmapped)} tensors map to no linear of this base, the first of them"
        raise _incompatible(found, unmapped)
    return pairs


def _place(name: str, base: BaseShape) -> tuple[int, str, str] | None:
    """(layer, module, "A" or "B") that the name stands for; None where it is no target."""
    segments = [segment for segment in name.split(".") if segment not in _WRAPPERS]
    suffix = next((s for s in _SUFFIXES if tuple(segments[-len(s) :]) == s), None)
    if suffix is None or len(segments) < len(suffix) + 4:
        return None
    *roots, layers, number, block, module = segments[: -len(suffix)]
    if layers != "layers" or not _ROOTS.issuperset(roots) or base.shape(module) is None:
        return None
    if block != block_of(module) or number not in map(str, range(base.layers)):
        return None
    return int(number), module, _SUFFIXES[suffix]


def _target(
    place: tuple[int, str], halves: Mapping[str, TensorRef], spec: AdapterSpec, base: BaseShape
) -> Target:
    name = module_name(*place)
    if len(halves) != 2:
        (half,) = halves
        missing = "lora_B" if half == "A" else "lora_A"
        raise _incompatible(f"{name} has no {missing} to its other half", (halves[half].name,))
    a, b = halves["A"], halves["B"]
    _check_dtypes(a, b)
    rank = _checked_rank(name, a, b, spec, base.shape(place[1]))
    return Target(*place, rank=rank, scale=spec.scale_of(name, rank), a=a, b=b)


def _check_dtypes(*tensors: TensorRef) -> None:
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise _incompatible(f"dtype {tensor.dtype} is not served", (tensor.name,))


def _checked_rank(
    name: str, a: TensorRef, b: TensorRef, spec: AdapterSpec, shape: tuple[int, int] | None
) -> int:
    assert shape is not None, "a place is a module of the base"
    rows, columns = shape
    rank = a.shape[0] if a.shape else 0
    if a.shape != (rank, columns) or b.shape != (rows, rank):
        raise _incompatible(
            f"{name}: the base takes A of shape (r, {columns}) and B of shape ({rows}, r), "
            f"found {list(a.shape)} and {list(b.shape)}",
            (a.name, b.name),
        )
    if rank != spec.rank_of(name):
        raise _incompatible(
            f"{name}: the tensors are of rank {rank}, the config says r = {spec.rank_of(name)}",
            (a.name, b.name),
        )
    return rank


def _incompatible(what: str, names: Iterable[str]) -> AdapterIncompatible:
    shown = [name[:200] for name in list(names)[:_SHOWN]]
    return AdapterIncompatible(f"{what}: {', '.join(map(ascii, shown))}", tensors=shown)


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
