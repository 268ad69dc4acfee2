"""Adapters that carry a base's own tables: this base's cost nothing, another's are served."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from loralane_server.adapters.reading.load_files import LoadFiles
from loralane_server.adapters.reading.reader import Reader
from loralane_server.adapters.reading.table_reader import TableFiles
from loralane_server.adapters.sources.files import Reads
from loralane_server.adapters.sources.local_source import LocalPlace, LocalSource
from loralane_server.assembly import base_shape
from loralane_server.device.seam import ENDS, TableRows
from loralane_server.errors import AdapterCorrupt, AdapterIncompatible, AdapterTooLarge
from loralane_server.model.base_weights import BaseWeights
from loralane_server.model.spec import read_model_spec
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, PreTrainedModel

from tests.server.adapters.formats.against_peft import (
    PLAIN,
    TIED,
    VOCAB,
    peft_logits,
    read_all,
    save_adapter,
    saved_model,
    served_logits,
)
from tests.server.adapters.samples import index_at

pytestmark = pytest.mark.filterwarnings(
    "ignore:Setting `save_embedding_layers` to `True`:UserWarning"
)


def retrained(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with other tables."""
    other = copy.deepcopy(model)
    torch.manual_seed(5)
    with torch.no_grad():
        for table in (other.get_input_embeddings(), other.get_output_embeddings()):
            table.weight.add_(torch.randn_like(table.weight), alpha=0.3)
    return other


