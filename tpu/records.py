"""What the steps of the check hand to each other: records in JSON files of one folder.

For each graph NAME.mlirbc and NAME.json; for each target NAME.TARGET.json, what the compiler
made of it, and NAME.TARGET.hlo.gz, its schedule.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

#: Where they are, unless told otherwise.
FOLDER: Final = Path("build/tpu")


@dataclass(frozen=True, slots=True)
class Exported:
    """One serving graph as traced."""

    #: For files: llama-3.1-8b.decode-16.lanes-128
    name: str
    model: str
    #: Of the model; graphs that hold fewer say so in `layers`.
    model_layers: int
    layers: int
    #: decode, mixed, sampler, lane writer.
    kind: str
    #: Tokens of the step; 0 where there are none.
    tokens: int
    #: Lanes that it reads; None = traced without any LoRA code.
    lanes: int | None
    #: Parameter -> result that takes its memory over.
    donated: Mapping[int, int]
    #: Bytes of each donated parameter on one chip, as stored.
    donated_bytes: Mapping[int, int]
    #: Dims of arrays that kernels fetch from by themselves.
    paged: tuple[tuple[int, ...], ...]
    #: Bytes that they fetch at `context` tokens a row, on one chip; not in the schedule.
    fetched: int
    context: int
    #: Pallas kernels in it.
    kernels: int
    #: Bytes of weights, KV pages and lanes of the shard on one chip, whether in this graph or not.
    resident: int
    #: Of what this graph itself takes.
    arguments: int
    #: Names of targets.
    targets: tuple[str, ...]
    #: All-reduces that it may have at most, by target.
    collectives: Mapping[str, int] = field(default_factory=dict)
    #: "refused": larger than the chip, on purpose.
    expected: Literal["compiles", "refused"] = "compiles"
    #: Chips that share it.
    partitions: int = 1
    #: Parameter -> how it is cut, as XLA writes it; others are whole everywhere.
    shardings: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler made of one graph for one target; bytes and flops are one chip's."""

    graph: str
    target: str
    seconds: float
    #: Why it was refused; None = it compiled. Everything below is zero then.
    error: str | None = None
    flops: float = 0.0
    arguments: int = 0
    #: Taken over by results.
    aliased: int = 0
    temporary: int = 0
    code: int = 0
    hbm_read: int = 0
    hbm_written: int = 0
    #: Loops in it that count once in these, because the compiler does not say how often they run.
    loops: int = 0
    #: Parameter -> result.
    aliases: Mapping[int, int] = field(default_factory=dict)
    #: Operation -> how many.
    collectives: Mapping[str, int] = field(default_factory=dict)
    #: Instructions that touch the host.
    host: tuple[str, ...] = ()
    kernels: int = 0
    #: Copies as large as something donated: it was not updated in place.
    copies: tuple[str, ...] = ()

    @property
    def hbm(self) -> int:
        """Bytes to and from HBM in a run, without what kernels fetch."""
        return self.hbm_read + self.hbm_written


def write_exported(folder: Path, graph: Exported, bytecode: bytes) -> None:
    """Write a graph and its record."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{graph.name}.mlirbc").write_bytes(bytecode)
    (folder / f"{graph.name}.json").write_text(json.dumps(asdict(graph), indent=1))


def read_exported(folder: Path) -> Iterator[Exported]:
    """Yield the graphs of a folder, by name."""
    for path in sorted(folder.glob("*.mlirbc")):
        yield _exported(json.loads(path.with_suffix(".json").read_text()))


def write_compiled(folder: Path, compiled: Compiled) -> None:
    """Write what became of a graph."""
    path = folder / f"{compiled.graph}.{compiled.target}.json"
    path.write_text(json.dumps(asdict(compiled), indent=1))


def read_compiled(path: Path) -> Compiled:
    """Read what `write_compiled` wrote."""
    raw = json.loads(path.read_text())
    raw["aliases"] = {int(parameter): result for parameter, result in raw["aliases"].items()}
    raw["host"], raw["copies"] = tuple(raw["host"]), tuple(raw["copies"])
    return Compiled(**raw)


def _exported(raw: dict[str, Any]) -> Exported:
    for name in ("donated", "donated_bytes", "shardings"):
        raw[name] = {int(parameter): value for parameter, value in raw[name].items()}
    raw["paged"] = tuple(tuple(dims) for dims in raw["paged"])
    raw["targets"] = tuple(raw["targets"])
    return Exported(**raw)
