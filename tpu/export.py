"""Exports the shard's own graphs at the shapes of real models, as StableHLO.

    PJRT_DEVICE=CPU python -m tpu.export [--out FOLDER] [--only WORD]

Decoder, device, lane writers and sampler are those that serve; they are told to trace as on a TPU.
Weights, KV pages and lanes are placeholders, so every model is exported whole.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Final

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from loralane_server.device.seam import GROUPS, LayerWeights
from loralane_server.device.xla import hardware
from loralane_server.device.xla.batch import XlaBatch
from loralane_server.device.xla.buckets import Buckets, GraphKey, plan_buckets
from loralane_server.device.xla.device import XlaDevice
from loralane_server.device.xla.graphs import Graph, Graphs
from loralane_server.device.xla.kv_shape import kv_shape
from loralane_server.device.xla.runner import forward_of
from loralane_server.device.xla.sampler import Sampler
from loralane_server.device.xla.tracing import Cell, Input, Source, Trace, trace
from loralane_server.model.decoder import Decoder
from loralane_server.model.spec import ModelSpec, model_spec
from torch import Tensor

from tpu.kernels import lowered_for_tpu
from tpu.partition import PlaceholderMesh, sharding
from tpu.placeholders import Placeholders
from tpu.plans import CONTEXT, SHARDS, Shard, Step
from tpu.records import FOLDER, Exported, write_exported
from tpu.shapes import MODELS

_DTYPE: Final = torch.bfloat16


class WithoutLora(XlaDevice):
    """The same device with no LoRA in it: what graphs are compared with."""

    def add_lora(self, y: Tensor, x: Tensor, layer: int, group: str, batch: XlaBatch) -> None:
        """Leave y as it is."""

    def adapt_embedding(self, x: Tensor, batch: XlaBatch) -> None:
        """Leave x as it is."""

    def adapt_logits(self, logits: Tensor, x: Tensor, batch: XlaBatch) -> None:
        """Leave logits as they are."""


@dataclass(frozen=True, slots=True)
class Built:
    """A shard's device and decoder, without a byte of weights."""

    spec: ModelSpec
    device: XlaDevice
    decoder: Decoder[XlaBatch]
    mesh: PlaceholderMesh
    #: Shapes of the cells of KV pages on one device.
    paged: tuple[tuple[int, ...], ...]
    #: Bytes of weights, KV pages and lanes on one device.
    resident: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """A graph's parameter on one device."""

    nbytes: int
    rank: int
    #: Along which dimension it is cut.
    cut: int | None


class NotRun:
    """Implements `Graph` where nothing runs."""

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Raise: it was exported."""
        raise NotImplementedError("this graph was exported, not compiled")


class Exporter(Graphs):
    """What a shard would compile is written down instead."""

    def __init__(self, folder: Path, shard: Shard, built: Built) -> None:
        super().__init__()
        self._folder, self._shard, self._built = folder, shard, built

    def compile(
        self,
        name: str,
        fn: Callable[..., Sequence[Tensor]],
        inputs: Sequence[Tensor],
        *,
        updated: Sequence[Cell] = (),
        read: Sequence[Cell] = (),
    ) -> Graph:
        """Export `fn(*inputs)` as a graph that is no step; see `Graphs.compile`."""
        self._export(name, Step("decode", 0, None), fn, inputs, updated, read)
        return NotRun()

    def step(self, step: Step) -> None:
        """Export the forward graph of a step."""
        device, decoder = self._built.device, self._built.decoder
        key = _key(device.buckets, step)
        ints = device.put(torch.zeros(device.layout(key).size, dtype=torch.int32))
        word = "none" if step.lanes is None else f"lanes-{step.lanes}"
        name = f"{step.kind}-{step.tokens}.{word}"
        self._export(
            name,
            step,
            forward_of(decoder, device, key),
            [ints, device.put(torch.zeros(self._shard.max_rows, dtype=torch.int64))],
            device.kv_cells(),
            device.lane_cells(key),
        )

    def _export(
        self,
        name: str,
        step: Step,
        fn: Callable[..., Sequence[Tensor]],
        inputs: Sequence[Tensor],
        updated: Sequence[Cell],
        read: Sequence[Cell],
    ) -> None:
        mesh = self._built.mesh
        cuts = {id(cell): mesh.cut_of(cell.tensor) for cell in (*updated, *read)}
        with trace(fn, inputs, updated=updated, read=read) as traced:
            bytecode = xm.get_stablehlo_bytecode(list(traced.results))
            parameters = [_parameter(source, cuts, mesh) for source in traced.sources]
            record = self._record(name, step, traced, parameters)
        write_exported(self._folder, record, bytecode)
        print(f"  {record.name}: {len(bytecode):,} bytes", flush=True)

    def _record(
        self, name: str, step: Step, traced: Trace, parameters: Sequence[Parameter]
    ) -> Exported:
        spec, shard = self._built.spec, self._shard
        places = {id(cell): at for at, cell in enumerate(traced.updated)}
        donated = {
            at: places[id(source)]
            for at, source in enumerate(traced.sources)
            if id(source) in places
        }
        paged = self._built.paged
        token = prod(paged[0][2:])
        decoding = step.tokens if step.kind == "decode" else 0
        return Exported(
            name=f"{shard.name}.{name}",
            model=shard.model,
            model_layers=spec.layers,
            layers=spec.layers,
            kind=step.kind if step.tokens else name,
            tokens=step.tokens,
            lanes=step.lanes,
            donated=donated,
            donated_bytes={at: parameters[at].nbytes for at in donated},
            paged=paged,
            fetched=decoding * CONTEXT * spec.layers * token * _DTYPE.itemsize,
            context=CONTEXT,
            kernels=spec.layers if step.tokens else 0,
            resident=self._built.resident,
            arguments=sum(parameter.nbytes for parameter in parameters),
            targets=tuple(target.name for target in shard.targets),
            collectives={target.name: _collectives(shard, spec, step) for target in shard.targets},
            expected=shard.expected,
            partitions=shard.devices,
            shardings={
                at: sharding(parameter.rank, parameter.cut, shard.devices)
                for at, parameter in enumerate(parameters)
                if parameter.cut is not None
            },
        )


def export_shard(folder: Path, shard: Shard) -> None:
    """Export everything that is wanted of a shard."""
    with_lora, without = ([s for s in shard.steps if (s.lanes is None) == none] for none in (0, 1))
    for kind, steps in ((XlaDevice, with_lora), (WithoutLora, without)):
        if not steps:
            continue
        built = build(shard, kind)
        exporter = Exporter(folder, shard, built)
        for step in steps:
            exporter.step(step)
        if shard.writers and kind is XlaDevice:
            built.device.compile_lanes(exporter)
        if shard.sampler and kind is XlaDevice:
            Sampler([shard.max_rows], built.spec.vocab, torch_xla.device()).compile(exporter)


def build(shard: Shard, kind: type[XlaDevice]) -> Built:
    """Build a shard's device and decoder; call it while `Placeholders` are active."""
    spec = model_spec(MODELS[shard.model])
    buckets = plan_buckets(
        max_rows=shard.max_rows,
        step_tokens=shard.step_tokens,
        max_len=shard.max_len,
        lanes=shard.lanes,
        kernel=True,
    )
    numbers = prod(kv_shape(1, spec.kv_heads, spec.head_dim, kernel=True))
    page_bytes = spec.layers * numbers * _DTYPE.itemsize
    mesh = PlaceholderMesh(shard.devices)
    with Placeholders() as made:
        device = kind(
            spec, buckets, dtype=_DTYPE, pages=shard.kv_memory // page_bytes, tpu=True, mesh=mesh
        )
        decoder = Decoder(spec, device, shard.max_len)
        for _ in range(spec.layers):
            decoder.add_layer(_layer(spec))
        embedding = device.put(_shape(spec.vocab, spec.hidden))
        head = (
            device.pack(embedding, None, shared=True)
            if spec.tied_head
            else device.pack(_shape(spec.vocab, spec.hidden), None)
        )
        decoder.set_ends(embedding, _shape(spec.hidden), head)
    paged = {_shape_on_one(cell.tensor, mesh) for cell in device.kv_cells()}
    return Built(spec, device, decoder, mesh, tuple(paged), made.nbytes - mesh.spared)


