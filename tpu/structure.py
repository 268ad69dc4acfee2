"""What a compiled graph is made of: collectives, kernels, transfers to the host, copies."""

from collections import Counter
from typing import Final

from tpu.hlo import HOST, Module, bytes_in

KERNEL: Final = "tpu_custom_call"
_COLLECTIVES: Final = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
_HOST_OPS: Final = frozenset("infeed outfeed send recv send-done recv-done".split())
_COPIES: Final = ("copy", "copy-start")


def collectives(module: Module) -> dict[str, int]:
    """Count collectives by operation; those inside of fusions too, joined there with products."""
    ops = Counter(
        it.op.removesuffix("-start")
        for computation in module.computations.values()
        for it in computation.instructions.values()
    )
    return {op: ops[op] for op in _COLLECTIVES if ops[op]}


def kernels(module: Module) -> int:
    """Count Pallas kernels."""
    return sum(it.target == KERNEL for it in module.executed())


def host_transfers(module: Module) -> tuple[str, ...]:
    """Return what touches the host or its memory: operation and name."""
    return tuple(
        f"{it.op} {it.name}"
        for it in module.executed()
        if it.op in _HOST_OPS or any(shape.space == HOST for shape in it.shapes)
    )


def copies(module: Module, least: int) -> tuple[str, ...]:
    """Return copies from HBM to HBM of at least so many bytes, by name; 0 = none are wanted."""
    found = (
        (it, computation.instructions[it.operands[0]])
        for computation in module.running
        for it in computation.instructions.values()
        if it.op in _COPIES
    )
    return tuple(
        it.name
        for it, source in found
        if least and bytes_in(it.shapes[:1]) >= least and bytes_in(source.shapes) >= least
    )
