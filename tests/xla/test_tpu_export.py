"""What `make tpu-check` exports: the shard's own graphs, without its weights."""

import json
from pathlib import Path

import pytest
import torch
import torch_xla

from tpu.chips import GIB, V6E
from tpu.export import export_shard
from tpu.kernels import lowered_for_tpu
from tpu.partition import sharding
from tpu.placeholders import Placeholders
from tpu.plans import CONTEXT, Shard, Step
from tpu.records import read_exported


def test_what_is_large_becomes_a_parameter_without_memory() -> None:
    with Placeholders() as made:
        weight = torch.empty(1 << 20, 1 << 20, dtype=torch.bfloat16, device="meta")
        on_device = weight.to(torch_xla.device())
        zeros = torch.zeros(1 << 20, 1 << 10).to(torch_xla.device(), torch.bfloat16)

    assert on_device.shape == (1 << 20, 1 << 20)
    assert on_device.device.type == "xla"
    assert zeros.dtype == torch.bfloat16
    assert made.nbytes == 2048 * GIB + 2 * GIB


def test_what_is_small_is_really_brought() -> None:
    with Placeholders() as made:
        brought = torch.arange(5).to(torch_xla.device())
        zeros = torch.zeros(3)

    assert brought.cpu().tolist() == [0, 1, 2, 3, 4]
    assert zeros.tolist() == [0, 0, 0]
    assert made.nbytes == 0


@pytest.mark.parametrize(
    ("dim", "written"),
    [(None, "{replicated}"), (0, "{devices=[4,1,1]<=[4]}"), (2, "{devices=[1,1,4]<=[4]}")],
)
def test_shardings_are_written_as_xla_reads_them(dim: int | None, written: str) -> None:
    assert sharding(3, dim, 4) == written


# The kernel is older than the jax that traces it.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_shard_is_exported_with_all_of_its_layers(tmp_path: Path) -> None:
    steps = (Step("decode", 16, 128), Step("decode", 16, 0), Step("decode", 16, None))
    shard = Shard("one-b", "llama-3.2-1b", 2 * GIB, steps, (V6E,), writers=False)

    with lowered_for_tpu(), torch.no_grad(), Placeholders():
        export_shard(tmp_path, shard)

    base, lora, none = read_exported(tmp_path)
    assert [g.name for g in (base, lora, none)] == [
        f"one-b.decode-16.{word}" for word in ("lanes-0", "lanes-128", "none")
    ]
    assert (lora.layers, lora.kernels) == (16, 16)
    # Cells of 2 GiB: that is what pages take, and each layer has one more, for padding.
    assert sorted(lora.donated.values()) == [0, 1]
    # Heads of 64 are stored as 128, so a token takes twice what it has.
    assert sum(lora.donated_bytes.values()) == 2 * GIB + 16 * 2 * 16 * 8 * 128 * 2
    assert lora.fetched == 16 * CONTEXT * 16 * 2 * 8 * 128 * 2
    assert lora.arguments - base.arguments == 16 * (20_480 + 23_552) * 128 * 2
    assert base.arguments == none.arguments
    record = json.loads((tmp_path / f"{lora.name}.json").read_text())
    assert record["expected"] == "compiles"
