"""Adapters made by hand: anything that can be written to lanes, without a file."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from loralane_server.device.cpu import CpuDevice
from loralane_server.device.seam import ENDS, TableRows, TargetTensors
from loralane_server.model.spec import ModelSpec

TABLES = ("embed_tokens", "lm_head")


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(out, in) of all that an adapter may change."""
    return spec.linears() | {
        "embed_tokens": (spec.hidden, spec.vocab),
        "lm_head": (spec.vocab, spec.hidden),
    }


def target(
    shape: tuple[int, int], rank: int, seed: int, *, gain: float = 0, shift: float = 0
) -> TargetTensors:
    """A random change of a linear (out, in), as large as the linear's own output.

    gain, shift: their standard deviation; 0 = none.
    """
    out, inside = shape
    make = torch.Generator().manual_seed(seed)
    return TargetTensors(
        torch.randn(rank, inside, generator=make) * inside**-0.5,
        torch.randn(rank, out, generator=make) * rank**-0.5,
        torch.randn(out, generator=make) * gain if gain else None,
        torch.randn(out, generator=make) * shift if shift else None,
    )


def table(spec: ModelSpec, ids: list[int] | None, seed: int, scale: float = 1.0) -> TableRows:
    """Random rows for some tokens of a table, or for all."""
    make = torch.Generator().manual_seed(seed)
    count = spec.vocab if ids is None else len(ids)
    rows = torch.randn(count, spec.hidden, generator=make) * scale
    return TableRows(None if ids is None else torch.tensor(ids), rows)


@dataclass(repr=False)
class Adapter:
    """What an adapter does: to the linears of every layer alike, and to the ends."""

    pages: tuple[int, ...] = ()
    targets: dict[str, TargetTensors] = field(default_factory=dict)
    tables: dict[str, TableRows] = field(default_factory=dict)

    @property
    def linears(self) -> Mapping[str, TargetTensors]:
        """The targets within a layer."""
        return {name: t for name, t in self.targets.items() if name not in TABLES}

    @property
    def ends(self) -> Mapping[str, TargetTensors]:
        """The targets outside the layers."""
        return {name: t for name, t in self.targets.items() if name in TABLES}

    def cast(self, dtype: torch.dtype) -> "Adapter":
        """The adapter as a shard that computes in `dtype` gets it."""
        targets = {
            name: TargetTensors(t.a.to(dtype), t.b.to(dtype), t.gain, t.shift)
            for name, t in self.targets.items()
        }
        tables = {name: TableRows(t.ids, t.rows.to(dtype)) for name, t in self.tables.items()}
        return Adapter(self.pages, targets, tables)

    def write(self, device: CpuDevice, layers: int) -> None:
        """Write all of it, in the order in which the store hands layers out."""
        device.write_lanes(ENDS, self.pages, self.ends, self.tables)
        for layer in range(layers):
            device.write_lanes(layer, self.pages, self.linears, {})
