"""Graphs and answers of the compiler that one can check by hand."""

from dataclasses import replace
from typing import Any

from tpu.chips import GIB
from tpu.gates import Result
from tpu.records import Compiled, Exported

GRAPH = Exported(
    name="llama-3.1-8b.decode-16.lanes-128",
    model="llama-3.1-8b",
    model_layers=32,
    layers=32,
    kind="decode",
    tokens=16,
    lanes=128,
    donated={3: 0, 5: 1},
    donated_bytes={3: 1000, 5: 1000},
    paged=((65, 16, 16, 128),),
    fetched=2000,
    context=1024,
    kernels=32,
    resident=20 * GIB,
    arguments=10 * GIB,
    targets=("v6e-1x1",),
)

COMPILED = Compiled(
    graph=GRAPH.name,
    target="v6e-1x1",
    seconds=12.0,
    flops=1e9,
    arguments=10 * GIB,
    aliased=2000,
    temporary=GIB,
    hbm_read=7000,
    hbm_written=1000,
    aliases={3: 0, 5: 1},
    kernels=32,
)


def result(graph: dict[str, Any] | None = None, **compiled: Any) -> Result:
    """A decode step in which everything holds, but for what is given."""
    exported = replace(GRAPH, **graph or {})
    return Result(exported, replace(COMPILED, graph=exported.name, **compiled))


def without_lora(**compiled: Any) -> Result:
    """The same step without any LoRA code: 10,000 bytes and 1 Gflop, if not told otherwise."""
    graph = {"name": "llama-3.1-8b.decode-16.none", "lanes": None}
    return result(graph, **{"hbm_read": 7000, "hbm_written": 1000, "flops": 1e9} | compiled)
