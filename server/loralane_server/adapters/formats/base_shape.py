"""The base model as adapters see it: the linears and tables that they can change, by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from loralane_server.device.seam import ENDS, GROUPS

EMBED: Final = "embed_tokens"
HEAD: Final = "lm_head"

MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: Linears that some checkpoints keep as one: the rows of their parts lie one after the other.
FUSED: Final = {"qkv_proj": GROUPS["qkv"], "gate_up_proj": GROUPS["gate_up"]}
_ATTENTION: Final = frozenset({*MODULES[:4], "qkv_proj"})
_ENDS: Final = {EMBED: f"model.{EMBED}", HEAD: HEAD}


def block_of(module: str) -> str:
    """Which half of a layer holds the module: "self_attn" or "mlp"."""
    return "self_attn" if module in _ATTENTION else "mlp"


def module_name(layer: int, module: str) -> str:
    """The target's full name in the base model, as PEFT's patterns see it."""
    if layer == ENDS:
        return _ENDS[module]
    return f"model.layers.{layer}.{block_of(module)}.{module}"


def parts_of(module: str) -> tuple[str, ...]:
    """The modules of which a fused one is made, in the order of its rows; others are their own."""
    return FUSED.get(module, (module,))


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a shard's device applies of an adapter beside LoRA on the layers' linears, and how."""

    #: What the device is called with --device.
    device: str = "cpu"
    #: Gain and shift of the layers' linears: DoRA's magnitudes, biases.
    vectors: bool = True
    #: Anything at the embedding and the head.
    ends: bool = True
    #: Whether it takes A [rank, in] fastest with the numbers of an input side by side in memory.
    a_by_columns: bool = False


@dataclass(frozen=True, slots=True)
class BaseShape:
    """What adapters are checked against."""

    layers: int
    #: (name, out features, in features), the same in every layer.
    modules: tuple[tuple[str, int, int], ...]
    #: What the shard computes in and lanes are cast to: "float32" or "bfloat16".
    dtype: str
    #: Shape of the embedding and the head, [vocab, hidden]; 0 = they cannot be changed.
    vocab: int = 0
    hidden: int = 0
    #: The head is the embedding.
    tied_head: bool = False
    #: Names of the modules that have a bias.
    biased: frozenset[str] = frozenset()
    #: Adapters that need more of the device are refused.
    abilities: Abilities = Abilities()

    _shapes: Mapping[str, tuple[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shapes = {name: (rows, columns) for name, rows, columns in self.modules}
        for fused, parts in FUSED.items():
            if shapes.keys() >= set(parts):
                rows = sum(shapes[part][0] for part in parts)
                shapes[fused] = rows, shapes[parts[0]][1]
        if self.vocab:
            shapes |= {EMBED: (self.hidden, self.vocab), HEAD: (self.vocab, self.hidden)}
        object.__setattr__(self, "_shapes", shapes)

    def shape(self, module: str) -> tuple[int, int] | None:
        """(out, in) of the module's weight; None where the base has no such module.

        A fused module has the rows of its parts. The embedding is a linear on one-hot vectors.
        """
        return self._shapes.get(module)
