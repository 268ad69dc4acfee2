"""Greedy tokens of adapters beyond plain LoRA equal transformers + PEFT, whoever is beside them."""

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from loralane_server.config import ShardConfig
from loralane_server.rows import Admission
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, PretrainedConfig

from tests import reference
from tests.server.conftest import digest_of, running

pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'.*invalid shape:Warning"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed:Warning"),
    pytest.mark.filterwarnings("ignore:You have requested `ensure_weight_tying`:UserWarning"),
]

TOKENS = 16
ROWS = 8
#: What any eight need, fewer than all need together: they take each other's lanes.
LANES = 88
PROMPTS = ((5, 99, 7, 180, 33, 5, 61), (250, 17, 99, 2, 3, 5, 140, 77, 12))
#: They occur in the prompts.
SOME_TOKENS = [5, 99, 250, 17, 200]

Fields = Mapping[str, Any]


def zoo(q: str, gate: str) -> dict[str, Fields]:
    """LoraConfig fields of adapters of every kind; q, gate: two linears of the base."""
    some = [q, "down_proj"]
    return {
        "plain": {"target_modules": some, "r": 12},
        "lora_bias": {"target_modules": [q, gate, "o_proj"], "lora_bias": True},
        "dora": {"target_modules": [q, gate, "down_proj"], "use_dora": True},
        "dora-all": {"target_modules": "all-linear", "use_dora": True, "use_rslora": True, "r": 16},
        "embedding": {"target_modules": [q, "embed_tokens"]},
        "head": {"target_modules": ["lm_head"], "lora_bias": True},
        "both-ends": {"target_modules": ["embed_tokens", "lm_head", gate], "r": 9},
        "save-head": {"target_modules": some, "modules_to_save": ["lm_head"]},
        "save-both": {"target_modules": some, "modules_to_save": ["embed_tokens", "lm_head"]},
        "tokens": {"target_modules": some, "trainable_token_indices": SOME_TOKENS},
        "tokens-dora": {
            "target_modules": [q],
            "use_dora": True,
            "trainable_token_indices": {"lm_head": SOME_TOKENS},
        },
    }


@dataclass(frozen=True)
class Family:
    """A base and the adapters to serve on it."""

    config: PretrainedConfig
    adapters: Mapping[str, Fields]


_SPLIT = zoo("q_proj", "gate_proj")
FAMILIES = {
    "llama": Family(reference.FAMILIES["llama"], _SPLIT),
    "qwen2": Family(
        reference.FAMILIES["qwen2"],
        _SPLIT | {"bias-all": {"target_modules": ["k_proj", "v_proj"], "bias": "all"}},
    ),
    "qwen3-tied": Family(
        reference.FAMILIES["qwen3"],
        _SPLIT
        | {
            "tied-tokens": {
                "target_modules": ["v_proj"],
                "trainable_token_indices": SOME_TOKENS,
                "ensure_weight_tying": True,
            }
        },
    ),
    "phi3": Family(reference.PHI3, zoo("qkv_proj", "gate_up_proj")),
}


