"""From tensors at their places to targets: what an adapter does to each linear, checked.

A fused linear (`qkv_proj`, `gate_up_proj`) is taken apart here: its parts share A, and each has its
own rows of everything else. Rank and scale are those of the fused module's own name.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from loralane_server.adapters.formats.base_shape import EMBED, BaseShape, module_name, parts_of
from loralane_server.adapters.formats.headers import TensorRef
from loralane_server.adapters.formats.names import Part
from loralane_server.adapters.formats.spec import AdapterSpec
from loralane_server.errors import AdapterIncompatible

#: What `ranges` can turn into float32.
DTYPES: Final = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
#: One value for each output.
_VECTORS: Final[tuple[Part, ...]] = ("lora_bias", "bias", "magnitude")
_SHOWN: Final = 5

#: The tensors of one module by what they are to it.
Parts = Mapping[Part, TensorRef]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `[begin, end)` of a tensor."""

    ref: TensorRef
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Target:
    """One linear that the adapter changes.

    W + scale * (B @ A), with what else it has: a bias of B, a bias instead of the base's, DoRA's
    magnitudes. Without A and B (rank 0) only the bias is replaced.
    """

    layer: int
    module: str
    rank: int
    scale: float
    #: Features that it takes.
    columns: int
    #: [rank, in]
    a: TensorRef | None
    #: [out, rank]
    b: Rows | None
    #: [out]
    lora_bias: Rows | None = None
    #: [out]
    bias: Rows | None = None
    #: [out]
    magnitude: Rows | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is A and B and nothing else."""
        return self.a is not None and not (self.lora_bias or self.bias or self.magnitude)

    @property
    def refs(self) -> Iterator[TensorRef]:
        """The tensors that it is made of."""
        if self.a is not None:
            yield self.a
        for rows in (self.b, self.lora_bias, self.bias, self.magnitude):
            if rows is not None:
                yield rows.ref


def build_targets(
    found: Mapping[tuple[int, str], Parts], spec: AdapterSpec, base: BaseShape
) -> dict[tuple[int, str], Target]:
    """Return the targets by (layer, module), sorted.

    Raises:
        AdapterIncompatible: half of a pair is missing, a shape, rank or dtype does not fit, a flag
            of the config and the tensors disagree, or a fused linear and its part are both there.
    """
    targets: dict[tuple[int, str], Target] = {}
    for (layer, module), parts in sorted(found.items()):
        for target in _targets(layer, module, parts, spec, base):
            place = layer, target.module
            if place in targets:
                both = [*targets[place].refs, *target.refs]
                raise incompatible("two tensors are the same target", names_of(both))
            targets[place] = target
    _check_biases(targets, spec, base)
    return dict(sorted(targets.items()))


def incompatible(what: str, names: Iterable[str]) -> AdapterIncompatible:
    """Return the error that says what does not fit, and lists the first of the tensors."""
    shown = [name[:200] for name in list(names)[:_SHOWN]]
    return AdapterIncompatible(f"{what}: {', '.join(map(ascii, shown))}", tensors=shown)


def names_of(refs: Iterable[TensorRef]) -> list[str]:
    """Return the tensors' names."""
    return [ref.name for ref in refs]


def check_dtypes(refs: Iterable[TensorRef]) -> None:
    """Raise `AdapterIncompatible` unless all can be read."""
    for ref in refs:
        if ref.dtype not in DTYPES:
            raise incompatible(f"dtype {ref.dtype} is not served", (ref.name,))


def _targets(
    layer: int, module: str, parts: Parts, spec: AdapterSpec, base: BaseShape
) -> Iterator[Target]:
    check_dtypes(parts.values())
    name = module_name(layer, module)
    _check_halves(name, parts)
    _check_flags(name, parts, spec)
    rank = _checked_rank(name, module, parts, spec, base) if "A" in parts else 0
    scale = spec.scale_of(name, rank) if rank else 0.0
    _check_vectors(name, module, parts, base)
    begin = 0
    for part in parts_of(module):
        rows, columns = _shape(base, part)
        own = {key: Rows(ref, begin, begin + rows) for key, ref in parts.items()}
        begin += rows
        yield Target(
            layer,
            part,
            rank,
            scale,
            columns,
            a=parts.get("A"),
            b=own.get("B"),
            lora_bias=own.get("lora_bias"),
            bias=own.get("bias"),
            magnitude=own.get("magnitude"),
        )


