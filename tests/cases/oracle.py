"""The oracle: the tiny Llama with W' = W + s*B@A, in numpy, without a cache and without the server.

Float64 on float32 weights: its own error is far below every tolerance of a case file.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from tests.cases import base as tiny
from tests.cases.materialise import Adapter
from tests.cases.tensors import MLP, SHAPES, Array, NotUnderstood

#: module suffix or full name -> scale; or one scale for all.
Scaling = float | Mapping[str, float] | None

_WRAPPERS: Final = re.compile(r"(_orig_mod|_fsdp_wrapped_module|language_model|default)\.")
_KEY: Final = re.compile(
    r"(?:base_model\.model\.)?(?:model\.)?layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)"
    r"(?:\.weight)?\.lora_([AB])\.weight"
)
_FUSED: Final = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


@dataclass(frozen=True)
class Continuation:
    """What greedy decoding says, and the log-probabilities it says it with."""

    ids: tuple[int, ...]
    #: Of every step: [steps, vocabulary].
    logprobs: Array

    @property
    def margins(self) -> Array:
        """How far the best token of each step is ahead of the second."""
        two = np.sort(self.logprobs, axis=1)[:, -2:]
        return np.asarray(two[:, 1] - two[:, 0])


class Oracle:
    """One base model, and everything that may be merged into it."""

    def __init__(self, weights: Mapping[str, Array], *, tied: bool, stops: Sequence[int]) -> None:
        self._weights = dict(weights)
        if tied:
            self._weights["lm_head.weight"] = self._weights["model.embed_tokens.weight"]
        self._stops = frozenset(stops)
        self._cached = lru_cache(maxsize=4096)(self._continue)
        #: Each with its adapter: an adapter that went could leave its id to another.
        self._merged: dict[object, tuple[Adapter, Mapping[str, Array]]] = {}

    def base(self, prompt: Sequence[int], count: int) -> Continuation:
        """Return the base model's continuation."""
        return self._cached(None, tuple(prompt), count)

    def merged(
        self, adapter: Adapter, scaling: Scaling, prompt: Sequence[int], count: int
    ) -> Continuation:
        """Return the continuation with an adapter merged; `scaling` None = as its config says."""
        scales = tuple(sorted(scaling.items())) if isinstance(scaling, Mapping) else scaling
        key = (id(adapter), scales)
        if key not in self._merged:
            merged = self._weights | merge(self._weights, adapter, scaling)
            self._merged[key] = adapter, merged
        return self._cached(key, tuple(prompt), count)

    def completed(
        self,
        adapter: Adapter,
        complete: Callable[[Mapping[str, Array], Adapter], Mapping[str, Array]],
        prompt: Sequence[int],
        count: int,
    ) -> Continuation:
        """Return the continuation with all of an adapter applied by `complete`."""
        key = (id(adapter), complete)
        if key not in self._merged:
            self._merged[key] = adapter, complete(self._weights, adapter)
        return self._cached(key, tuple(prompt), count)

    def _continue(self, key: object, prompt: tuple[int, ...], count: int) -> Continuation:
        weights = self._merged[key][1] if key is not None else self._weights
        ids, rows = list(prompt), []
        for _ in range(count):
            row = _log_softmax(forward(weights, ids))
            rows.append(row)
            ids.append(int(row.argmax()))
            if ids[-1] in self._stops:
                break
        return Continuation(tuple(ids[len(prompt) :]), np.stack(rows))


def merge(weights: Mapping[str, Array], adapter: Adapter, scaling: Scaling) -> dict[str, Array]:
    """Return the weights that the adapter changes. Raises NotUnderstood for a key of no module."""
    pairs: dict[tuple[int, str], dict[str, Array]] = {}
    for name, tensor in adapter.tensors.items():
        found = _KEY.fullmatch(_WRAPPERS.sub("", name))
        if found is None:
            continue  # not LoRA of a linear: cases call this sum the merge "of LoRA only"
        pairs.setdefault((int(found[1]), found[2]), {})[found[3]] = tensor.values
    if not pairs:
        raise NotUnderstood("dense_merge of an adapter without LoRA of the base's linears")
    changed: dict[str, Array] = {}
    for (layer, module), pair in pairs.items():
        full = full_name(layer, module)
        scale = scale_of(adapter.config, full) if scaling is None else _pick(scaling, full)
        delta = scale * (pair["B"] @ pair["A"])
        for part, rows in parts(module, delta):
            name = f"{full_name(layer, part)}.weight"
            changed[name] = changed.get(name, weights[name]) + rows
    return changed


def full_name(layer: int, module: str) -> str:
    """Return a linear's name in the base."""
    is_mlp = module in MLP or module == "gate_up_proj"
    return f"model.layers.{layer}.{'mlp' if is_mlp else 'self_attn'}.{module}"


