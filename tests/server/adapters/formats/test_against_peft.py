"""Adapters that PEFT saves are read to tensors that compute what PEFT computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from loralane_server.device.seam import ENDS
from transformers import PretrainedConfig

from tests.server.adapters.formats.against_peft import (
    BIASED,
    PLAIN,
    TIED,
    peft_logits,
    read_all,
    save_adapter,
    saved_model,
    served_logits,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'.*invalid shape:Warning"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed:Warning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True:UserWarning"),
    pytest.mark.filterwarnings("ignore:You have requested `ensure_weight_tying`:UserWarning"),
    pytest.mark.filterwarnings("ignore:ensure_weight_tying=True but:UserWarning"),
]
QV = ["q_proj", "v_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]

EVERY_BASE: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": QV},
    "lora_bias": {"target_modules": [*QV, *MLP], "lora_bias": True},
    "lora_bias-head": {"target_modules": ["q_proj", "lm_head"], "lora_bias": True},
    "bias-lora_only": {"target_modules": QV, "bias": "lora_only"},
    "bias-all": {"target_modules": QV, "bias": "all"},
    "bias-all-lora_bias": {"target_modules": QV, "bias": "all", "lora_bias": True},
    "dora": {"target_modules": [*QV, *MLP], "use_dora": True},
    "dora-rslora": {"target_modules": "all-linear", "use_dora": True, "use_rslora": True},
    "dora-bias-all": {"target_modules": QV, "use_dora": True, "bias": "all"},
    "dora-patterns": {
        "target_modules": QV,
        "use_dora": True,
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.v_proj": 3},
    },
    "dora-head": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
    "fan_in_fan_out": {"target_modules": QV, "fan_in_fan_out": True},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "embedding-pattern": {
        "target_modules": ["q_proj", "embed_tokens"],
        "rank_pattern": {"embed_tokens": 3},
        "alpha_pattern": {"model.embed_tokens": 7},
    },
    "head": {"target_modules": ["lm_head"]},
    "both-ends": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "save-head": {"target_modules": QV, "modules_to_save": ["lm_head"]},
    "save-embedding": {"target_modules": QV, "modules_to_save": ["embed_tokens"]},
    "save-both": {"target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]},
    "save-head-lora-embedding": {
        "target_modules": ["q_proj", "embed_tokens"],
        "modules_to_save": ["lm_head"],
    },
    "tokens": {"target_modules": QV, "trainable_token_indices": [7, 3, 40]},
    "tokens-dict": {"target_modules": QV, "trainable_token_indices": {"embed_tokens": [7, 3]}},
    "tokens-apart": {
        "target_modules": QV,
        "trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [5]},
    },
    "tokens-together": {
        "target_modules": QV,
        "trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [7, 3]},
    },
    "tokens-head": {"target_modules": QV, "trainable_token_indices": {"lm_head": [2]}},
}
TYING: dict[str, dict[str, Any]] = {
    "tied-embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "tied-head": {"target_modules": ["q_proj", "lm_head"]},
    "tied-save-head": {"target_modules": QV, "modules_to_save": ["lm_head"]},
    "tied-save-embedding": {"target_modules": QV, "modules_to_save": ["embed_tokens"]},
    "tied-tokens": {"target_modules": QV, "trainable_token_indices": [7, 3]},
}


def check(config: PretrainedConfig, fields: dict[str, Any], folder: Path) -> None:
    model = saved_model(config, folder / "model")
    save_adapter(model, folder / "a", **fields)
    expected = peft_logits(model, folder / "a")

    layers = read_all(folder / "model", folder / "a")

    found = served_logits(model, layers)
    base = served_logits(model, [])
    assert (expected - base).abs().max() > 0.05, "the adapter must do something"
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", EVERY_BASE)
def test_on_a_base_with_biases_the_logits_are_those_of_peft(case: str, tmp_path: Path) -> None:
    check(BIASED, EVERY_BASE[case], tmp_path)


@pytest.mark.parametrize("case", EVERY_BASE)
def test_on_a_tied_base_the_logits_are_those_of_peft(case: str, tmp_path: Path) -> None:
    check(TIED, EVERY_BASE[case], tmp_path)


@pytest.mark.parametrize("config", [PLAIN, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("case", TYING)
def test_ensured_tying_is_what_peft_makes_of_it(
    case: str, config: PretrainedConfig, tmp_path: Path
) -> None:
    check(config, TYING[case] | {"ensure_weight_tying": True}, tmp_path)


def test_a_copy_of_the_bases_table_costs_nothing(tmp_path: Path) -> None:
    model = saved_model(PLAIN, tmp_path / "model")
    save_adapter(model, tmp_path / "a", target_modules=["embed_tokens", "lm_head"])

    ends = read_all(tmp_path / "model", tmp_path / "a")[0]

    assert ends.layer == ENDS
    assert set(ends.targets) == {"embed_tokens", "lm_head"}
    assert ends.tables == {}
