"""One model over several virtual devices: the tokens of transformers + PEFT, nothing compiled."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loralane_server.backends import Plan, open_backend
from loralane_server.config import ShardConfig
from loralane_server.errors import ModelUnsupported
from loralane_server.model.spec import read_model_spec
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from tests import reference
from tests.xla.parallel_shard import TOKENS

_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": reference.BOS,
    "eos_token_id": reference.EOS,
    "pad_token_id": reference.PAD,
}
#: A bias that is cut; a tied head; a vocabulary that can be divided, and one that cannot.
CONFIGS = {
    "llama": LlamaConfig(**_SHAPE, vocab_size=reference.VOCAB, tie_word_embeddings=False),
    "llama-o-bias": LlamaConfig(
        **_SHAPE, vocab_size=reference.VOCAB + 1, attention_bias=True, tie_word_embeddings=True
    ),
    "qwen2": Qwen2Config(**_SHAPE, vocab_size=reference.VOCAB, tie_word_embeddings=True),
}


def prepare(config: PretrainedConfig, folder: Path) -> list[list[int]]:
    """Save a model, adapters and prompts; return the reference's tokens."""
    model = reference.random_model(config)
    reference.save_model(model, folder / "model")
    rng = random.Random(3)
    prompts, expected = [], []
    for seed, recipe in enumerate((None, *reference.SIXTEEN)):
        path = None
        if recipe is not None:
            path = folder / "adapters" / recipe.name
            reference.save_adapter(model, recipe, path, seed=seed)
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 70))]
        prompts.append([recipe.name if recipe else "", prompt])
        expected += reference.greedy(model, path, [prompt], TOKENS)
    (folder / "prompts.json").write_text(json.dumps(prompts))
    return expected


@pytest.mark.parametrize(
    ("name", "devices"), [("llama", 2), ("llama", 4), ("llama-o-bias", 2), ("qwen2", 4)]
)
def test_tokens_equal_the_reference_on_several_devices(
    name: str, devices: int, tmp_path: Path
) -> None:
    expected = prepare(CONFIGS[name], tmp_path)

    command = [sys.executable, "-m", "tests.xla.parallel_shard", str(devices), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found == {"tokens": expected, "compiled": 0, "fetched": ["{replicated}"]}


def test_a_model_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    reference.save_model(reference.random_model(CONFIGS["llama"]), tmp_path)
    spec = read_model_spec(tmp_path)
    config = ShardConfig(model=str(tmp_path), device="xla", tensor_parallel=3)
    plan = Plan(tmp_path, spec, torch.float32, max_len=64, pages=8, config=config)

    with pytest.raises(ModelUnsupported, match=r"--tensor-parallel 3: .*8, cannot be divided"):
        open_backend(plan)
