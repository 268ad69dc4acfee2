"""The tiny base models of case files: one token a byte, random weights that do not degenerate."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tests.cases.tensors import SHAPES, Array, NotUnderstood, Tensors, safetensors, stored

BOS, EOS, PAD, UNK = 256, 257, 258, 259
VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 260, 64, 2, 4, 2, 16
THETA, EPS = 10000.0, 1e-5
_SPECIALS: Final = ("<bos>", "<eos>", "<pad>", "<unk>")
_TEMPLATE: Final = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@dataclass(frozen=True)
class Base:
    """Which base a case asks for; equal ones are the same files."""

    dtype: str = "float32"
    tied: bool = False
    template: str | None = _TEMPLATE
    positions: int = 128
    architecture: str = "LlamaForCausalLM"
    #: JSON of what generation_config.json adds.
    generation: str = "{}"
    #: What greedy decoding must say after any of these prompts (ids); empty = random weights.
    script: tuple[int, ...] = ()
    prompts: tuple[tuple[int, ...], ...] = ()


def read_base(setup: Mapping[str, Any]) -> Base:
    """Turn the setup's base and what changes it into a Base without a script."""
    name = setup.get("base", "tiny-llama")
    family, *words = re.split(r"[-\s()]+", name.removeprefix("tiny-"))
    if family == "gpt2":
        return Base(architecture="GPT2LMHeadModel")
    text = " ".join(words)
    if not name.startswith("tiny-llama") or text not in (
        "", "bf16", "tied", "without chat_template"
    ):  # fmt: skip
        raise NotUnderstood(f"base {name!r}")
    template = None if text == "without chat_template" else setup.get("chat_template", _TEMPLATE)
    return Base(
        dtype="bfloat16" if text == "bf16" else "float32",
        tied=text == "tied",
        template=template,
        positions=setup.get("max_positions", 128),
        generation=json.dumps(setup.get("generation_config", {}), sort_keys=True),
    )


def random_weights(base: Base, seed: int = 5) -> dict[str, Array]:
    """Return weights under Hugging Face's names, rounded to the base's dtype."""
    random = np.random.default_rng(seed)
    embedding = 0.1 if base.tied else 1.0  # a large tied head would repeat its input
    weights = {"model.embed_tokens.weight": random.normal(0, embedding, (VOCAB, HIDDEN))}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for module, (rows, columns) in SHAPES.items():
            block = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            weights[f"{prefix}.{block}.{module}.weight"] = random.normal(
                0, columns**-0.5, (rows, columns)
            )
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = random.normal(1, 0.1, HIDDEN)
    weights["model.norm.weight"] = random.normal(1, 0.1, HIDDEN)
    if not base.tied:
        # The bound of case files is absolute: at logits of deviation 3, bfloat16 without any
        # adapter is off by 0.07 already, in transformers too.
        spread = 1 if base.dtype == "bfloat16" else 3
        head = random.normal(0, spread * HIDDEN**-0.5, (VOCAB, HIDDEN))
        head[BOS:] = 0  # specials are never the most probable: no early end
        weights["lm_head.weight"] = head
    return {name: stored(values, _DTYPES[base.dtype]).values for name, values in weights.items()}


_DTYPES: Final = {"float32": "F32", "bfloat16": "BF16"}


def write_base(base: Base, weights: Mapping[str, Array], folder: Path) -> None:
    """Write a model folder in Hugging Face format."""
    folder.mkdir(parents=True)
    tensors: Tensors = {name: stored(w, _DTYPES[base.dtype]) for name, w in weights.items()}
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, **json.loads(base.generation)}
    _write_json(folder / "config.json", _config(base))
    _write_json(folder / "generation_config.json", generation)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    names = dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), _SPECIALS, strict=True))
    template = {} if base.template is None else {"chat_template": base.template}
    _write_json(folder / "tokenizer_config.json", names | template)


def _config(base: Base) -> dict[str, object]:
    return {
        "architectures": [base.architecture],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": SHAPES["up_proj"][0],
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": base.positions,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": base.tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": base.dtype,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose token of a byte is that byte, and which puts BOS first."""
    vocabulary = {sign: byte for byte, sign in enumerate(_byte_signs())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    return tokenizer


def _byte_signs() -> list[str]:
    """The sign that stands for each byte in byte-level BPE: itself where it can be printed."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]
