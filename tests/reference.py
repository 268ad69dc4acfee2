"""The reference that exactness is measured against: transformers and PEFT, and models made for it.

Models are tiny and random, drawn so that greedy decoding is not degenerate: logits spread, no EOS.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

#: 256 bytes, then bos, eos, pad, unk: every byte is one token.
BOS, EOS, PAD, UNK = 256, 257, 258, 259
VOCAB = 260
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_SHAPE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

#: One configuration of each family, with the switches that tell them apart.
FAMILIES: Mapping[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3, tie_word_embeddings=False),
    "mistral": MistralConfig(**_SHAPE, head_dim=32, sliding_window=None),
    "qwen2": Qwen2Config(**_SHAPE, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=True),
}
#: Its linears have other names (`qkv_proj`, `gate_up_proj`), so recipes do not fit it.
PHI3 = Phi3Config(
    **_SHAPE, original_max_position_embeddings=256, sliding_window=192, tie_word_embeddings=False
)


@dataclass(frozen=True, slots=True)
class AdapterRecipe:
    """What a random adapter looks like."""

    name: str
    rank: int
    alpha: float
    modules: tuple[str, ...] = LINEARS
    rslora: bool = False
    layers: tuple[int, ...] | None = None
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, int], ...] = ()


#: Sixteen adapters: ranks 1 to 64, many target sets, both scalings, patterns, a subset of layers.
SIXTEEN = (
    AdapterRecipe("r1", 1, 2),
    AdapterRecipe("r2-qv", 2, 4, ("q_proj", "v_proj")),
    AdapterRecipe("r3", 3, 4),
    AdapterRecipe("r4-mlp", 4, 8, ("gate_proj", "up_proj", "down_proj")),
    AdapterRecipe("r5", 5, 10),
    AdapterRecipe("r8", 8, 16),
    AdapterRecipe("r8-rs", 8, 4, rslora=True),
    AdapterRecipe("r9-o", 9, 18, ("o_proj", "down_proj")),
    AdapterRecipe("r12", 12, 24),
    AdapterRecipe("r16", 16, 32),
    AdapterRecipe("r16-last", 16, 32, layers=(2,)),
    AdapterRecipe("r16-pattern", 16, 32, rank_pattern=(("q_proj", 3), ("down_proj", 24))),
    AdapterRecipe("r24", 24, 24, alpha_pattern=(("k_proj", 6), ("up_proj", 48))),
    AdapterRecipe("r32-k", 32, 64, ("k_proj",)),
    AdapterRecipe("r48", 48, 48),
    AdapterRecipe("r64", 64, 64),
)


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a random float32 model whose norms and biases are not trivial."""
    torch.manual_seed(seed)
    # A tied head with large embeddings would only repeat the token that it was given.
    embedding = 0.1 if config.tie_word_embeddings else 1.0
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0, embedding if "embed" in name else weight.shape[1] ** -0.5)
            elif "bias" in name:
                weight.normal_(0, 0.5)
            else:
                weight.normal_(1, 0.1)
        head = model.get_output_embeddings().weight
        if not config.tie_word_embeddings:
            head.normal_(0, 3 * head.shape[1] ** -0.5)
        head[BOS:] = 0  # specials are never the most probable: no early end
    return model


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Save a model with the byte tokenizer beside it, as a Hugging Face folder."""
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = PAD
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def save_adapter(model: PreTrainedModel, recipe: AdapterRecipe, folder: Path, seed: int) -> None:
    """Save a random adapter of `recipe` (both A and B non-zero) in PEFT's own format."""
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,  # type: ignore[arg-type]  # fractions work, the hint says int
        target_modules=list(recipe.modules),
        use_rslora=recipe.rslora,
        layers_to_transform=list(recipe.layers) if recipe.layers else None,
        rank_pattern=dict(recipe.rank_pattern),
        alpha_pattern=dict(recipe.alpha_pattern),
        bias="none",
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_A" in name:
                weight.normal_(0, weight.shape[1] ** -0.5)
            elif "lora_embedding_A" in name:
                weight.normal_(0, 1)
            elif "lora_B" in name or "lora_embedding_B" in name:
                weight.normal_(0, 0.5 * weight.shape[1] ** -0.5)
    adapted.save_pretrained(folder)
    adapted.unload()


def greedy(
    model: PreTrainedModel, adapter: Path | None, prompts: Sequence[Sequence[int]], tokens: int
) -> list[list[int]]:
    """Return transformers' (and PEFT's) greedy continuations of prompts of equal length."""
    adapted = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    try:
        return continued(adapted, prompts, tokens)
    finally:
        if isinstance(adapted, PeftModel):
            adapted.unload()


def continued(
    model: PreTrainedModel | PeftModel, prompts: Sequence[Sequence[int]], tokens: int
) -> list[list[int]]:
    """Return a model's greedy continuations of prompts of equal length."""
    ids = torch.tensor(prompts)
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
    )
    return [row[ids.shape[1] :].tolist() for row in out]


@contextmanager
def together(
    model: PreTrainedModel, adapters: Sequence[Path], weights: Sequence[float], **options: Any
) -> Iterator[PeftModel]:
    """PEFT's `add_weighted_adapter` of these, named "0", "1", ...; the result is "merged"."""
    names = [str(number) for number in range(len(adapters))]
    adapted = PeftModel.from_pretrained(model, adapters[0], adapter_name=names[0])
    for name, folder in zip(names[1:], adapters[1:], strict=True):
        adapted.load_adapter(folder, adapter_name=name)
    try:
        adapted.add_weighted_adapter(names, list(weights), "merged", **options)
        adapted.set_adapter("merged")
        yield adapted
    finally:
        adapted.unload()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a byte, so that nothing about texts needs a search."""
    alphabet = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<bos>", "<eos>", "<pad>", "<unk>"]
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=(
            "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}[assistant] {% endif %}"
        ),
    )
