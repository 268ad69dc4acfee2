"""Weights from mmapped safetensors into a decoder, one layer at a time.

Peak memory is the model in the device's layout plus the largest fused tensor: each tensor is copied
from the map into its place and the map's pages are the kernel's to drop.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from loralane_server.adapters.formats.base_shape import FUSED
from loralane_server.device.memory import mapped
from loralane_server.device.seam import GROUPS, BatchT, Device, LayerWeights, Linear
from loralane_server.errors import ModelUnsupported
from loralane_server.model.decoder import Decoder
from loralane_server.model.spec import ModelSpec

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class Checkpoint:
    """The tensors of a model folder by name, read one at a time. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._file_of: dict[str, safe_open] = {}
        for path in weight_files(folder):
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as exc:
                raise ModelUnsupported(f"{path}: cannot be read as safetensors: {exc}") from exc
            for name in file.keys():  # noqa: SIM118 - not a mapping, only has keys()
                self._file_of[name] = file
        self._unread = set(self._file_of)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stack.close()

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Read one tensor and cast it. Raises `ModelUnsupported` if it is missing or misshapen."""
        return mapped(shape, dtype).copy_(self._open(name, shape))

    def read_into(self, out: Tensor, name: str) -> None:
        """Read one tensor into `out`, which has its shape and the wanted dtype."""
        out.copy_(self._open(name, tuple(out.shape)))

    def refuse_unread(self, ignored: tuple[str, ...]) -> None:
        """Raise if a tensor was never read: the model has a part that would be left out."""
        left = sorted(n for n in self._unread if not n.endswith(ignored))
        if left:
            raise ModelUnsupported(
                f"the weights hold tensors that this architecture does not use: {left[:5]}"
            )

    def _open(self, name: str, shape: tuple[int, ...]) -> Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise ModelUnsupported(f"the weights lack tensor {name}")
        tensor: Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelUnsupported(
                f"tensor {name} has shape {tuple(tensor.shape)}, config.json says {shape}"
            )
        self._unread.discard(name)
        return tensor


def load_decoder(
    folder: Path, spec: ModelSpec, device: Device[BatchT], dtype: torch.dtype, max_len: int
) -> Decoder[BatchT]:
    """Read all weights of `folder` onto `device`, showing progress on stderr.

    Raises `ModelUnsupported` when a tensor is missing, misshapen or not used.
    """
    decoder = Decoder(spec, device, max_len)
    with Checkpoint(folder) as checkpoint:
        layers = tqdm(
            range(spec.layers), desc="loading weights", unit="layer", leave=False, disable=None
        )
        for index in layers:
            decoder.add_layer(_read_layer(checkpoint, spec, index, dtype))
        table = (spec.vocab, spec.hidden)
        embedding = device.put(checkpoint.read("model.embed_tokens.weight", table, dtype))
        norm = checkpoint.read("model.norm.weight", (spec.hidden,), dtype)
        decoder.set_ends(embedding, norm, _head(checkpoint, spec, device, embedding))
        tied = ("lm_head.weight",) if spec.tied_head else ()
        checkpoint.refuse_unread(("rotary_emb.inv_freq", *tied))
    return decoder


def _head(
    checkpoint: Checkpoint, spec: ModelSpec, device: Device[BatchT], embedding: Tensor
) -> Linear:
    if spec.tied_head:
        return device.pack(embedding, None, shared=True)
    table = (spec.vocab, spec.hidden)
    return device.pack(checkpoint.read("lm_head.weight", table, embedding.dtype), None)


def _read_layer(
    checkpoint: Checkpoint, spec: ModelSpec, index: int, dtype: torch.dtype
) -> LayerWeights:
    prefix = f"model.layers.{index}"

    def norm(name: str, size: int) -> Tensor:
        return checkpoint.read(f"{prefix}.{name}.weight", (size,), dtype)

    return LayerWeights(
        linears={group: _read_group(checkpoint, spec, prefix, group, dtype) for group in GROUPS},
        input_norm=norm("input_layernorm", spec.hidden),
        post_norm=norm("post_attention_layernorm", spec.hidden),
        q_norm=norm("self_attn.q_norm", spec.head_dim) if spec.qk_norm else None,
        k_norm=norm("self_attn.k_norm", spec.head_dim) if spec.qk_norm else None,
    )


def _read_group(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    prefix: str,
    group: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """Read linears that share an input as one weight [sum of outs, in] and one bias."""
    shapes, modules = spec.linears(), GROUPS[group]
    outs = [shapes[module][0] for module in modules]
    weight = mapped((sum(outs), shapes[modules[0]][1]), dtype)
    bias = mapped((sum(outs),), dtype) if has_bias(spec, modules[0]) else None
    fused = {members: name for name, members in FUSED.items()}.get(modules) if spec.fused else None
    parts = _parts(modules, outs) if fused is None else iter([(fused, slice(None))])
    block = "self_attn" if modules[0] in _ATTENTION else "mlp"
    for stored, rows in parts:
        checkpoint.read_into(weight[rows], f"{prefix}.{block}.{stored}.weight")
        if bias is not None:
            checkpoint.read_into(bias[rows], f"{prefix}.{block}.{stored}.bias")
    return weight, bias


def _parts(modules: tuple[str, ...], outs: list[int]) -> Iterator[tuple[str, slice]]:
    begin = 0
    for module, out in zip(modules, outs, strict=True):
        yield module, slice(begin, begin + out)
        begin += out


def has_bias(spec: ModelSpec, module: str) -> bool:
    """Whether this linear of a layer has a bias."""
    if module == "o_proj":
        return spec.o_bias
    return spec.qkv_bias if module in _ATTENTION else spec.mlp_bias


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder; raises `ModelUnsupported` without any."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    raise ModelUnsupported(
        f"{folder} holds neither model.safetensors nor model.safetensors.index.json; "
        "only safetensors are read"
    )
