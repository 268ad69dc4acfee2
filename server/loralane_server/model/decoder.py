"""The decoder: Llama, Mistral, Qwen2, Qwen3 and Phi-3 as one computation over a step's tokens.

    x        [tokens, hidden]                      residual stream
    q        [tokens, heads, head_dim]
    k, v     [tokens, kv_heads, head_dim]

Rows of different lengths and adapters lie side by side in `tokens`; only `device.attend` and
`device.add_lora` know which token belongs to whom.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic

from torch import Tensor
from torch.nn import functional as F

from loralane_server.device.seam import BatchT, Device, LayerWeights, Linear
from loralane_server.model.rope import rotate
from loralane_server.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights on the device."""

    linears: Mapping[str, Linear]
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class Flow:
    """A step's tokens between two layers: what one layer leaves for the next."""

    #: [tokens, hidden]
    x: Tensor
    #: [tokens, 1, head_dim]
    cos: Tensor
    sin: Tensor


class Decoder(Generic[BatchT]):
    """A base model on a device. Holds weights only; KV pages and lanes belong to the device."""

    def __init__(self, spec: ModelSpec, device: Device[BatchT], max_len: int) -> None:
        self._spec = spec
        self._device = device
        self._layers: list[Layer] = []
        cos, sin = spec.rope.tables(max_len, spec.head_dim)
        self._cos, self._sin = device.put(cos), device.put(sin)
        self._embedding: Tensor | None = None
        self._norm: Tensor | None = None
        self._head: Linear | None = None

    def set_ends(self, embedding: Tensor, norm: Tensor, head: Linear) -> None:
        """Install the embedding [vocab, hidden], the last norm and the head."""
        self._embedding, self._norm, self._head = embedding, norm, head

    def add_layer(self, weights: LayerWeights) -> None:
        """Install the next layer, packing its linears for the device."""
        device = self._device
        self._layers.append(
            Layer(
                linears={
                    name: device.pack(w, b, group=name) for name, (w, b) in weights.linears.items()
                },
                input_norm=device.put(weights.input_norm),
                post_norm=device.put(weights.post_norm),
                q_norm=None if weights.q_norm is None else device.put(weights.q_norm),
                k_norm=None if weights.k_norm is None else device.put(weights.k_norm),
            )
        )

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return len(self._layers)

    def logits(self, batch: BatchT) -> Tensor:
        """Run one step; return logits [samples, vocab] of the tokens to be sampled."""
        return self.finish(self.advance(self.begin(batch), 0, self.layers, batch), batch)

    def begin(self, batch: BatchT) -> Flow:
        """Begin a step that is run in parts: what the first layer takes."""
        assert self._embedding is not None
        x = self._embedding[batch.tokens]
        self._device.adapt_embedding(x, batch)
        cos = self._cos[batch.positions].unsqueeze(1).to(x.dtype)
        sin = self._sin[batch.positions].unsqueeze(1).to(x.dtype)
        return Flow(x, cos, sin)

    def advance(self, flow: Flow, first: int, last: int, batch: BatchT) -> Flow:
        """Run layers [first, last); `flow` is what layer `first` takes, and is left as it is."""
        x = flow.x
        for index in range(first, last):
            layer = self._layers[index]
            normed = self._rms(x, layer.input_norm)
            x = x + self._attention(index, layer, normed, flow.cos, flow.sin, batch)
            x = x + self._mlp(index, layer, self._rms(x, layer.post_norm), batch)
        return Flow(x, flow.cos, flow.sin)

    def finish(self, flow: Flow, batch: BatchT) -> Tensor:
        """End a step after its last layer; return logits as `logits` does."""
        assert self._norm is not None
        assert self._head is not None
        x = self._rms(self._device.samples_of(flow.x, batch), self._norm)
        logits = self._head(x)
        self._device.adapt_logits(logits, x, batch)
        return logits

    def _attention(
        self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, batch: BatchT
    ) -> Tensor:
        spec = self._spec
        qkv = self._linear(index, layer, "qkv", x, batch)
        qkv = qkv.view(x.shape[0], spec.heads + 2 * spec.kv_heads, spec.head_dim)
        split = self._device.split
        qk, v = split(qkv, (spec.heads + spec.kv_heads, spec.kv_heads))
        if layer.q_norm is None or layer.k_norm is None:
            qk = rotate(qk, cos, sin)
            q, k = split(qk, (spec.heads, spec.kv_heads))
        else:
            q, k = split(qk, (spec.heads, spec.kv_heads))
            q = rotate(self._rms(q, layer.q_norm), cos, sin)
            k = rotate(self._rms(k, layer.k_norm), cos, sin)
        heads = self._device.attend(index, q, k, v, batch)
        return self._linear(index, layer, "o", heads, batch)

    def _mlp(self, index: int, layer: Layer, x: Tensor, batch: BatchT) -> Tensor:
        both = self._linear(index, layer, "gate_up", x, batch)
        gate, up = self._device.split(both, (both.shape[1] // 2,) * 2)
        return self._linear(index, layer, "down", F.silu(gate) * up, batch)

    def _linear(self, index: int, layer: Layer, group: str, x: Tensor, batch: BatchT) -> Tensor:
        y = layer.linears[group](x)
        self._device.add_lora(y, x, index, group, batch)
        return self._device.whole(y)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._spec.norm_eps)
