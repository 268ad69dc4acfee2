import pytest
from loralane_server.adapters.formats.names import Place, place_of
from loralane_server.device.seam import ENDS

from tests.server.adapters.samples import BASE

Q = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "place"),
    [
        (f"{Q}.lora_A.weight", Place(1, "q_proj", "A")),
        (f"{Q}.lora_B.weight", Place(1, "q_proj", "B")),
        (f"{Q}.lora_B.default.weight", Place(1, "q_proj", "B", "default")),
        (f"{Q}.lora_B.bias", Place(1, "q_proj", "lora_bias")),
        (f"{Q}.lora_B.sql.bias", Place(1, "q_proj", "lora_bias", "sql")),
        (f"{Q}.bias", Place(1, "q_proj", "bias")),
        (f"{Q}.base_layer.bias", Place(1, "q_proj", "bias")),
        (f"{Q}.lora_magnitude_vector", Place(1, "q_proj", "magnitude")),
        (f"{Q}.lora_magnitude_vector.weight", Place(1, "q_proj", "magnitude")),
        (f"{Q}.lora_magnitude_vector.default", Place(1, "q_proj", "magnitude", "default")),
        (f"{Q}.lora_magnitude_vector.default.weight", Place(1, "q_proj", "magnitude", "default")),
        ("model.layers.0.self_attn.qkv_proj.lora_A.weight", Place(0, "qkv_proj", "A")),
        ("layers.0.mlp.gate_up_proj.lora_A.weight", Place(0, "gate_up_proj", "A")),
        (
            "base_model.model._orig_mod.model.layers.0._fsdp_wrapped_module.mlp.up_proj"
            ".lora_A.weight",
            Place(0, "up_proj", "A"),
        ),
        ("language_model.model.layers.0.mlp.up_proj.lora_A.weight", Place(0, "up_proj", "A")),
        ("base_model.model.lm_head.lora_A.weight", Place(ENDS, "lm_head", "A")),
        ("base_model.model.lm_head.lora_B.bias", Place(ENDS, "lm_head", "lora_bias")),
        ("base_model.model.lm_head.weight", Place(ENDS, "lm_head", "table")),
        (
            "base_model.model.lm_head.modules_to_save.default.weight",
            Place(ENDS, "lm_head", "table", "default"),
        ),
        ("base_model.model.lm_head.base_layer.weight", Place(ENDS, "lm_head", "base")),
        ("model.embed_tokens.lora_embedding_A", Place(ENDS, "embed_tokens", "A")),
        (
            "model.embed_tokens.lora_embedding_B.default",
            Place(ENDS, "embed_tokens", "B", "default"),
        ),
        (
            "model.embed_tokens.token_adapter.trainable_tokens_delta",
            Place(ENDS, "embed_tokens", "tokens"),
        ),
        (
            "model.embed_tokens.token_adapter.trainable_tokens_delta.default",
            Place(ENDS, "embed_tokens", "tokens", "default"),
        ),
        (
            "model.embed_tokens.token_adapter.base_layer.weight",
            Place(ENDS, "embed_tokens", "base"),
        ),
    ],
)
def test_a_name_says_where_its_tensor_belongs(name: str, place: Place) -> None:
    assert place_of(name, BASE) == place


@pytest.mark.parametrize(
    "name",
    [
        "",
        "lora_A.weight",
        Q,
        f"{Q}.lora_A",
        f"{Q}.lora_A.weight.default.more",
        f"{Q}.lora_C.weight",
        f"{Q}.lora_E",
        f"{Q}.weight",
        f"{Q}.base_layer.weight",
        f"{Q}.weight.lora_A.weight",
        f"{Q}.lora_embedding_A",
        f"{Q}.token_adapter.trainable_tokens_delta",
        f"{Q}.lora_velora_embed.default",
        "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.-1.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.01.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.\u0661.self_attn.q_proj.lora_A.weight",
        f"base_model.model.model.layers.{'1' * 5000}.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.1.mlp.q_proj.lora_A.weight",
        "base_model.model.model.layers.1.mlp.lm_head.lora_A.weight",
        "base_model.model.model.layers.1.self_attn.embed_tokens.lora_A.weight",
        "base_model.model.model.layers.1.mlp.qkv_proj.lora_A.weight",
        "base_model.model.model.vision_tower.layers.1.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.1.input_layernorm.weight",
        "base_model.model.model.norm.weight",
        "base_model.model.lm_head.bias.weight",
        "base_model.model.lm_head.lora_embedding_A",
        "base_model.model.lm_head.original_module.weight",
        "base_model.model.model.embed_tokens.lora_A.weight",
        "base_model.model.score.weight",
    ],
)
def test_a_name_that_is_no_place_of_the_base_has_none(name: str) -> None:
    assert place_of(name, BASE) is None
