"""config.json: understood exactly or refused by name."""

from typing import Any

import pytest
import torch
from loralane_server.errors import ModelUnsupported
from loralane_server.model.rope import read_rope
from loralane_server.model.spec import model_spec

from tests import reference


def config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = reference.FAMILIES[family].to_dict()
    architecture = {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }[family]
    return values | {"architectures": [architecture]} | changes


@pytest.mark.parametrize("family", sorted(reference.FAMILIES))
def test_what_transformers_writes_is_understood(family: str) -> None:
    spec = model_spec(config(family))

    assert (spec.layers, spec.hidden, spec.kv_heads) == (3, 64, 2)
    assert spec.qkv_bias == (family == "qwen2")
    assert spec.qk_norm == (family == "qwen3")
    assert not spec.o_bias


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"original_max_position_embeddings": 64}, "original_max_position_embeddings"),
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    ],
)
def test_what_would_change_the_maths_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelUnsupported, match=named):
        model_spec(config(**change))


def test_attention_and_linears_balance_where_they_multiply_as_often() -> None:
    spec = model_spec(config())
    linears = sum(out * inside for out, inside in spec.linears().values())

    assert linears // (2 * spec.heads * spec.head_dim) == spec.balance > 0


def test_unknown_fields_that_say_nothing_are_fine() -> None:
    model_spec(config(some_new_switch=False, another=None, _name_or_path="x"))


def test_a_sliding_window_limits_the_length_for_which_full_attention_is_exact() -> None:
    assert model_spec(config("mistral", sliding_window=128)).max_positions == 128
    assert (
        model_spec(config("qwen2", sliding_window=64, use_sliding_window=False)).max_positions
        == 256
    )


@pytest.mark.parametrize(
    "scaling",
    [
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "default"},
    ],
)
def test_old_and_new_spelling_of_rope_scaling_agree_with_transformers(
    scaling: dict[str, Any],
) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    new = {"rope_parameters": {**scaling, "rope_theta": 5e5}, "max_position_embeddings": 512}
    old = {"rope_scaling": scaling, "rope_theta": 5e5, "max_position_embeddings": 512}
    theirs = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4, **new))
    positions = torch.arange(512)[None]
    cos, sin = theirs(torch.zeros(1), positions)

    for ours in (read_rope(new), read_rope(old)):
        mine = ours.tables(512, 16)
        torch.testing.assert_close(mine[0], cos[0])
        torch.testing.assert_close(mine[1], sin[0])
