"""A device that applies LoRA on linears only: whatever is more is refused before it is read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loralane_server.adapters.formats.base_shape import Abilities, BaseShape
from loralane_server.adapters.reading.load_files import LoadFiles
from loralane_server.adapters.reading.reader import Reader
from loralane_server.adapters.sources.files import Reads
from loralane_server.adapters.sources.local_source import LocalPlace, LocalSource
from loralane_server.assembly import base_shape
from loralane_server.device.seam import ENDS
from loralane_server.errors import AdapterIncompatible
from loralane_server.model.base_weights import BaseWeights
from loralane_server.model.spec import read_model_spec

from tests.server.adapters.formats.against_peft import BIASED, save_adapter, saved_model
from tests.server.adapters.samples import index_at

pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
    # PEFT takes the bias of B for a matrix.
    pytest.mark.filterwarnings("ignore:.* have invalid shape"),
]

LINEARS_ONLY = Abilities("xla", vectors=False, ends=False)

BEYOND: dict[str, tuple[dict[str, Any], str, str]] = {
    "dora": (
        {"target_modules": ["q_proj"], "use_dora": True},
        r"magnitudes \(DoRA\) on q_proj",
        "lora_magnitude_vector",
    ),
    "lora-bias": (
        {"target_modules": ["up_proj"], "lora_bias": True},
        "a bias of lora_B .* on up_proj",
        "lora_B.bias",
    ),
    "bias": (
        {"target_modules": ["q_proj"], "bias": "lora_only"},
        "a bias of its own on q_proj",
        "q_proj",
    ),
    "embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, "LoRA on embed_tokens", "embed"),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, "LoRA on lm_head", "lm_head"),
    "tokens": (
        {"target_modules": ["q_proj"], "trainable_token_indices": [7, 3]},
        "trained rows of embed_tokens",
        "trainable_tokens_delta",
    ),
    "table": (
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        "a whole lm_head",
        "lm_head",
    ),
}


def shape_of(folder: Path, abilities: Abilities) -> BaseShape:
    return replace(base_shape(read_model_spec(folder), "float32"), abilities=abilities)


@pytest.mark.parametrize("name", BEYOND)
def test_what_the_device_does_not_apply_is_refused_by_name(tmp_path: Path, name: str) -> None:
    fields, what, tensor = BEYOND[name]
    save_adapter(saved_model(BIASED, tmp_path / "model"), tmp_path / "a", **fields)

    index_at(tmp_path / "a", shape_of(tmp_path / "model", Abilities()))
    with pytest.raises(AdapterIncompatible, match=what) as caught:
        index_at(tmp_path / "a", shape_of(tmp_path / "model", LINEARS_ONLY))

    assert "--device xla does not serve; a shard with --device cpu does" in caught.value.message
    assert any(tensor in named for named in caught.value.tensors)


def test_plain_lora_is_served(tmp_path: Path) -> None:
    model = saved_model(BIASED, tmp_path / "model")
    save_adapter(model, tmp_path / "a", target_modules=["q_proj", "down_proj"], use_rslora=True)

    index = index_at(tmp_path / "a", shape_of(tmp_path / "model", LINEARS_ONLY))

    assert index.is_plain


def test_tables_beside_lora_are_served_only_if_they_are_copies_of_the_bases(
    tmp_path: Path,
) -> None:
    model = saved_model(BIASED, tmp_path / "model")
    save_adapter(model, tmp_path / "a", target_modules=["q_proj"], saves_tables=True)
    base = shape_of(tmp_path / "model", LINEARS_ONLY)
    index = index_at(tmp_path / "a", base)
    located = LocalSource(Reads()).locate("a", LocalPlace(tmp_path / "a"))
    weights = BaseWeights(tmp_path / "model", read_model_spec(tmp_path / "model"), torch.float32)

    def ends(own: BaseWeights | None) -> object:
        reader = Reader(torch.float32, Reads(), own, LINEARS_ONLY)
        return reader.read_layer(index, LoadFiles(located.open_file), ENDS).tables

    assert ends(weights) == {}
    with pytest.raises(AdapterIncompatible, match=r"its own embed_tokens and lm_head.*xla"):
        ends(None)
