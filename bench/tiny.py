"""Tiny random Llamas of any depth: a device has next to nothing to do for them.

What a step of one takes is what the host needs to get it going.
"""

import json
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, HEADS, KV_HEADS, MLP, VOCAB = 8, 2, 1, 16, 256
_KV: Final = HIDDEN // HEADS * KV_HEADS
_LINEARS: Final = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (_KV, HIDDEN),
    "self_attn.v_proj": (_KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}
_NORMS: Final = ("input_layernorm", "post_attention_layernorm")


def save_tiny(folder: Path, layers: int) -> Path:
    """Write a model of so many layers, without a tokenizer; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_weights(layers), folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _weights(layers: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(4)

    def matrix(rows: int, columns: int) -> Tensor:
        drawn: Tensor = torch.randn(rows, columns, generator=draw) / columns**0.5
        return drawn

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.{name}.weight": matrix(*shape) for name, shape in _LINEARS.items()}
        weights |= {f"{prefix}.{name}.weight": torch.ones(HIDDEN) for name in _NORMS}
    return weights