def _check_halves(name: str, parts: Parts) -> None:
    if "A" in parts and "B" in parts:
        return
    if parts.keys() <= {"bias"}:
        return
    missing = " and ".join(f"lora_{half}" for half in ("A", "B") if half not in parts)
    raise incompatible(f"{name} has no {missing} to its other half", names_of(parts.values()))


def _check_flags(name: str, parts: Parts, spec: AdapterSpec) -> None:
    """A flag without its tensor lost something; a tensor without its flag means something else."""
    if "magnitude" in parts and name.endswith(EMBED):
        what = "DoRA (use_dora) on embed_tokens is not implemented"
        raise incompatible(what, (parts["magnitude"].name,))
    flags: tuple[tuple[Part, str, bool, str], ...] = (
        ("magnitude", "use_dora", spec.use_dora, "lora_magnitude_vector"),
        ("lora_bias", "lora_bias", spec.lora_bias, "bias of lora_B"),
    )
    for part, flag, is_set, tensor in flags:
        if part in parts and not is_set:
            what = f"{name} has a {tensor}, but the config does not set {flag}"
            raise incompatible(what, (parts[part].name,))
        if part not in parts and is_set and "A" in parts:
            what = f"the config sets {flag}, but {name} has no {tensor}"
            raise incompatible(what, names_of(parts.values()))


def _check_vectors(name: str, module: str, parts: Parts, base: BaseShape) -> None:
    rows, _ = _shape(base, module)
    for part in _VECTORS:
        ref = parts.get(part)
        if ref is not None and ref.shape != (rows,):
            what = f"{name} takes {part} of shape ({rows},), found {list(ref.shape)}"
            raise incompatible(what, (ref.name,))


def _checked_rank(name: str, module: str, parts: Parts, spec: AdapterSpec, base: BaseShape) -> int:
    a, b = parts["A"], parts["B"]
    rows, columns = _shape(base, module)
    rank = a.shape[0] if a.shape else 0
    if a.shape != (rank, columns) or b.shape != (rows, rank):
        raise incompatible(
            f"{name}: the base takes A of shape (r, {columns}) and B of shape ({rows}, r), "
            f"found {list(a.shape)} and {list(b.shape)}",
            (a.name, b.name),
        )
    wanted = spec.rank_of(name)
    if rank != wanted:
        where = "" if wanted == spec.rank else " in rank_pattern"
        what = f"{name}: the tensors are of rank {rank}, the config says r = {wanted}{where}"
        raise incompatible(what, (a.name, b.name))
    return rank


def _check_biases(
    targets: Mapping[tuple[int, str], Target], spec: AdapterSpec, base: BaseShape
) -> None:
    """Biases may only be where the base has one, and then each that was trained must be there.

    PEFT before 0.21 saved none for `lora_only`.
    """
    for (layer, module), target in targets.items():
        if target.bias is None:
            continue
        name = module_name(layer, module)
        if module not in base.biased:
            what = f"the adapter replaces the bias of {name}, which has none in this base"
            raise incompatible(what, (target.bias.ref.name,))
        if spec.bias == "none":
            what = f"the adapter replaces the bias of {name}, but the config's bias is 'none'"
            raise incompatible(what, (target.bias.ref.name,))
    for layer, module in _trained_biases(targets, spec, base):
        target_here = targets.get((layer, module))
        if target_here is None or target_here.bias is None:
            name = module_name(layer, module)
            what = f"the config's bias is {spec.bias!r}, but the file lacks the trained bias of"
            raise incompatible(what, (name,))


def _trained_biases(
    targets: Mapping[tuple[int, str], Target], spec: AdapterSpec, base: BaseShape
) -> Iterator[tuple[int, str]]:
    if spec.bias == "lora_only":
        yield from (place for place, target in targets.items() if place[1] in base.biased)
    elif spec.bias == "all":
        yield from ((n, module) for n in range(base.layers) for module in sorted(base.biased))


def _shape(base: BaseShape, module: str) -> tuple[int, int]:
    shape = base.shape(module)
    assert shape is not None, "a place is a module of the base"
    return shape
