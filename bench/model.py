"""A random Llama of a useful size (88 M parameters) and sixteen adapters for it.

    python -m bench.model [--out bench/results/m160]

Gives `f32/` and `bf16/`, the same model twice, and `adapters/a00` ... `a15`. The weights are drawn
so that greedy decoding is not degenerate, and the specials are never the most probable token.
"""

import argparse
import json
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

LAYERS, HIDDEN, HEADS, KV_HEADS, MLP, VOCAB = 12, 768, 12, 4, 2048, 8000
_KV: Final = HIDDEN // HEADS * KV_HEADS
#: (out, in) of every linear of a layer.
LINEARS: Final[Mapping[str, tuple[int, int]]] = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (_KV, HIDDEN),
    "self_attn.v_proj": (_KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}
ADAPTERS: Final = 16
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DEFAULT_FOLDER: Final = Path("bench/results/m160")
_MODEL_CONFIG: Final = "config.json"
_SPECIALS: Final = ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>")
_CORPUS_CHARS: Final = 4_000_000
_CONFIG: Final[Mapping[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def make(folder: Path) -> None:
    """Write the model in both dtypes, its tokenizer and its adapters."""
    weights = _weights()
    tokenizer = _tokenizer()
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        _save_model(folder / name, weights, dtype, tokenizer)
    for index in range(ADAPTERS):
        save_adapter(folder / "adapters" / f"a{index:02d}", rank_of(index), 1000 + index)


def ready(folder: Path, dtype: str) -> Path:
    """Return the model's folder in a dtype; all is made on the first use."""
    if not (folder / dtype).is_dir():
        print(f"making {folder}")
        make(folder)
    return folder / dtype


def longer(model: Path, tokens: int) -> Path:
    """Return the same model for another number of tokens: its own config, links to the rest.

    The weights are random, so that nothing is lost by turning positions further than intended.
    """
    folder = model.with_name(f"{model.name}-{tokens}")
    folder.mkdir(exist_ok=True)
    for path in model.iterdir():
        link = folder / path.name
        if path.name != _MODEL_CONFIG and not link.exists():
            link.symlink_to(path.resolve())
    config = json.loads((model / _MODEL_CONFIG).read_text(encoding="utf-8"))
    _save_json(folder / _MODEL_CONFIG, config | {"max_position_embeddings": tokens})
    return folder


def rank_of(index: int) -> int:
    """Return the rank of an adapter: 8 and 16 in turn."""
    return 8 if index % 2 == 0 else 16


def _weights() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1234)

    def matrix(rows: int, columns: int, scale: float) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * scale

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN, 1.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN, 3.0 * HIDDEN**-0.5),
    }
    weights["lm_head.weight"][: len(_SPECIALS)] = 0
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in LINEARS.items():
            weights[f"{prefix}.{name}.weight"] = matrix(rows, columns, columns**-0.5)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = torch.ones(HIDDEN)
    return weights


def _save_model(
    folder: Path, weights: Mapping[str, Tensor], dtype: torch.dtype, tokenizer: Tokenizer
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: weight.to(dtype) for name, weight in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**_CONFIG, "torch_dtype": str(dtype).removeprefix("torch.")}
    _save_json(folder / _MODEL_CONFIG, config)
    _save_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    bos, eos, pad = _SPECIALS
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    names = {"bos_token": bos, "eos_token": eos, "pad_token": pad, "chat_template": template}
    _save_json(
        folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def save_adapter(folder: Path, rank: int, seed: int) -> None:
    """Write a random adapter that changes all seven linears of every layer."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for layer in range(LAYERS):
        for name, (rows, columns) in LINEARS.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            a = torch.randn(rank, columns, generator=draw) * columns**-0.5
            b = torch.randn(rows, rank, generator=draw) * 0.25 * rank**-0.5
            tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    save_config(folder, rank)


def save_config(folder: Path, rank: int, base: str | None = None) -> None:
    """Write an adapter's config; `base` is the model that some servers want named in it."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(name.partition(".")[2] for name in LINEARS),
        "base_model_name_or_path": base,
    }
    _save_json(folder / CONFIG, config)


def _tokenizer() -> Tokenizer:
    """Train a byte-level BPE on the sources of Python's library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_SPECIALS[0]} $A", special_tokens=[(_SPECIALS[0], 0)]
    )
    return tokenizer


def _corpus() -> Iterator[str]:
    chars = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        chars += len(text)
        yield text
        if chars > _CORPUS_CHARS:
            return


def _save_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.model")
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER)
    folder: Path = parser.parse_args(argv).out
    make(folder)
    print(f"{folder}: f32, bf16 and {ADAPTERS} adapters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
