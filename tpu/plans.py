"""Which shards are exported, which of their graphs, and for which chips."""

from dataclasses import dataclass
from typing import Final, Literal

from tpu.chips import GIB, V5E, V6E, V6E_4, Target

#: Tokens that each row of a decode step has behind it, for what attention fetches.
CONTEXT: Final = 1024


@dataclass(frozen=True, slots=True)
class Step:
    """One forward graph of a shard."""

    kind: Literal["decode", "mixed"]
    tokens: int
    #: Its window; None = no LoRA code at all: what the others are compared with.
    lanes: int | None


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard, as its settings would make it."""

    name: str
    #: A name of `shapes.MODELS`.
    model: str
    kv_memory: int
    steps: tuple[Step, ...]
    targets: tuple[Target, ...]
    max_rows: int = 64
    max_len: int = 8192
    step_tokens: int = 512
    lanes: int = 512
    #: Whether its lane writers are exported too, and its sampler, which depends on the vocabulary
    #: alone and takes longer than all else.
    writers: bool = True
    sampler: bool = False
    #: Chips that share every graph.
    devices: int = 1
    #: "refused": more than the chip holds, on purpose.
    expected: Literal["compiles", "refused"] = "compiles"


_DECODE: Final = tuple(
    Step("decode", tokens, lanes) for tokens in (16, 64) for lanes in (None, 0, 128)
)
_STEPS: Final = (*_DECODE, Step("mixed", 512, 128))

SHARDS: Final = (
    Shard("llama-3.2-1b", "llama-3.2-1b", 12 * GIB, _STEPS, (V5E, V6E)),
    Shard("llama-3.1-8b", "llama-3.1-8b", 9 * GIB, _STEPS, (V6E,), sampler=True),
    Shard(
        "llama-3.1-8b-tp4",
        "llama-3.1-8b",
        36 * GIB,
        (*_DECODE[:3], Step("mixed", 512, 128)),
        (V6E_4,),
        devices=4,
    ),
    Shard(
        "llama-3.1-8b-too-large",
        "llama-3.1-8b",
        20 * GIB,
        (Step("decode", 16, 128),),
        (V6E,),
        writers=False,
        expected="refused",
    ),
)