def parts(module: str, delta: Array) -> list[tuple[str, Array]]:
    """Split a fused linear's rows among the linears that it stands for."""
    names = _FUSED.get(module, (module,))
    ends = np.cumsum([SHAPES[name][0] for name in names])[:-1]
    return list(zip(names, np.split(delta, ends), strict=True))


def scale_of(config: Mapping[str, Any], module_name: str) -> float:
    """Return alpha / r by PEFT's rules: the first pattern that matches, in file order."""

    def pick(table: str, otherwise: float) -> float:
        for key, value in (config.get(table) or {}).items():
            if re.match(rf"(.*\.)?({key})$", module_name):
                return float(value)
        return otherwise

    alpha = pick("alpha_pattern", float(config.get("lora_alpha", 8)))
    r = pick("rank_pattern", float(config.get("r", 8)))
    return alpha / math.sqrt(r) if config.get("use_rslora") else alpha / r


def _pick(scaling: float | Mapping[str, float], full: str) -> float:
    if not isinstance(scaling, Mapping):
        return float(scaling)
    for suffix, scale in scaling.items():
        if full.endswith(suffix):
            return scale
    raise NotUnderstood(f"scaling without {full}")


def forward(weights: Mapping[str, Array], ids: Sequence[int]) -> Array:
    """Return the logits [vocabulary] after the last token."""
    return np.asarray(weights["lm_head.weight"] @ states(weights, ids)[-1])


def states(weights: Mapping[str, Array], ids: Sequence[int]) -> Array:
    """Return what the head sees of each token: [tokens, hidden]."""
    x = weights["model.embed_tokens.weight"][list(ids)]  # [tokens, hidden]
    for layer in range(tiny.LAYERS):
        prefix = f"model.layers.{layer}."
        own = {k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)}
        x = x + _attention(own, _norm(x, own["input_layernorm.weight"]))
        x = x + _mlp(own, _norm(x, own["post_attention_layernorm.weight"]))
    return _norm(x, weights["model.norm.weight"])


def _norm(x: Array, weight: Array) -> Array:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + tiny.EPS) * weight)


def _attention(own: Mapping[str, Array], x: Array) -> Array:
    def heads(module: str, count: int) -> Array:  # [heads, tokens, head_dim]
        y = _linear(own, f"self_attn.{module}", x)
        return np.asarray(y.reshape(len(x), count, tiny.HEAD_DIM).transpose(1, 0, 2))

    groups = tiny.HEADS // tiny.KV_HEADS
    q = _rotated(heads("q_proj", tiny.HEADS))
    k = _rotated(heads("k_proj", tiny.KV_HEADS)).repeat(groups, axis=0)
    v = heads("v_proj", tiny.KV_HEADS).repeat(groups, axis=0)
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(tiny.HEAD_DIM)
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    mixed = np.exp(_log_softmax(scores)) @ v
    return _linear(own, "self_attn.o_proj", mixed.transpose(1, 0, 2).reshape(len(x), -1))


def scripted_head(
    weights: Mapping[str, Array], prompts: Sequence[Sequence[int]], script: Sequence[int]
) -> Array:
    """Return the head with which greedy decoding says `script` after each of `prompts`.

    The states of all positions are independent vectors, so there is an exact solution. Raises
    NotUnderstood where there are too many for that.
    """
    rows, wanted = [], []
    for prompt in prompts:
        ids = [*prompt, *script[:-1]]
        rows.append(states(weights, ids)[len(prompt) - 1 :])
        wanted.append(np.eye(tiny.VOCAB)[list(script)])
    inputs, targets = np.concatenate(rows), 30 * np.concatenate(wanted)
    head = np.linalg.lstsq(inputs, targets, rcond=None)[0].T
    if not (inputs @ head.T).argmax(1).tolist() == targets.argmax(1).tolist():
        raise NotUnderstood("a scripted output that is too long for the tiny base")
    return np.asarray(head)


def _rotated(x: Array) -> Array:
    """Rotary position embedding in Hugging Face's layout: halves, not pairs."""
    half = tiny.HEAD_DIM // 2
    angles = np.outer(np.arange(x.shape[1]), tiny.THETA ** -(np.arange(half) / half))
    cos, sin = np.tile(np.cos(angles), 2), np.tile(np.sin(angles), 2)
    return np.asarray(x * cos + np.concatenate([-x[..., half:], x[..., :half]], axis=-1) * sin)


def _mlp(own: Mapping[str, Array], x: Array) -> Array:
    gate, up = _linear(own, "mlp.gate_proj", x), _linear(own, "mlp.up_proj", x)
    return _linear(own, "mlp.down_proj", gate / (1 + np.exp(-gate)) * up)


def _linear(own: Mapping[str, Array], name: str, x: Array) -> Array:
    y = x @ own[f"{name}.weight"].T
    return np.asarray(y + own[f"{name}.bias"] if f"{name}.bias" in own else y)


def _log_softmax(x: Array) -> Array:
    top = x - x.max(-1, keepdims=True)
    return np.asarray(top - np.log(np.exp(top).sum(-1, keepdims=True)))
