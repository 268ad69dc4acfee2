"""Phi-3: the weights of q, k, v and of gate, up are stored fused; the maths is Llama's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from loralane_server.config import ShardConfig
from loralane_server.errors import ModelUnsupported
from loralane_server.model.spec import model_spec
from loralane_server.rows import Admission

from tests import reference
from tests.server.conftest import running

TOKENS = 48


def config(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = reference.PHI3.to_dict()
    return values | {"architectures": ["Phi3ForCausalLM"]} | changes


def test_base_tokens_equal_transformers(tmp_path: Path) -> None:
    model = reference.random_model(reference.PHI3)
    reference.save_model(model, tmp_path)
    make = torch.Generator().manual_seed(1)
    prompts: list[list[int]] = torch.randint(0, 256, (4, 23), generator=make).tolist()
    expected = reference.greedy(model, None, prompts, TOKENS)
    assert all(len(set(tokens)) > 8 for tokens in expected)

    with running(ShardConfig(model=str(tmp_path), dtype="float32", step_tokens=32)) as listener:
        admissions = [Admission(i, "", tuple(p), TOKENS) for i, p in enumerate(prompts)]
        produced = listener.generate(*admissions)

    assert produced == expected


def test_what_transformers_writes_is_understood() -> None:
    spec = model_spec(config())

    assert spec.fused
    assert spec.max_positions == 192  # up to the window, full attention is exact
    assert not any((spec.qkv_bias, spec.o_bias, spec.mlp_bias))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"rope_scaling": {"type": "su"}, "rope_parameters": None}, "su"),
        ({"partial_rotary_factor": 0.75}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
    ],
)
def test_rotary_rules_that_are_not_implemented_are_refused_by_name(
    change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelUnsupported, match=named):
        model_spec(config(**change))
