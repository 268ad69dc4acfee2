"""What must hold of the compiled graphs. Pure: records in, verdicts out."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from tpu.chips import GIB, TARGETS
from tpu.records import Compiled, Exported

#: What LoRA may add at most to a decode step's bytes from HBM, by the tokens of the step.
LORA_BYTES: Final = {16: 0.04, 64: 0.03}


@dataclass(frozen=True, slots=True)
class Result:
    """A graph and what became of it for one target."""

    graph: Exported
    compiled: Compiled

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.graph.name} on {self.compiled.target}"

    @property
    def peak(self) -> int:
        """Bytes of HBM of one chip while this graph runs: all that the shard holds, and its own.

        Weights, KV pages and lanes stay in memory even while a graph runs that takes no part of
        them, so they count here whether they are arguments or not.
        """
        own = self.compiled.arguments - self.graph.arguments  # padding that the compiler adds
        return self.graph.resident + max(own, 0) + self.compiled.temporary + self.compiled.code

    @property
    def hbm(self) -> int:
        """Bytes to and from HBM in one run, with what kernels fetch."""
        return self.compiled.hbm + self.graph.fetched


@dataclass(frozen=True, slots=True)
class Verdict:
    """One gate's answer."""

    gate: str
    subject: str
    holds: bool
    #: What was found, against what is wanted.
    found: str


def judge(results: Iterable[Result]) -> list[Verdict]:
    """Return every gate's verdict, in the order of the results."""
    known = list(results)
    verdicts = [verdict for result in known for verdict in _alone(result)]
    return [*verdicts, *_lora(known)]


def _alone(result: Result) -> Iterator[Verdict]:
    graph, compiled = result.graph, result.compiled
    if graph.expected == "refused":
        found = "compiled" if compiled.error is None else f"refused: {compiled.error[:120]}"
        yield Verdict("too large is refused", result.name, _no_memory(compiled), found)
        return
    yield Verdict(
        "compiles",
        result.name,
        compiled.error is None,
        compiled.error or f"{compiled.seconds:.0f} s",
    )
    if compiled.error is None:
        yield from _memory(result)
        yield from _structure(result)


def _no_memory(compiled: Compiled) -> bool:
    error = (compiled.error or "").lower()
    return "resource_exhausted" in error and "hbm" in error


def _memory(result: Result) -> Iterator[Verdict]:
    graph, compiled = result.graph, result.compiled
    limit = TARGETS[compiled.target].hbm_limit
    yield Verdict(
        "fits HBM",
        result.name,
        result.peak <= limit,
        f"{result.peak / GIB:.2f} of {limit / GIB:.2f} GiB",
    )
    missing = {p: r for p, r in graph.donated.items() if compiled.aliases.get(p) != r}
    wanted = sum(graph.donated_bytes.values())
    yield Verdict(
        "updated in place",
        result.name,
        not missing and compiled.aliased >= wanted and not compiled.copies,
        f"{len(graph.donated) - len(missing)} of {len(graph.donated)} aliased, "
        f"{compiled.aliased / GIB:.3f} GiB, copies: {', '.join(compiled.copies) or 'none'}",
    )


def _structure(result: Result) -> Iterator[Verdict]:
    graph, compiled = result.graph, result.compiled
    found = sum(compiled.collectives.values())
    allowed = graph.collectives.get(compiled.target, 0)
    yield Verdict("collectives", result.name, found <= allowed, f"{found}, at most {allowed}")
    yield Verdict(
        "no host transfer", result.name, not compiled.host, ", ".join(compiled.host) or "none"
    )
    yield Verdict(
        "attention kernel",
        result.name,
        compiled.kernels == graph.kernels,
        f"{compiled.kernels} of {graph.kernels}",
    )


def _lora(results: list[Result]) -> Iterator[Verdict]:
    """Compare graphs that read lanes, and those that read none, with the same without LoRA code."""
    without = {_place(r): r for r in results if r.graph.lanes is None and _usable(r)}
    for result in results:
        base = without.get(_place(result))
        if base is None or result.graph.lanes is None or not _usable(result):
            continue
        more = result.hbm / base.hbm - 1
        flops = result.compiled.flops / base.compiled.flops - 1
        found = f"{more:+.2%} bytes, {flops:+.2%} flops"
        if result.graph.lanes == 0:
            yield Verdict("base rows pay nothing", result.name, more <= 0 and flops <= 0, found)
        elif result.graph.kind == "decode" and result.graph.tokens in LORA_BYTES:
            allowed = LORA_BYTES[result.graph.tokens]
            yield Verdict(
                "LoRA's bytes", result.name, more <= allowed, f"{found}, at most {allowed:+.0%}"
            )


def _usable(result: Result) -> bool:
    return result.compiled.error is None and result.graph.expected == "compiles"


def _place(result: Result) -> tuple[str, str, int, int, str]:
    graph = result.graph
    return graph.model, graph.kind, graph.tokens, graph.layers, result.compiled.target