def save_adapter(model: Any, fields: Fields, folder: Path, seed: int) -> None:
    """Let PEFT make and save an adapter, all that it would train changed at random."""
    config = LoraConfig(**({"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 10} | dict(fields)))
    adapted: Any = get_peft_model(copy.deepcopy(model), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.15)
                if weight.shape[0] == reference.VOCAB:
                    weight[reference.BOS :] = 0  # specials stay the least probable
    adapted.save_pretrained(folder)


def serve(
    folder: Path, adapters: list[str], expected: Mapping[tuple[str, int], list[int]]
) -> set[tuple[str, int]]:
    """Serve every adapter and the base on every prompt, mixed; return who was wrong."""
    config = ShardConfig(
        model=str(folder / "model"),
        adapter_roots=(folder / "adapters",),
        dtype="float32",
        max_rows=ROWS,
        lanes=LANES,
        step_tokens=32,
    )
    order = list(expected)
    random.Random(3).shuffle(order)
    wrong = set()
    with running(config) as listener:
        digests = {name: digest_of(listener.shard, name) for name in adapters} | {"": ""}
        numbered = iter(enumerate(order * 2))  # each at least twice, among other neighbours
        while batch := list(islice(numbered, ROWS)):
            admissions = [
                Admission(i, digests[name], PROMPTS[prompt], TOKENS) for i, (name, prompt) in batch
            ]
            for (_, case), tokens in zip(batch, listener.generate(*admissions), strict=True):
                if tokens != expected[case]:
                    wrong.add(case)
    return wrong


def answers(model: Any, folder: Path | None) -> list[list[int]]:
    """Return the reference's tokens for each prompt."""
    model = copy.deepcopy(model)  # PEFT leaves traces: biases, tables, ties
    return [reference.greedy(model, folder, [prompt], TOKENS)[0] for prompt in PROMPTS]


def check_reference(expected: Mapping[tuple[str, int], list[int]]) -> None:
    """A reference of repeated tokens, or of adapters that change nothing, would prove nothing."""
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
    assert sum(len(set(tokens)) for tokens in expected.values()) > 4 * len(expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_those_of_peft(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model = reference.random_model(family.config)
    reference.save_model(model, tmp_path / "model")
    expected = {("", i): tokens for i, tokens in enumerate(answers(model, None))}
    for seed, (adapter, fields) in enumerate(family.adapters.items()):
        folder = tmp_path / "adapters" / adapter
        save_adapter(model, fields, folder, seed)
        found = answers(model, folder)
        expected |= {(adapter, i): tokens for i, tokens in enumerate(found)}
    check_reference(expected)

    wrong = serve(tmp_path, list(family.adapters), expected)

    assert wrong == set()


def twin_of_phi3(model: Any) -> Any:
    """The same function as a Llama, whose linears are split."""
    config = model.config
    twin: Any = reference.random_model(
        LlamaConfig(
            **{
                name: getattr(config, name)
                for name in (
                    "hidden_size intermediate_size num_hidden_layers num_attention_heads "
                    "num_key_value_heads vocab_size max_position_embeddings rms_norm_eps "
                    "rope_parameters tie_word_embeddings bos_token_id eos_token_id pad_token_id"
                ).split()
            }
        )
    )
    weights = dict(model.state_dict())
    head_dim = config.hidden_size // config.num_attention_heads
    sizes = {
        "qkv_proj": {
            "q_proj": config.num_attention_heads * head_dim,
            "k_proj": config.num_key_value_heads * head_dim,
            "v_proj": config.num_key_value_heads * head_dim,
        },
        "gate_up_proj": {
            "gate_proj": config.intermediate_size,
            "up_proj": config.intermediate_size,
        },
    }
    for name in list(weights):
        for fused, parts in sizes.items():
            if f".{fused}." in name:
                pieces = weights.pop(name).split(list(parts.values()))
                for part, piece in zip(parts, pieces, strict=True):
                    weights[name.replace(fused, part)] = piece
    twin.load_state_dict(weights)
    return twin


@pytest.mark.parametrize("served", ["fused", "split"])
def test_adapters_for_split_linears_serve_a_fused_base_and_the_reverse(
    served: str, tmp_path: Path
) -> None:
    fused: Any = reference.random_model(reference.PHI3)
    split = twin_of_phi3(fused)
    reference.save_model(fused if served == "fused" else split, tmp_path / "model")
    trained = split if served == "fused" else fused
    names = ("q_proj", "gate_proj") if served == "fused" else ("qkv_proj", "gate_up_proj")
    adapters = {kind: zoo(*names)[kind] for kind in ("plain", "dora", "lora_bias")}
    expected = {("", i): tokens for i, tokens in enumerate(answers(trained, None))}
    for seed, (adapter, fields) in enumerate(adapters.items()):
        folder = tmp_path / "adapters" / adapter
        save_adapter(trained, fields, folder, seed)
        expected |= {(adapter, i): tokens for i, tokens in enumerate(answers(trained, folder))}
    check_reference(expected)

    wrong = serve(tmp_path, list(adapters), expected)

    assert wrong == set()
