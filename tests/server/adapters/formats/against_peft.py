"""PEFT's own answer for an adapter on disk, and that of the tensors which the reader hands out.

The second is computed here, plainly and in float32, by what `TargetTensors` and `TableRows` mean.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from loralane_server.adapters.formats.base_shape import module_name
from loralane_server.adapters.reading.load_files import LoadFiles
from loralane_server.adapters.reading.reader import LayerTensors, Reader
from loralane_server.adapters.sources.files import Reads
from loralane_server.adapters.sources.local_source import LocalPlace, LocalSource
from loralane_server.assembly import base_shape
from loralane_server.device.seam import ENDS, TableRows, TargetTensors
from loralane_server.model.base_weights import BaseWeights
from loralane_server.model.spec import read_model_spec
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

from tests import reference
from tests.server.adapters.samples import index_at

VOCAB = 48
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}
#: Biases on everything that can have one.
BIASED = LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)
PLAIN = LlamaConfig(**SHAPE)
TIED = LlamaConfig(**SHAPE, attention_bias=True, tie_word_embeddings=True)
TOKENS = torch.arange(VOCAB).view(4, -1)


def saved_model(config: PretrainedConfig, folder: Path) -> PreTrainedModel:
    """Return a random model, which is saved too."""
    model = reference.random_model(config)
    model.save_pretrained(folder)
    return model


def save_adapter(
    model: PreTrainedModel, folder: Path, *, saves_tables: bool = False, **fields: Any
) -> None:
    """Train nothing, but change all that PEFT would train, and let PEFT save it.

    `saves_tables`: the embedding and the head, too, as PEFT does after a resize.
    """
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=10, **fields)
    adapted: Any = get_peft_model(copy.deepcopy(model), config)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight), alpha=0.2)
    adapted.save_pretrained(folder, save_embedding_layers=saves_tables or "auto")


def peft_logits(model: PreTrainedModel, folder: Path) -> Tensor:
    """Return what PEFT computes after loading the adapter."""
    adapted: Any = PeftModel.from_pretrained(copy.deepcopy(model), folder)
    with torch.no_grad():
        logits: Tensor = adapted.eval()(TOKENS).logits
    return logits


def read_all(
    model_folder: Path, folder: Path, dtype: torch.dtype = torch.float32
) -> list[LayerTensors]:
    """Return every layer of an adapter, the ends first, for a shard of that model."""
    spec = read_model_spec(model_folder)
    base = base_shape(spec, str(dtype).removeprefix("torch."))
    located = LocalSource(Reads()).locate("a", LocalPlace(folder))
    index = index_at(folder, base)
    reader = Reader(dtype, Reads(), BaseWeights(model_folder, spec, dtype))
    layers = (ENDS, *range(base.layers))
    files = LoadFiles(located.open_file)
    return [reader.read_layer(index, files, layer) for layer in layers]


def served_logits(model: PreTrainedModel, layers: Sequence[LayerTensors]) -> Tensor:
    """Return what the tensors make of the model."""
    adapted = copy.deepcopy(model)
    if model.config.tie_word_embeddings:  # one table in memory, but two ends
        adapted.lm_head.weight = nn.Parameter(adapted.lm_head.weight.detach().clone())
    for layer in layers:
        for module, target in layer.targets.items():
            _replace(adapted, module_name(layer.layer, module), Adapted, target)
        for module, table in layer.tables.items():
            _replace(adapted, module_name(ENDS, module), Replaced, table)
    with torch.no_grad():
        logits: Tensor = adapted(TOKENS).logits
    return logits


def _replace(model: nn.Module, name: str, wrapper: Any, change: object) -> None:
    model.set_submodule(name, wrapper(model.get_submodule(name), change))


class Adapted(nn.Module):
    """y = (1 + gain) (W x + bias) + B^T A x + shift."""

    def __init__(self, base: nn.Module, target: TargetTensors) -> None:
        super().__init__()
        self.base = base
        self.target = target

    def forward(self, x: Tensor) -> Tensor:
        target = self.target
        is_table = isinstance(self.base, nn.Embedding)
        shrunk = target.a.T[x] if is_table else x @ target.a.T
        y: Tensor = self.base(x)
        if target.gain is not None:
            y = y * (1 + target.gain)
        if target.shift is not None:
            y = y + target.shift
        return y + shrunk @ target.b


class Replaced(nn.Module):
    """A table some of whose rows are others."""

    def __init__(self, base: nn.Module, table: TableRows) -> None:
        super().__init__()
        self.base = base
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight
        assert isinstance(weight, Tensor)
        ids = torch.arange(len(weight)) if self.table.ids is None else self.table.ids
        rows = weight.index_copy(0, ids, self.table.rows)
        return rows[x] if isinstance(self.base, nn.Embedding) else x @ rows.T
