"""The XLA backend's side of the device seam: called while a graph is traced, never in a step.

Weights are [in, out] here: XLA:CPU multiplies by them up to seventeen times faster than by
[out, in], and a TPU does not mind.
"""

from collections.abc import Mapping, Sequence

import torch
import torch_xla
from torch import Tensor

from loralane_server.device.seam import ENDS, GROUPS, Linear, StepInput, TableRows, TargetTensors
from loralane_server.device.xla.attention import Kernel, XlaAttention, plan_attention
from loralane_server.device.xla.batch import XlaBatch
from loralane_server.device.xla.buckets import Buckets, GraphKey
from loralane_server.device.xla.graphs import Cell, Graphs
from loralane_server.device.xla.host_writer import HostWriter
from loralane_server.device.xla.lanes import XlaLanes
from loralane_server.device.xla.layout import Layout, layout_of
from loralane_server.device.xla.mesh import CUT_BY_INPUTS, Mesh
from loralane_server.device.xla.writers import GraphWriter, LaneWriter
from loralane_server.errors import AdapterIncompatible, DeviceFailed
from loralane_server.model.spec import ModelSpec


class XlaLinear:
    """y = x W + b over a weight [in, out], cut by outputs."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        y = x @ self._weight
        return y if self._bias is None else y + self._bias


class PartsLinear:
    """y = x W + b over a weight [in, out] that is cut by inputs; y in parts, see mesh.py."""

    def __init__(self, mesh: Mesh, weight: Tensor, bias: Tensor | None) -> None:
        """`bias` [devices, 1, out]: the first device's, and zeros."""
        self.mesh, self._weight, self._bias = mesh, weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        y = self.mesh.product(x, self._weight)
        return y if self._bias is None else y + self._bias


class Head:
    """Logits x W over a weight [in, vocab]; where it is cut by outputs, they are gathered."""

    def __init__(self, mesh: Mesh, weight: Tensor, *, cut: bool) -> None:
        self.mesh, self._weight, self._cut = mesh, weight, cut

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        y = x @ self._weight
        return self.mesh.gather(y, 1) if self._cut else y


