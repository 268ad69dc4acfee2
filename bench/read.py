"""How long reading an adapter takes, plain and with DoRA, which needs every weight of the base.

    python -m bench.read [--dtype bf16] [--rank 16] [--rounds 5]

Drives the real reader on one thread, as the shard's workers do, with files in the page cache.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Final

import torch
from loralane_server.adapters.formats.index import build_index
from loralane_server.adapters.formats.spec import parse_spec
from loralane_server.adapters.reading.load_files import LoadFiles
from loralane_server.adapters.reading.reader import Reader
from loralane_server.adapters.sources.files import Reads
from loralane_server.adapters.sources.local_source import LocalPlace, LocalSource
from loralane_server.assembly import base_shape
from loralane_server.device.seam import ENDS
from loralane_server.model.base_weights import BaseWeights
from loralane_server.model.spec import read_model_spec
from safetensors.torch import load_file, save_file

from bench.model import CONFIG, DEFAULT_FOLDER, WEIGHTS, make, save_adapter

_DTYPES: Final = {"f32": "float32", "bf16": "bfloat16"}
_SEED: Final = 77


def with_magnitudes(plain: Path, folder: Path) -> None:
    """Save the same adapter with DoRA: magnitudes of one."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(plain / WEIGHTS)
    ends = ".lora_B.weight"
    names = [name.removesuffix(ends) for name in tensors if name.endswith(ends)]
    magnitudes = {
        f"{name}.lora_magnitude_vector": torch.ones(len(tensors[name + ends])) for name in names
    }
    save_file(tensors | magnitudes, folder / WEIGHTS)
    config = json.loads((plain / CONFIG).read_text()) | {"use_dora": True}
    (folder / CONFIG).write_text(json.dumps(config))


def read_ms(model: Path, adapter: Path, dtype: str) -> float:
    """Return the milliseconds that one read of all layers takes."""
    spec = read_model_spec(model)
    located = LocalSource(Reads()).locate("bench", LocalPlace(adapter))
    index = build_index(parse_spec(located.config), located, base_shape(spec, dtype))
    kind = getattr(torch, dtype)
    reader = Reader(kind, Reads(), BaseWeights(model, spec, kind))
    files = LoadFiles(located.open_file)
    began = time.perf_counter()
    for layer in (ENDS, *range(spec.layers)):
        reader.read_layer(index, files, layer)
    return (time.perf_counter() - began) * 1e3


def main() -> int:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = options.folder / options.dtype
    if not (model / "config.json").exists():
        make(options.folder)
    torch.set_num_threads(1)
    adapters = {kind: options.folder / "read" / kind for kind in ("plain", "dora")}
    save_adapter(adapters["plain"], options.rank, _SEED)
    with_magnitudes(adapters["plain"], adapters["dora"])
    taken: dict[str, list[float]] = {kind: [] for kind in adapters}
    for _ in range(options.rounds):
        for kind, folder in adapters.items():
            taken[kind].append(read_ms(model, folder, _DTYPES[options.dtype]))
    for kind, values in taken.items():
        sys.stdout.write(f"{kind:6} rank {options.rank}: {median(values):8.1f} ms\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
