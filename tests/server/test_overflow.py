"""An adapter whose numbers overflow harms nobody: rows beside it and after it stay exact."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
from loralane_server.config import ShardConfig
from loralane_server.device.seam import Sampling
from loralane_server.rows import Admission

from tests import reference
from tests.server.conftest import digest_of, running

TOKENS = 24
ROWS = 4
#: Finite in the file and once scaled; what a row computes with them is not.
HUGE = (
    reference.AdapterRecipe("huge-q", 8, 1e35, ("q_proj",)),
    reference.AdapterRecipe("huge-v", 8, 1e35, ("v_proj",)),
    reference.AdapterRecipe("huge-all", 8, 1e30),
)
GOOD = (
    reference.AdapterRecipe("good", 8, 16),
    reference.AdapterRecipe("qv", 4, 8, ("q_proj", "v_proj")),
)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=4)])
def test_rows_beside_and_after_an_adapter_that_overflows_are_exact(
    tmp_path: Path, sampling: Sampling
) -> None:
    """However the rows of that adapter are sampled: theirs may be any tokens."""
    model: Any = reference.random_model(reference.FAMILIES["llama"])
    reference.save_model(model, tmp_path / "model")
    root = tmp_path / "adapters"
    for seed, recipe in enumerate((*GOOD, *HUGE)):
        reference.save_adapter(model, recipe, root / recipe.name, seed)
    prompts = [[5, 99, 7, 180, 33, 61], [250, 17, 99, 2, 3, 140, 77, 12, 8, 41, 66, 90, 7, 4]]
    names = ["", *(recipe.name for recipe in GOOD)]
    expected = {
        (name, at): reference.greedy(model, root / name if name else None, [prompt], TOKENS)[0]
        for name in names
        for at, prompt in enumerate(prompts)
    }
    cases = list(expected) * 4 + [(recipe.name, at) for recipe in HUGE for at in (0, 1)] * 3
    random.Random(1).shuffle(cases)
    config = ShardConfig(
        model=str(tmp_path / "model"),
        adapter_roots=(root,),
        dtype="float32",
        max_rows=ROWS,
        # Few pages, so that each is soon another row's.
        kv_memory=ROWS * 4 * 16 * 3 * 2 * 2 * 16 * 4,
        max_model_len=64,
    )

    wrong = []
    with running(config) as listener:
        digests = {name: digest_of(listener.shard, name) for name, _ in cases if name} | {"": ""}
        for begin in range(0, len(cases), ROWS):
            batch = cases[begin : begin + ROWS]
            rows = [
                Admission(
                    begin + i,
                    digests[name],
                    tuple(prompts[at]),
                    TOKENS,
                    sampling=Sampling() if (name, at) in expected else sampling,
                    logprobs=2,
                )
                for i, (name, at) in enumerate(batch)
            ]
            for case, tokens in zip(batch, listener.generate(*rows), strict=True):
                if len(tokens) < TOKENS or tokens != expected.get(case, tokens):
                    wrong.append(case)
        found = [token for row in listener.rows.values() for event in row for token in event.tokens]

    assert wrong == []
    assert all(
        math.isfinite(p) for token in found for p in (token.logprob, *dict(token.top).values())
    )
