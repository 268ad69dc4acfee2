from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loralane_server.adapters.formats.base_shape import Abilities
from loralane_server.adapters.formats.index import AdapterIndex, build_index
from loralane_server.adapters.formats.spec import parse_spec
from loralane_server.adapters.reading.load_files import LoadFiles
from loralane_server.adapters.reading.reader import LayerTensors, Reader
from loralane_server.adapters.sources.files import Reads, read_into
from loralane_server.adapters.sources.local_source import LocalPlace, LocalSource
from loralane_server.adapters.sources.located import Located
from loralane_server.errors import AdapterCorrupt, AdapterNotFound
from safetensors.torch import save_file

from tests.server.adapters.samples import (
    BASE,
    Stored,
    adapter_files,
    lora,
    safetensors,
    values,
    write,
)

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def opened(folder: Path) -> tuple[AdapterIndex, Located]:
    located = LocalSource(Reads()).locate("a", LocalPlace(folder))
    return build_index(parse_spec(located.config), located, BASE), located


def read(folder: Path, layer: int = 0, dtype: torch.dtype = torch.float32) -> LayerTensors:
    index, located = opened(folder)
    return Reader(dtype, Reads()).read_layer(index, LoadFiles(located.open_file), layer)


def test_a_layer_holds_a_and_the_scaled_transpose_of_b(tmp_path: Path) -> None:
    folder = write(tmp_path, adapter_files(lora(rank=4), r=4, lora_alpha=10))

    layer = read(folder)

    a, b = layer.targets["q_proj"].a, layer.targets["q_proj"].b
    assert set(layer.targets) == {"q_proj", "v_proj"}
    assert np.array_equal(a.numpy(), values(A, (4, 64), seed=1))
    assert np.array_equal(b.numpy(), values(B, (64, 4), seed=1).T * np.float32(2.5))
    assert a.is_contiguous()
    assert b.is_contiguous()
    assert layer.nbytes == 4 * (4 * 64 + 4 * 64 + 4 * 64 + 4 * 32)


def test_a_lies_by_columns_for_a_device_that_takes_it_so(tmp_path: Path) -> None:
    folder = write(tmp_path, adapter_files(lora(rank=4), r=4, lora_alpha=10))
    index, located = opened(folder)
    abilities = Abilities("xla", a_by_columns=True)

    layer = Reader(torch.float32, Reads(), abilities=abilities).read_layer(
        index, LoadFiles(located.open_file), 0
    )

    target, same = layer.targets["q_proj"], read(folder).targets["q_proj"]
    assert target.a.T.is_contiguous()
    assert target.b.is_contiguous()
    assert torch.equal(target.a, same.a)
    assert torch.equal(target.b, same.b)


def test_only_the_layers_own_bytes_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path, adapter_files(lora(["q_proj"], [0]) | lora(["v_proj"], [1], rank=4)))
    index, located = opened(folder)
    reads = Reads()

    Reader(torch.float32, reads).read_layer(index, LoadFiles(located.open_file), 1)

    assert reads.tensor_bytes == 4 * (4 * 64 + 32 * 4)
    assert reads.header_bytes == 0


def test_a_layer_without_targets_is_empty_and_reads_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path, adapter_files(lora(layers=[1])))
    index, located = opened(folder)
    (folder / "adapter_model.safetensors").unlink()

    layer = Reader(torch.float32, Reads()).read_layer(index, LoadFiles(located.open_file), 0)

    assert (layer.layer, layer.targets, layer.nbytes) == (0, {}, 0)


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
)
def test_every_stored_dtype_is_scaled_in_float32(dtype: str, tmp_path: Path) -> None:
    stored = {
        name: torch.from_numpy(values(name, shape).copy()).to(getattr(torch, dtype))
        for name, shape in ((A, (4, 64)), (B, (64, 4)))
    }
    write(tmp_path, adapter_files(lora_alpha=12))
    save_file(stored, tmp_path / "adapter_model.safetensors")

    target = read(tmp_path, dtype=torch.bfloat16).targets["q_proj"]
    a, b = target.a, target.b

    assert torch.equal(a, stored[A].to(torch.float32).to(torch.bfloat16))
    assert torch.equal(b, (stored[B].to(torch.float32) * 3).to(torch.bfloat16).T)