def _shape_on_one(memory: Tensor, mesh: PlaceholderMesh) -> tuple[int, ...]:
    cut = mesh.cut_of(memory)
    return tuple(
        size // mesh.devices if at == cut else size for at, size in enumerate(memory.shape)
    )


def _layer(spec: ModelSpec) -> LayerWeights:
    sizes = spec.linears()
    return LayerWeights(
        linears={
            group: (_shape(sum(sizes[m][0] for m in modules), sizes[modules[0]][1]), None)
            for group, modules in GROUPS.items()
        },
        input_norm=_shape(spec.hidden),
        post_norm=_shape(spec.hidden),
    )


def _shape(*dims: int) -> Tensor:
    return torch.empty(dims, dtype=_DTYPE, device="meta")


def _key(buckets: Buckets, step: Step) -> GraphKey:
    """Return the declared key that a step runs in."""
    return next(
        key
        for key in buckets.declared()
        if (key.kind, key.tokens, key.lanes) == (step.kind, step.tokens, step.lanes or 0)
    )


def _parameter(source: Source, cuts: Mapping[int, int | None], mesh: PlaceholderMesh) -> Parameter:
    """Describe a parameter; a step's input is little, and whole everywhere."""
    if isinstance(source, Input):
        return Parameter(0, 0, None)
    tensor = source.tensor if isinstance(source, Cell) else source
    cut = cuts[id(source)] if isinstance(source, Cell) else mesh.cut_of(source)
    nbytes = tensor.numel() * tensor.element_size()
    return Parameter(nbytes if cut is None else nbytes // mesh.devices, tensor.dim(), cut)


def _collectives(shard: Shard, spec: ModelSpec, step: Step) -> int:
    """Return how many a graph may have.

    A step: two all-reduces a layer, after attention and MLP, and the gathering of the logits. Lane
    writers move single pages; they run between steps.
    """
    if shard.devices == 1:
        return 0
    return 2 * spec.layers + 1 if step.tokens else 8


def main() -> None:
    """Export what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tpu.export", description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--devices", type=int, default=1, help="shards over so many chips")
    parser.add_argument("--only", default="", help="shards with this in their name")
    arguments = parser.parse_args()
    hardware.use_devices(arguments.devices)
    wanted = [
        shard
        for shard in SHARDS
        if shard.devices == arguments.devices and arguments.only in shard.name
    ]
    with lowered_for_tpu(), torch.no_grad():
        for shard in wanted:
            for old in arguments.out.glob(f"{shard.name}.*"):
                old.unlink()
            print(f"== exporting {shard.name}", flush=True)
            with Placeholders():
                export_shard(arguments.out, shard)
    names = ("torch", "torch_xla")
    (arguments.out / "versions").write_text(json.dumps({name: version(name) for name in names}))


if __name__ == "__main__":
    main()
