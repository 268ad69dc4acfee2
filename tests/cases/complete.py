"""Everything that an adapter's files say, applied to the tiny base: LoRA wherever it is, DoRA,
biases, replaced tables, rows and norms. A tensor that is none of these is not understood.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from tests.cases.materialise import Adapter
from tests.cases.oracle import full_name, parts, scale_of
from tests.cases.tensors import Array, NotUnderstood

Weights = dict[str, Array]

#: Of a module: [base_model.model.][model.]layers.N.block.module, or embed_tokens, lm_head.
_LINEAR: Final = r"(?:base_model\.model\.)?(?:model\.)?layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)"
_TABLE: Final = r"(?:base_model\.model\.)?(?:model\.)?(embed_tokens|lm_head)"
_HALF: Final = r"\.lora_(?:embedding_)?([AB])(?:\.weight)?"
_TABLES: Final = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}


def complete(weights: Mapping[str, Array], adapter: Adapter) -> Weights:
    """Return all weights, biases included, as the adapter makes them. Raises NotUnderstood."""
    done = dict(weights)
    found = {
        re.sub(r"\.default(?=\.|$)", "", name): t.values for name, t in adapter.tensors.items()
    }
    left = set(found)
    for pattern, apply in _FORMS:
        matches = {name: re.fullmatch(pattern, name) for name in sorted(left)}
        for name, match in matches.items():
            if match is not None:
                apply(done, adapter, found, match)
                left.discard(name)
    if left:
        raise NotUnderstood(f"tensor {min(left)!r} as a part of the whole adapter")
    return done


Form = Callable[[Weights, Adapter, Mapping[str, Array], re.Match[str]], None]


def _linear(done: Weights, adapter: Adapter, found: Mapping[str, Array], m: re.Match[str]) -> None:
    """W + s B A; with a magnitude its rows scaled to that length."""
    if m[3] == "B":
        return
    full = full_name(int(m[1]), m[2])
    prefix = m[0].removesuffix(".lora_A.weight")
    delta = scale_of(adapter.config, full) * (found[f"{prefix}.lora_B.weight"] @ found[m[0]])
    magnitude = found.get(f"{prefix}.lora_magnitude_vector")
    if magnitude is None:
        magnitude = found.get(f"{prefix}.lora_magnitude_vector.weight")
    for module, rows in parts(m[2], delta):
        name = f"{full_name(int(m[1]), module)}.weight"
        merged = done[name] + rows
        if magnitude is not None:
            norm = np.linalg.norm(merged, axis=1, keepdims=True)
            merged = magnitude.reshape(-1, 1) / norm * merged
        done[name] = merged


def _lora_bias(
    done: Weights, adapter: Adapter, found: Mapping[str, Array], m: re.Match[str]
) -> None:
    full = full_name(int(m[1]), m[2])
    shift = scale_of(adapter.config, full) * found[m[0]]
    done[f"{full}.bias"] = done.get(f"{full}.bias", np.zeros_like(shift)) + shift


def _bias(done: Weights, adapter: Adapter, found: Mapping[str, Array], m: re.Match[str]) -> None:
    done[f"{full_name(int(m[1]), m[2])}.bias"] = found[m[0]]


def _table_lora(
    done: Weights, adapter: Adapter, found: Mapping[str, Array], m: re.Match[str]
) -> None:
    if m[2] == "B":
        return
    b = found[re.sub(r"(lora_(?:embedding_)?)A", r"\1B", m[0])]
    delta = scale_of(adapter.config, _TABLES[m[1]]) * (b @ found[m[0]])
    name = f"{_TABLES[m[1]]}.weight"
    done[name] = done[name] + (delta.T if m[1] == "embed_tokens" else delta)


def _table(done: Weights, adapter: Adapter, found: Mapping[str, Array], m: re.Match[str]) -> None:
    name = f"{_TABLES[m[1]]}.weight"
    if found[m[0]].shape != done[name].shape:
        raise NotUnderstood(f"{m[0]} of shape {found[m[0]].shape}")
    done[name] = found[m[0]]


def _rows(done: Weights, adapter: Adapter, found: Mapping[str, Array], m: re.Match[str]) -> None:
    """Trained rows of the embedding; a tied head has them, too."""
    listed = adapter.config["trainable_token_indices"]
    ids = listed[m[1]] if isinstance(listed, dict) else listed
    tied = done["lm_head.weight"] is done["model.embed_tokens.weight"]
    table = done["model.embed_tokens.weight"].copy()
    table[ids] = found[m[0]]
    done["model.embed_tokens.weight"] = table
    if tied:
        done["lm_head.weight"] = table


def _norm(done: Weights, adapter: Adapter, found: Mapping[str, Array], m: re.Match[str]) -> None:
    done[m[1]] = found[m[0]]


def _used(done: Weights, adapter: Adapter, found: Mapping[str, Array], m: re.Match[str]) -> None:
    """A magnitude is used where its linear is."""


#: (name, what it does), in the order in which they are applied.
_FORMS: Final[tuple[tuple[str, Form], ...]] = (
    (rf"{_TABLE}\.token_adapter\.trainable_tokens_delta", _rows),
    (rf"{_TABLE}\.weight", _table),
    (rf"{_TABLE}{_HALF}", _table_lora),
    (rf"{_LINEAR}(?:\.base_layer)?\.bias", _bias),
    (rf"{_LINEAR}{_HALF}", _linear),
    (rf"{_LINEAR}\.lora_B\.bias", _lora_bias),
    (rf"{_LINEAR}\.lora_magnitude_vector(?:\.weight)?", _used),
    (r"(?:base_model\.model\.)?(model\.(?:layers\.\d+\.\w+_layernorm|norm)\.weight)", _norm),
)
