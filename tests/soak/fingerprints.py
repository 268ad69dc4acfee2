"""Adapters that can be told apart by what they say, as an independent reference computes it.

The reference is the numpy oracle of the case runner: the merged model, in float64, without a cache.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from tests.cases import base as tiny
from tests.cases.materialise import WEIGHTS, Adapter, read_adapter
from tests.cases.oracle import Continuation, Oracle
from tests.cases.tensors import Array

PROMPTS: Final = ("once upon a time", "a tale of two", "x")
TOKENS: Final = 8
#: Float32 must choose the same token as float64; its error is some 1e-5 here.
_LEAST_MARGIN: Final = 1e-2
_TEMPLATE: Final = "base_model.model.model.layers.{layer}.{block}.{module}.lora_{ab}.weight"
_SHAPES: Final[Sequence[tuple[int, tuple[str, ...]]]] = (
    (4, ("q_proj", "v_proj")),
    (8, ("q_proj", "k_proj", "v_proj", "o_proj")),
    (1, ("gate_proj", "up_proj", "down_proj")),
    (16, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    (5, ("o_proj", "down_proj")),
)


@dataclass(frozen=True)
class Fingerprint:
    """What one model says after each prompt: token ids, greedily."""

    answers: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Version:
    """One adapter as files, and what it says."""

    config: bytes
    weights: bytes
    fingerprint: Fingerprint


class Reference:
    """Computes fingerprints of one tiny base and of adapters for it, all different."""

    def __init__(self) -> None:
        self.base = tiny.Base()
        self.weights: Mapping[str, Array] = tiny.random_weights(self.base)
        tokenizer = tiny.byte_tokenizer()
        self._prompts = {prompt: tokenizer.encode(prompt).ids for prompt in PROMPTS}
        self._seeds = count()
        base = self._fingerprint(None)
        assert base is not None, "the base's own answers must be clear"
        self.base_fingerprint: Final = base
        self._taken = {tuple(base.answers.values())}

    def versions(self, shape: int) -> Iterator[Version]:
        """Yield adapters of one shape (rank and modules) without end, no two answering alike."""
        rank, modules = _SHAPES[shape % len(_SHAPES)]
        while True:
            adapter = _adapter(rank, modules, next(self._seeds))
            found = self._fingerprint(adapter)
            if found is None or tuple(found.answers.values()) in self._taken:
                continue
            self._taken.add(tuple(found.answers.values()))
            yield Version(adapter.files["adapter_config.json"], adapter.files[WEIGHTS], found)

    def _fingerprint(self, adapter: Adapter | None) -> Fingerprint | None:
        """What the base says, or with an adapter; None where a choice is too close to call."""
        oracle = Oracle(self.weights, tied=self.base.tied, stops=[tiny.EOS])
        answers = {}
        for prompt, ids in self._prompts.items():
            said = _said(oracle, adapter, ids)
            if len(said.ids) < TOKENS or said.margins.min() < _LEAST_MARGIN:
                return None
            answers[prompt] = said.ids
        return Fingerprint(answers)


def _said(oracle: Oracle, adapter: Adapter | None, ids: Sequence[int]) -> Continuation:
    if adapter is None:
        return oracle.base(ids, TOKENS)
    return oracle.merged(adapter, None, ids, TOKENS)


def _adapter(rank: int, modules: Sequence[str], seed: int) -> Adapter:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 8 * rank,
        "target_modules": list(modules),
        "bias": "none",
    }
    macro = {
        "modules": modules,
        "layers": [0, 1],
        "r": rank,
        "seed": seed,
        "dtype": "F32",
        "key_template": _TEMPLATE,
        "std": 0.15,
    }
    return read_adapter({"config": config, "tensors": [{"lora": macro}]})
