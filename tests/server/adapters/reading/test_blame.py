"""What is not finite is named by the tensor that holds it, not by what it is folded into."""

from pathlib import Path

import pytest
import torch
from loralane_server.errors import AdapterCorrupt
from safetensors.torch import load_file, save_file

from tests.server.adapters.formats.against_peft import PLAIN, read_all, save_adapter, saved_model


@pytest.mark.parametrize(
    ("stored", "blamed"),
    [
        ("lora_magnitude_vector", "q_proj: its magnitudes"),
        ("lora_A.weight", "q_proj.lora_A"),
        ("lora_B.weight", "q_proj.lora_B"),
    ],
)
def test_a_nan_of_dora_is_found_where_it_is(stored: str, blamed: str, tmp_path: Path) -> None:
    model = saved_model(PLAIN, tmp_path / "model")
    save_adapter(model, tmp_path / "a", target_modules=["q_proj"], use_dora=True)
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"base_model.model.model.layers.1.self_attn.q_proj.{stored}"].view(-1)[5] = torch.nan
    save_file(tensors, file)

    with pytest.raises(AdapterCorrupt, match=f"layers.1.self_attn.{blamed}' is not finite"):
        read_all(tmp_path / "model", tmp_path / "a")
