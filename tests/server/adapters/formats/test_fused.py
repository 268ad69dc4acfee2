"""Adapters of fused linears, on a base whose linears are apart, compute what PEFT does fused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.server.adapters.formats.against_peft import BIASED, Adapted, read_all, saved_model

pytestmark = pytest.mark.filterwarnings("ignore:Adapter 'default'.*invalid shape:Warning")

PARTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora-patterns": {
        "use_rslora": True,
        "rank_pattern": {"qkv_proj": 3},
        "alpha_pattern": {"gate_up_proj": 5},
    },
    "lora_bias": {"lora_bias": True},
    "bias": {"bias": "lora_only"},
    "dora": {"use_dora": True},
    "dora-bias": {"use_dora": True, "bias": "lora_only"},
}


def fused_layer(model: PreTrainedModel) -> nn.Module:
    """Layer 1 with its linears fused, under the names that they have in a model."""
    layer = nn.Module()
    for fused, parts in PARTS.items():
        block, name = fused.split(".")
        linears: list[Any] = [model.get_submodule(f"model.layers.1.{part}") for part in parts]
        weight = torch.cat([linear.weight for linear in linears]).detach()
        one = nn.Linear(weight.shape[1], weight.shape[0])
        one.weight = nn.Parameter(weight)
        one.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]).detach())
        layer.add_module(block, nn.Module())
        layer.get_submodule(block).add_module(name, one)
    return layer


def peft_on_fused(
    model: PreTrainedModel, folder: Path, x: Tensor, fields: Any
) -> dict[str, Tensor]:
    """Save an adapter of the fused linears, and return their outputs under PEFT."""
    config = LoraConfig(r=4, lora_alpha=10, target_modules=["qkv_proj", "gate_up_proj"], **fields)
    adapted: Any = get_peft_model(fused_layer(model), config)
    torch.manual_seed(9)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.2)
    state = get_peft_model_state_dict(adapted)
    prefix = "base_model.model."
    renamed = {
        f"{prefix}model.layers.1.{name.removeprefix(prefix)}": tensor.contiguous()
        for name, tensor in state.items()
    }
    folder.mkdir()
    save_file(renamed, folder / "adapter_model.safetensors")
    saved = {"peft_type": "LORA", "r": 4, "lora_alpha": 10} | fields
    (folder / "adapter_config.json").write_text(json.dumps(saved))
    with torch.no_grad():
        return {fused: adapted.base_model.model.get_submodule(fused)(x) for fused in PARTS}


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_together_compute_what_the_fused_linear_does(kind: str, tmp_path: Path) -> None:
    model = saved_model(BIASED, tmp_path / "model")
    x = torch.randn(5, 32)
    expected = peft_on_fused(model, tmp_path / "a", x, KINDS[kind])

    layer = read_all(tmp_path / "model", tmp_path / "a")[-1]

    for fused, parts in PARTS.items():
        with torch.no_grad():
            outputs = [
                Adapted(
                    model.get_submodule(f"model.layers.1.{part}"),
                    layer.targets[part.partition(".")[2]],
                )(x)
                for part in parts
            ]
        torch.testing.assert_close(torch.cat(outputs, 1), expected[fused], rtol=1e-5, atol=1e-5)