def poked(name: str, at: int, value: float, dtype: str = "F32") -> dict[str, Stored]:
    tensors = lora()
    _, shape, content = tensors[name]
    array = np.frombuffer(content, "<f4").astype({"F32": "<f4", "F64": "<f8"}[dtype])
    array[at] = value
    return tensors | {name: (dtype, shape, array.tobytes())}


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (poked(A, 0, float("nan")), {}),
        (poked(B, 255, float("inf")), {}),
        (poked(B, 7, float("-inf")), {}),
        (poked(A, 7, 1e300, "F64"), {}),
        (poked(B, 7, 1e30), {"lora_alpha": 1e30}),
    ],
)
def test_what_is_not_finite_is_corrupt_and_named(
    tensors: dict[str, Stored], config: dict[str, Any], tmp_path: Path
) -> None:
    folder = write(tmp_path, adapter_files(tensors, **config))

    with pytest.raises(AdapterCorrupt, match=r"q_proj\.lora_. *.*not finite.*NaN or Inf") as caught:
        read(folder)

    module = "model.layers.0.self_attn.q_proj"
    assert caught.value.tensors[0] in (f"{module}.lora_A", f"{module}.lora_B")


def truncate(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4000])


def replace(folder: Path) -> None:
    (folder / "new").write_bytes(safetensors(lora(seed=2)))
    (folder / "new").replace(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("change", [truncate, replace])
def test_a_file_that_changed_since_it_was_resolved_is_noticed(change: Any, tmp_path: Path) -> None:
    index, located = opened(write(tmp_path, adapter_files()))
    change(tmp_path)

    with pytest.raises(AdapterCorrupt, match="changed since it was resolved; request it again"):
        Reader(torch.float32, Reads()).read_layer(index, LoadFiles(located.open_file), 0)


def test_a_file_replaced_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    index, located = opened(write(tmp_path, adapter_files()))
    seen: list[str] = []

    def open_and_replace(name: str) -> Path:
        path = located.open_file(name)
        seen.append(name)
        if len(seen) == 1:  # after the check, before the file is opened
            replace(tmp_path)
        return path

    with pytest.raises(AdapterCorrupt, match="changed since"):
        Reader(torch.float32, Reads()).read_layer(index, LoadFiles(open_and_replace), 0)


def test_a_file_cut_short_while_it_is_open_is_an_error_not_a_crash(tmp_path: Path) -> None:
    _, located = opened(write(tmp_path, adapter_files()))
    name, files = "adapter_model.safetensors", LoadFiles(located.open_file)

    def cut_and_read() -> None:
        with files.opened(name) as descriptor:
            (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:1500])
            read_into(descriptor, bytearray(2000), 0, name)

    with pytest.raises(AdapterCorrupt, match="truncated"):
        cut_and_read()


def test_a_file_replaced_between_two_layers_is_noticed(tmp_path: Path) -> None:
    index, located = opened(write(tmp_path, adapter_files()))
    reader, files = Reader(torch.float32, Reads()), LoadFiles(located.open_file)
    reader.read_layer(index, files, 0)
    replace(tmp_path)

    with pytest.raises(AdapterCorrupt, match="changed since"):
        reader.read_layer(index, files, 1)


def test_a_deleted_file_is_not_found(tmp_path: Path) -> None:
    index, located = opened(write(tmp_path, adapter_files()))
    (tmp_path / "adapter_model.safetensors").unlink()

    with pytest.raises(AdapterNotFound, match=r"adapter_model\.safetensors is missing"):
        Reader(torch.float32, Reads()).read_layer(index, LoadFiles(located.open_file), 0)