class SharedLinear:
    """y = x W^T over the embedding itself, [out, in]: no second copy in a TPU's memory."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return x @ self._weight.T


class XlaDevice:
    """Implements `Device`. Owns KV pages (through `XlaAttention`) and lanes (`XlaLanes`)."""

    name = "xla"

    def __init__(
        self,
        spec: ModelSpec,
        buckets: Buckets,
        *,
        dtype: torch.dtype,
        pages: int,
        tpu: bool,
        mesh: Mesh | None = None,
        together: bool | None = None,
    ) -> None:
        """`tpu`: compute as on a TPU, wherever this is traced (see tpu/); buckets to match.

        `together`: whether layers share cells of lanes; None = as on what it computes as. Only to
        measure on a CPU what a TPU's layout costs the host (bench/xla_host.py).
        """
        self._device = torch_xla.device()
        self.mesh = mesh or Mesh()
        self._shapes = spec.linears()
        self._tpu = tpu
        self.buckets = buckets
        #: The page for what padding writes; no row owns it.
        self.dustbin = pages
        self._attention = XlaAttention(
            layers=spec.layers,
            pages=pages,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            dtype=dtype,
            device=self._device,
            kernel=Kernel() if tpu else None,
            mesh=self.mesh,
        )
        self._lanes = XlaLanes(
            spec.layers,
            self._shapes,
            buckets.lanes,
            dtype,
            self._device,
            self.mesh,
            tpu if together is None else together,
        )
        self._writer: LaneWriter = (
            GraphWriter(self._lanes, dtype, self._device)
            if tpu or self.mesh.devices > 1
            else HostWriter(self._lanes)
        )

    def pack(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        group: str | None = None,
        shared: bool = False,
    ) -> Linear:
        """Turn a weight round, [in, out], and cut it. On a TPU a shared one stays as it is."""
        if shared and self._tpu:
            assert bias is None
            return SharedLinear(self.put(weight))
        weight = weight.cpu()
        if group is None:
            assert bias is None
            cut = self.mesh.devices > 1 and weight.shape[0] % self.mesh.devices == 0
            turned = self.mesh.place(self.put(weight.T.contiguous()), 1 if cut else None)
            return Head(self.mesh, turned, cut=cut)
        if group in CUT_BY_INPUTS:
            return self._pack_by_inputs(weight.T.contiguous(), bias)
        outs = [self._shapes[module][0] for module in GROUPS[group]]
        turned = self.mesh.interleave(weight, outs).T.contiguous()
        if bias is not None:
            bias = self.mesh.place(self.put(self.mesh.interleave(bias.cpu(), outs)), 0)
        return XlaLinear(self.mesh.place(self.put(turned), 1), bias)

    def _pack_by_inputs(self, turned: Tensor, bias: Tensor | None) -> Linear:
        weight, devices = self.mesh.place(self.put(turned), 0), self.mesh.devices
        if devices == 1:
            return XlaLinear(weight, None if bias is None else self.put(bias))
        if bias is not None:
            parts = torch.zeros(devices, 1, bias.shape[0], dtype=bias.dtype)
            parts[0, 0] = bias.cpu()
            bias = self.mesh.place(self.put(parts), 0)
        return PartsLinear(self.mesh, weight, bias)

    def split(self, y: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """See `Device.split`."""
        return self.mesh.split(y, sizes)

    def put(self, tensor: Tensor) -> Tensor:
        """Bring a tensor to the device; to every one of them."""
        return tensor.to(self._device)

    def layout(self, key: GraphKey) -> Layout:
        """Return how the vector of a graph is laid out."""
        return layout_of(key, self.dustbin, self._tpu)

    def batch(self, step: StepInput) -> XlaBatch:
        """Bring a step's input to the device; `batch_of` is what graphs are traced with."""
        key = self.buckets.choose(step)
        ints = torch.from_numpy(self.layout(key).pack(step))
        return self.batch_of(key, self.put(ints))

    def batch_of(self, key: GraphKey, ints: Tensor) -> XlaBatch:
        """Take a step's vector apart; ints [size of the key's layout] int32, on the device."""
        part = self.layout(key).split(ints)
        return XlaBatch(
            key=key,
            tokens=part["tokens"].long(),
            positions=part["positions"].long(),
            attention=plan_attention(key, part, kernel=self._tpu),
            lanes=self._lanes.masks(part["adapter_of"], part["page_owner"]) if key.lanes else (),
            last_token=part.get("last_token"),
        )

    def kv_cells(self) -> Sequence[Cell]:
        """Return the cells that every forward graph updates."""
        return self._attention.cells

    def lane_cells(self, key: GraphKey) -> Sequence[Cell]:
        """Return the cells that the forward graph of a key reads."""
        return self._lanes.cells(key.lanes)

    @property
    def lane_graphs(self) -> int:
        """How many graphs `compile_lanes` makes."""
        return self._writer.declared

    def compile_lanes(self, graphs: Graphs) -> None:
        """Compile what writes lanes; before the first `write_lanes`."""
        self._writer.compile(graphs)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: XlaBatch) -> Tensor:
        """See `Device.attend`."""
        return self._attention.attend(layer, q, k, v, batch.attention)

    def add_lora(self, y: Tensor, x: Tensor, layer: int, group: str, batch: XlaBatch) -> None:
        """See `Device.add_lora`."""
        self._lanes.add(y, x, layer, group, batch.lanes)

    def whole(self, y: Tensor) -> Tensor:
        """See `Device.whole`: parts are summed over the devices."""
        return y if y.dim() == 2 else self.mesh.sum(y)

    def write_lanes(
        self,
        layer: int,
        lane_pages: Sequence[int],
        targets: Mapping[str, TargetTensors],
        tables: Mapping[str, TableRows],
    ) -> None:
        """See `Device.write_lanes`. Raises `AdapterIncompatible` for what is not in lanes.

        Such adapters are refused before they are read; this is so that none is ever half applied.
        Raises `DeviceFailed` too: a write that fails leaves lanes that nobody knows.
        """
        _refuse_beyond_lanes(layer, targets, tables)
        if layer == ENDS:
            return
        try:
            self._writer.write(layer, lane_pages, targets)
        except RuntimeError as exc:
            raise DeviceFailed(f"the device failed while lanes were written: {exc}") from exc

    def forget(self, lane_pages: Sequence[int]) -> None:
        """See `Device.forget`: nothing is kept outside lanes."""

    def adapt_embedding(self, x: Tensor, batch: XlaBatch) -> None:
        """See `Device.adapt_embedding`: no adapter that would is let in."""

    def adapt_logits(self, logits: Tensor, x: Tensor, batch: XlaBatch) -> None:
        """See `Device.adapt_logits`: no adapter that would is let in."""

    def samples_of(self, x: Tensor, batch: XlaBatch) -> Tensor:
        """Pick each row's last token: sampled or not, [rows, hidden]."""
        return x if batch.last_token is None else x.index_select(0, batch.last_token)


def _refuse_beyond_lanes(
    layer: int, targets: Mapping[str, TargetTensors], tables: Mapping[str, TableRows]
) -> None:
    if layer == ENDS:
        beyond = [*targets, *tables]
    else:
        beyond = [m for m, t in targets.items() if t.gain is not None or t.shift is not None]
    if beyond:
        raise AdapterIncompatible(
            f"the adapter changes {', '.join(beyond)} by more than LoRA on a layer's linears, "
            "which --device xla does not do; --device cpu serves it"
        )
