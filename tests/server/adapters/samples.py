"""Real tiny adapters, written byte by byte."""

import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck
from hypothesis import settings as fuzz
from loralane_server.adapters.formats.base_shape import BaseShape, block_of
from loralane_server.adapters.formats.index import AdapterIndex, build_index
from loralane_server.adapters.formats.spec import MAX_RANK, parse_spec
from loralane_server.adapters.reading.reader import LayerTensors
from loralane_server.adapters.sources.files import Reads
from loralane_server.adapters.sources.local_source import LocalPlace, LocalSource
from loralane_server.adapters.sources.references import AdapterRoot
from loralane_server.adapters.store.store import AdapterStore

BASE = BaseShape(
    layers=2,
    modules=(
        ("q_proj", 64, 64),
        ("k_proj", 32, 64),
        ("v_proj", 32, 64),
        ("o_proj", 64, 64),
        ("gate_proj", 128, 64),
        ("up_proj", 128, 64),
        ("down_proj", 64, 128),
    ),
    dtype="float32",
    vocab=260,
    hidden=64,
)
#: A busy machine is no defect.
FUZZ = fuzz(deadline=None, suppress_health_check=[HealthCheck.too_slow])

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "inference_mode": True,
}
NORM = "base_model.model.model.layers.{layer}.{block}.{module}.lora_{ab}.weight"

#: A tensor by name: dtype of the format, shape, bytes.
Stored = tuple[str, tuple[int, ...], bytes]


def values(name: str, shape: Sequence[int], seed: int = 0) -> np.ndarray[Any, Any]:
    """Numbers that depend on the name and the seed alone; float32."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return (generator.standard_normal(shape) * 0.1).astype("<f4")


def lora(
    modules: Iterable[str] = ("q_proj", "v_proj"),
    layers: Iterable[int] = (0, 1),
    rank: int = 4,
    seed: int = 1,
    template: str = NORM,
) -> dict[str, Stored]:
    """A and B in float32 for each of the modules in each of the layers."""
    tensors: dict[str, Stored] = {}
    for layer in layers:
        for module in modules:
            rows, columns = BASE.shape(module) or (64, 64)
            for half, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                name = template.format(
                    layer=layer,
                    block=block_of(module),
                    module=module,
                    ab=half,
                    ab_lower=half.lower(),
                )
                tensors[name] = ("F32", shape, values(name, shape, seed).tobytes())
    return tensors


def safetensors(tensors: Mapping[str, Stored]) -> bytes:
    """The file that holds these tensors, in this order."""
    header: dict[str, Any] = {}
    body = b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(body), len(body) + len(content)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        body += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def header_bytes(file: bytes) -> int:
    """How long the head of a safetensors file is, its length included."""
    return 8 + int.from_bytes(file[:8], "little")


def adapter_files(tensors: Mapping[str, Stored] | None = None, **config: Any) -> dict[str, bytes]:
    """The two files of an adapter, by name."""
    return {
        "adapter_config.json": json.dumps(CONFIG | config).encode(),
        "adapter_model.safetensors": safetensors(lora() if tensors is None else tensors),
    }


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Put the files into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def index_at(folder: Path, base: BaseShape = BASE, max_rank: int = MAX_RANK) -> AdapterIndex:
    """The index of the adapter in a folder."""
    located = LocalSource(Reads()).locate("a", LocalPlace(folder))
    return build_index(parse_spec(located.config), located, base, max_rank)


def write_without_tensors(folder: Path, count: int) -> None:
    """Adapters whose tensors are holes in their files."""
    modules = [name for name, _, _ in BASE.modules]
    files = adapter_files(lora(modules), target_modules=modules)
    weights = files["adapter_model.safetensors"]
    head = weights[: header_bytes(weights)]
    for n in range(count):
        adapter = write(folder / f"a{n}", files | {"adapter_model.safetensors": head})
        os.truncate(adapter / "adapter_model.safetensors", len(weights))


def store_at(*roots: AdapterRoot, **settings: Any) -> AdapterStore:
    """A store for `BASE` with room for everything."""
    defaults: dict[str, Any] = {"dtype": torch.float32, "host_cache_bytes": 1 << 30}
    return AdapterStore(BASE, roots=roots, **defaults | settings)


def load(store: AdapterStore, digest: str) -> list[LayerTensors]:
    """Load an adapter and return its layers, the ends first."""
    layers: list[LayerTensors] = []
    store.load(digest, layers.append).result()
    return layers