def edit(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Put tensors into an adapter's file, or take them out; __ stands for a dot."""
    path = folder / "adapter_model.safetensors"
    stored = load_file(path) | {name.replace("__", "."): t for name, t in tensors.items()}
    save_file({name: t for name, t in stored.items() if t is not None}, path)


@pytest.mark.parametrize("config", [PLAIN, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "modules",
    [["embed_tokens"], ["lm_head"], ["q_proj", "embed_tokens", "lm_head"]],
    ids=["embedding", "head", "both"],
)
def test_lora_on_the_table_of_another_base_is_what_peft_makes_of_it(
    modules: list[str], config: PretrainedConfig, tmp_path: Path
) -> None:
    model = saved_model(config, tmp_path / "model")
    save_adapter(retrained(model), tmp_path / "a", target_modules=modules)
    expected = peft_logits(model, tmp_path / "a")

    layers = read_all(tmp_path / "model", tmp_path / "a")

    assert layers[0].tables
    assert layers[0].targets == {}
    torch.testing.assert_close(served_logits(model, layers), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("config", [PLAIN, TIED], ids=["untied", "tied"])
def test_tables_saved_without_being_trained_replace_the_bases_as_in_peft(
    config: PretrainedConfig, tmp_path: Path
) -> None:
    model = saved_model(config, tmp_path / "model")
    adapted: Any = get_peft_model(retrained(model), LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path / "a", save_embedding_layers=True)
    expected = peft_logits(model, tmp_path / "a")

    layers = read_all(tmp_path / "model", tmp_path / "a")

    assert layers[0].tables.keys() == {"embed_tokens", "lm_head"}
    torch.testing.assert_close(served_logits(model, layers), expected, rtol=2e-5, atol=2e-5)


def test_a_copy_that_is_rounded_as_the_shard_rounds_is_the_bases(tmp_path: Path) -> None:
    model = saved_model(PLAIN, tmp_path / "model")
    save_adapter(model, tmp_path / "a", target_modules=["embed_tokens"])
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    rounded = load_file(tmp_path / "a" / "adapter_model.safetensors")[name].to(torch.bfloat16)
    edit(tmp_path / "a", **{name: rounded})

    in_bfloat16 = read_all(tmp_path / "model", tmp_path / "a", torch.bfloat16)[0]
    in_float32 = read_all(tmp_path / "model", tmp_path / "a")[0]

    assert in_bfloat16.tables == {}
    assert in_float32.tables["embed_tokens"].ids is None


def test_trained_tokens_stay_on_top_of_another_bases_table(tmp_path: Path) -> None:
    model = saved_model(PLAIN, tmp_path / "model")
    save_adapter(model, tmp_path / "a", target_modules=["q_proj"], trainable_token_indices=[7, 3])
    table = retrained(model).get_input_embeddings().weight.detach()
    prefix = "base_model.model.model.embed_tokens.token_adapter"
    edit(tmp_path / "a", **{f"{prefix}.base_layer.weight": table})
    delta = load_file(tmp_path / "a" / "adapter_model.safetensors")[
        f"{prefix}.trainable_tokens_delta"
    ]

    replaced = read_all(tmp_path / "model", tmp_path / "a")[0].tables["embed_tokens"]

    expected = table.clone()
    expected[7], expected[3] = delta
    assert replaced.ids is None
    assert torch.equal(replaced.rows, expected)


def test_tied_tables_that_differ_from_each_other_are_refused(tmp_path: Path) -> None:
    model = saved_model(TIED, tmp_path / "model")
    save_adapter(model, tmp_path / "a", target_modules=["embed_tokens", "lm_head"])
    other = retrained(model).get_input_embeddings().weight.detach()
    edit(tmp_path / "a", base_model__model__lm_head__base_layer__weight=other)

    with pytest.raises(AdapterIncompatible, match="one table in this base") as caught:
        read_all(tmp_path / "model", tmp_path / "a")

    assert any("lm_head" in name for name in caught.value.tensors)


def test_dora_on_the_head_of_another_base_is_refused(tmp_path: Path) -> None:
    model = saved_model(PLAIN, tmp_path / "model")
    save_adapter(
        retrained(model), tmp_path / "a", target_modules=["q_proj", "lm_head"], use_dora=True
    )

    with pytest.raises(AdapterIncompatible, match="lm_head has DoRA"):
        read_all(tmp_path / "model", tmp_path / "a")


def test_a_copy_above_the_budget_is_too_large_only_if_it_differs(tmp_path: Path) -> None:
    model = saved_model(PLAIN, tmp_path / "model")
    save_adapter(model, tmp_path / "same", target_modules=["embed_tokens"])
    save_adapter(retrained(model), tmp_path / "other", target_modules=["embed_tokens"])
    spec = read_model_spec(tmp_path / "model")
    weights = BaseWeights(tmp_path / "model", spec, torch.float32)

    def read(name: str) -> dict[str, TableRows]:
        located = LocalSource(Reads()).locate("a", LocalPlace(tmp_path / name))
        files = LoadFiles(located.open_file)
        reading = TableFiles(files, Reads(), torch.float32, weights, budget=VOCAB)
        tables = index_at(tmp_path / name, base_shape(spec, "float32")).tables
        return reading.read(tables, {})[0]

    assert read("same") == {}
    with pytest.raises(AdapterTooLarge, match="embedding and head"):
        read("other")


def test_rows_that_are_not_finite_are_corrupt(tmp_path: Path) -> None:
    model = saved_model(PLAIN, tmp_path / "model")
    save_adapter(model, tmp_path / "a", target_modules=["q_proj"], modules_to_save=["lm_head"])
    broken = torch.zeros(VOCAB, 32)
    broken[3, 4] = torch.inf
    edit(tmp_path / "a", base_model__model__lm_head__weight=broken)

    with pytest.raises(AdapterCorrupt, match=r"lm_head\.weight.*not finite"):
        read_all(tmp_path / "model", tmp_path / "a")


def test_tied_tokens_are_held_once_for_both_ends(tmp_path: Path) -> None:
    model = saved_model(TIED, tmp_path / "model")
    save_adapter(model, tmp_path / "a", target_modules=["q_proj"], trainable_token_indices=[7, 3])

    tables = read_all(tmp_path / "model", tmp_path / "a")[0].tables

    assert tables["lm_head"].rows.data_ptr() == tables["embed_tokens"].rows.data_ptr()
    assert tables["lm_head"].ids is not None
    assert tables["lm_head"].ids.tolist() == [7, 3]


def test_without_the_bases_weights_a_copy_counts_as_another_bases(tmp_path: Path) -> None:
    model = saved_model(PLAIN, tmp_path / "model")
    save_adapter(model, tmp_path / "a", target_modules=["embed_tokens"])
    base = base_shape(read_model_spec(tmp_path / "model"), "float32")
    located = LocalSource(Reads()).locate("a", LocalPlace(tmp_path / "a"))
    index = index_at(tmp_path / "a", base)

    ends = Reader(torch.float32, Reads()).read_layer(index, LoadFiles(located.open_file), ENDS)

    expected = peft_logits(model, tmp_path / "a")
    torch.testing.assert_close(served_logits(model, [ends]), expected, rtol=2e-5, atol=2e-5)
