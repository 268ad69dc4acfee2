"""One model over several virtual devices: the tokens of transformers + PEFT, nothing compiled."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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

CASES = (("llama", 2), ("llama", 4), ("llama-o-bias", 2), ("qwen2", 4))


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


@dataclass(frozen=True)
class Run:
    """A shard in a process of its own, and the tokens that the reference gives."""

    expected: list[list[int]]
    process: subprocess.Popen[str]


def begin(name: str, devices: int, folder: Path) -> Run:
    expected = prepare(CONFIGS[name], folder)
    command = [sys.executable, "-m", "tests.xla.parallel_shard", str(devices), str(folder)]
    pipe = subprocess.PIPE
    return Run(expected, subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[tuple[str, int], Run]]:
    """All of them side by side: they mostly start and compile, which takes one core."""
    runs: dict[tuple[str, int], Run] = {}
    try:
        for name, devices in CASES:
            runs[name, devices] = begin(name, devices, tmp_path_factory.mktemp(name))
        yield runs
    finally:
        for run in runs.values():
            run.process.kill()
            run.process.communicate()


@pytest.mark.parametrize(("name", "devices"), CASES)
def test_tokens_equal_the_reference_on_several_devices(
    name: str, devices: int, runs: Mapping[tuple[str, int], Run]
) -> None:
    run = runs[name, devices]

    out, err = run.process.communicate()

    assert run.process.returncode == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found == {"tokens": run.expected, "compiled": 0, "fetched": ["{replicated}"]}


def test_a_model_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    reference.save_model(reference.random_model(CONFIGS["llama"]), tmp_path)
    spec = read_model_spec(tmp_path)
    config = ShardConfig(model=str(tmp_path), device="xla", tensor_parallel=3)
    plan = Plan(tmp_path, spec, torch.float32, max_len=64, pages=8, config=config)

    with pytest.raises(ModelUnsupported, match=r"--tensor-parallel 3: .*8, cannot be divided"):
        open_backend(plan)
