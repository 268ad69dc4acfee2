"""The decoder: Llama, Mistral, Qwen2, Qwen3 and Phi-3 as one computation over a step's tokens.

    x        [tokens, hidden]                      residual stream
    q        [tokens, heads, head_dim]
    k, v     [tokens, kv_heads, head_dim]

Rows of different lengths and adapters lie side by side in `tokens`; only `device.attend` and
`device.add_lora` know which token belongs to whom.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor
from torch.nn import functional as F

from loralane_server.device.seam import BatchT, Device, LayerWeights, Linear
from loralane_server.model.rope import rotate
from loralane_server.model.spec import ModelSpec

#: A layer's linears on the device, by group.
Layer = Mapping[str, Linear]


class Norms:
    """Norms of one size of all layers as one tensor: little ones apart would cost XLA's host more.

    Added layer by layer on the host, then placed once.
    """

    def __init__(self) -> None:
        self._added: list[Tensor] = []
        self._placed: Tensor | None = None

    def add(self, weight: Tensor) -> None:
        """Take the next one, [size]; before `place`."""
        self._added.append(weight)

    def place(self, put: Callable[[Tensor], Tensor]) -> None:
        """Bring them to the device, if there are any."""
        if self._added:
            self._placed = put(torch.stack(self._added))
            self._added.clear()

    def __getitem__(self, index: int) -> Tensor:
        """Return one of them; the last is -1."""
        assert self._placed is not None
        return self._placed[index]


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
        #: Two of each layer, before attention and before the MLP, and the last.
        self._norms = Norms()
        #: Of each layer those of q and k, if the model has them.
        self._head_norms = Norms()
        cos, sin = spec.rope.tables(max_len, spec.head_dim)
        self._cos, self._sin = device.put(cos), device.put(sin)
        self._embedding: Tensor | None = None
        self._head: Linear | None = None

    def set_ends(self, embedding: Tensor, norm: Tensor, head: Linear) -> None:
        """Install the embedding [vocab, hidden], the last norm and the head, after all layers."""
        self._embedding, self._head = embedding, head
        self._norms.add(norm)
        for norms in (self._norms, self._head_norms):
            norms.place(self._device.put)

    def add_layer(self, weights: LayerWeights) -> None:
        """Install the next layer, packing its linears for the device."""
        pack = self._device.pack
        self._layers.append(
            {name: pack(w, b, group=name) for name, (w, b) in weights.linears.items()}
        )
        self._norms.add(weights.input_norm)
        self._norms.add(weights.post_norm)
        if self._spec.qk_norm:
            assert weights.q_norm is not None
            assert weights.k_norm is not None
            self._head_norms.add(weights.q_norm)
            self._head_norms.add(weights.k_norm)

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
            normed = self._rms(x, self._norms[2 * index])
            x = x + self._attention(index, normed, flow.cos, flow.sin, batch)
            x = x + self._mlp(index, self._rms(x, self._norms[2 * index + 1]), batch)
        return Flow(x, flow.cos, flow.sin)

    def finish(self, flow: Flow, batch: BatchT) -> Tensor:
        """End a step after its last layer; return logits as `logits` does."""
        assert self._head is not None
        x = self._rms(self._device.samples_of(flow.x, batch), self._norms[-1])
        logits = self._head(x)
        self._device.adapt_logits(logits, x, batch)
        return logits

    def _attention(self, index: int, x: Tensor, cos: Tensor, sin: Tensor, batch: BatchT) -> Tensor:
        spec = self._spec
        qkv = self._linear(index, "qkv", x, batch)
        qkv = qkv.view(x.shape[0], spec.heads + 2 * spec.kv_heads, spec.head_dim)
        split = self._device.split
        qk, v = split(qkv, (spec.heads + spec.kv_heads, spec.kv_heads))
        if spec.qk_norm:
            q, k = split(qk, (spec.heads, spec.kv_heads))
            q = rotate(self._rms(q, self._head_norms[2 * index]), cos, sin)
            k = rotate(self._rms(k, self._head_norms[2 * index + 1]), cos, sin)
        else:
            qk = rotate(qk, cos, sin)
            q, k = split(qk, (spec.heads, spec.kv_heads))
        heads = self._device.attend(index, q, k, v, batch)
        return self._linear(index, "o", heads, batch)

    def _mlp(self, index: int, x: Tensor, batch: BatchT) -> Tensor:
        both = self._linear(index, "gate_up", x, batch)
        gate, up = self._device.split(both, (both.shape[1] // 2,) * 2)
        return self._linear(index, "down", F.silu(gate) * up, batch)

    def _linear(self, index: int, group: str, x: Tensor, batch: BatchT) -> Tensor:
        y = self._layers[index][group](x)
        self._device.add_lora(y, x, index, group, batch)
        return self._device.whole(y)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._spec.norm_eps)
