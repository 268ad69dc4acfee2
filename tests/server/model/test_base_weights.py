from pathlib import Path

import pytest
import torch
from loralane_server.device.seam import ENDS
from loralane_server.errors import SourceUnavailable
from loralane_server.model.base_weights import BaseWeights
from loralane_server.model.spec import ModelSpec, read_model_spec
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from tests.server.adapters.formats.against_peft import BIASED, PLAIN, TIED, saved_model

OUT = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "gate_proj": 40, "up_proj": 40}
FUSED = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
}


def saved(config: PretrainedConfig, folder: Path) -> tuple[ModelSpec, dict[str, Tensor]]:
    saved_model(config, folder)
    return read_model_spec(folder), load_file(folder / "model.safetensors")


def fuse(folder: Path) -> None:
    """Store q, k, v and gate, up as one tensor each, as Phi-3 does."""
    stored = load_file(folder / "model.safetensors")
    for layer in range(2):
        for fused, parts in FUSED.items():
            prefix = f"model.layers.{layer}.{fused.partition('.')[0]}"
            for kind in ("weight", "bias"):
                rows = [stored.pop(f"{prefix}.{part}.{kind}") for part in parts]
                stored[f"model.layers.{layer}.{fused}.{kind}"] = torch.cat(rows)
    save_file(stored, folder / "model.safetensors")


@pytest.mark.parametrize("fused", [False, True])
def test_rows_and_biases_of_linears_are_those_of_the_checkpoint(
    fused: bool, tmp_path: Path
) -> None:
    spec, stored = saved(BIASED, tmp_path)
    if fused:
        fuse(tmp_path)

    weights = BaseWeights(tmp_path, spec, torch.float32)

    for module, out in OUT.items():
        block = "mlp" if module in ("gate_proj", "up_proj") else "self_attn"
        name = f"model.layers.1.{block}.{module}"
        bias = weights.bias(1, module)
        assert bias is not None
        assert torch.equal(weights.weight(1, module, 3, out), stored[f"{name}.weight"][3:])
        assert torch.equal(bias, stored[f"{name}.bias"])
    down = stored["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(weights.weight(0, "down_proj", 0, 32), down)


def test_they_are_rounded_as_the_shard_rounds_them(tmp_path: Path) -> None:
    spec, stored = saved(BIASED, tmp_path)

    weight = BaseWeights(tmp_path, spec, torch.bfloat16).weight(0, "q_proj", 0, 32)

    expected = stored["model.layers.0.self_attn.q_proj.weight"].bfloat16().float()
    assert weight.dtype == torch.float32
    assert torch.equal(weight, expected)


def test_a_linear_without_a_bias_has_none(tmp_path: Path) -> None:
    spec, _ = saved(PLAIN, tmp_path)

    assert BaseWeights(tmp_path, spec, torch.float32).bias(0, "q_proj") is None


@pytest.mark.parametrize("config", [PLAIN, TIED], ids=["untied", "tied"])
def test_the_head_of_a_tied_base_is_its_embedding(config: PretrainedConfig, tmp_path: Path) -> None:
    spec, stored = saved(config, tmp_path)

    weights = BaseWeights(tmp_path, spec, torch.float32)

    embedding = stored["model.embed_tokens.weight"]
    head = stored.get("lm_head.weight", embedding)
    assert torch.equal(weights.weight(ENDS, "embed_tokens", 0, 48), embedding)
    assert torch.equal(weights.weight(ENDS, "lm_head", 5, 9), head[5:9])


def test_nothing_is_opened_before_it_is_asked_for_and_a_missing_file_is_told(
    tmp_path: Path,
) -> None:
    spec, _ = saved(PLAIN, tmp_path)
    (tmp_path / "model.safetensors").unlink()

    weights = BaseWeights(tmp_path, spec, torch.float32)

    with pytest.raises(SourceUnavailable, match="the base's weights"):
        weights.weight(0, "q_proj", 0, 32)
