"""Phi-3: the weights of q, k, v and of gate, up are stored fused; the maths is Llama's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from loralane_server.config import ShardConfig
from loralane_server.errors import ModelUnsupported
from loralane_server.model.spec import model_spec
from loralane_server.rows import Admission
from transformers import Phi3Config

from tests import reference
from tests.server.conftest import running

TOKENS = 48


def config(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = reference.PHI3.to_dict()
    return values | {"architectures": ["Phi3ForCausalLM"]} | changes


#: Served up to 128 positions, for which it stretches frequencies by the short factors.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1 + i / 8 for i in range(8)],
    "long_factor": [2 + i for i in range(8)],
}


def longrope() -> Phi3Config:
    values = reference.PHI3.to_dict() | {"rope_parameters": LONGROPE, "sliding_window": None}
    return Phi3Config(**values | {"original_max_position_embeddings": 128})


@pytest.mark.filterwarnings("ignore:This model config has set:UserWarning")
@pytest.mark.parametrize("kind", ["default", "longrope"])
def test_base_tokens_equal_transformers(kind: str, tmp_path: Path) -> None:
    model = reference.random_model(reference.PHI3 if kind == "default" else longrope())
    reference.save_model(model, tmp_path)
    make = torch.Generator().manual_seed(1)
    prompts: list[list[int]] = torch.randint(0, 256, (4, 128 - TOKENS), generator=make).tolist()
    expected = reference.greedy(model, None, prompts, TOKENS)
    assert all(len(set(tokens)) > 8 for tokens in expected)

    with running(ShardConfig(model=str(tmp_path), dtype="float32", step_tokens=32)) as listener:
        admissions = [Admission(i, "", tuple(p), TOKENS) for i, p in enumerate(prompts)]
        produced = listener.generate(*admissions)

    assert produced == expected


@pytest.mark.filterwarnings("ignore:This model config has set:UserWarning")
def test_longrope_is_served_up_to_the_length_at_which_its_factors_change() -> None:
    spec = model_spec(longrope().to_dict() | {"architectures": ["Phi3ForCausalLM"]})

    assert spec.max_positions == 128


def test_published_configurations_are_understood() -> None:
    mini = {
        "architectures": ["Phi3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "embd_pdrop": 0.0,
        "eos_token_id": 32000,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "model_type": "phi3",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 32000,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 32064,
    }

    assert model_spec(mini).max_positions == 2047


def test_what_transformers_writes_is_understood() -> None:
    spec = model_spec(config())

    assert spec.fused
    assert spec.max_positions == 192  # up to the window, full attention is exact
    assert not any((spec.qkv_bias, spec.o_bias, spec.mlp_bias))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "short_factor"),
        ({"rope_scaling": {"type": "yarn"}, "rope_parameters": None}, "yarn"),
        ({"partial_rotary_factor": 0.75}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
    ],
)
def test_rotary_rules_that_are_not_implemented_are_refused_by_name(
    change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelUnsupported, match=named):
        model_spec(config(**change))
