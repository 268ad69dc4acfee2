"""What must hold of the compiled graphs. Pure: records in, verdicts out."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from tpu.chips import GIB, TARGETS
from tpu.records import Compiled, Exported

#: What 128 lanes (8 adapters of rank 16) may add at most to a decode step's bytes from one chip's
#: HBM, by model, tokens of the step and chips. Smaller models pay more: lanes grow with the width,
#: weights faster. So do several chips: of a linear that is cut by outputs each chip reads A whole,
#: of one that is cut by inputs B.
LORA_BYTES: Final = {
    ("llama-3.1-8b", 16, 1): 0.04,
    ("llama-3.1-8b", 64, 1): 0.03,
    ("llama-3.1-8b", 16, 4): 0.08,
}


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


@dataclass(frozen=True, slots=True)
class Extra:
    """What a graph needs more than the same without any LoRA code, as a part of that."""

    hbm: float
    flops: float

    def __str__(self) -> str:
        return f"{self.hbm:+.2%} bytes, {self.flops:+.2%} flops"


def extras(results: Iterable[Result]) -> dict[str, Extra]:
    """Compare graphs with those without LoRA code; by the results' names. Uncounted ones: none."""
    known = [result for result in results if _comparable(result)]
    without = {_place(result): result for result in known if result.graph.lanes is None}
    pairs = [
        (r, without[_place(r)]) for r in known if r.graph.lanes is not None and _place(r) in without
    ]
    return {
        result.name: Extra(
            result.hbm / base.hbm - 1, result.compiled.flops / base.compiled.flops - 1
        )
        for result, base in pairs
    }


def _lora(results: list[Result]) -> Iterator[Verdict]:
    found = extras(results)
    for result in results:
        graph = result.graph
        if graph.expected == "refused" or not graph.tokens or graph.lanes is None:
            continue
        extra = found.get(result.name)
        told = "not to be compared" if extra is None else str(extra)
        place = (graph.model, graph.tokens, graph.partitions)
        allowed = LORA_BYTES.get(place) if graph.kind == "decode" else None
        if graph.lanes == 0:
            nothing = extra is not None and extra.hbm <= 0 and extra.flops <= 0
            yield Verdict("base rows pay nothing", result.name, nothing, told)
        elif allowed is not None:
            little = extra is not None and extra.hbm <= allowed
            yield Verdict("LoRA's bytes", result.name, little, f"{told}, at most {allowed:+.0%}")


def _comparable(result: Result) -> bool:
    compiled = result.compiled
    expected = result.graph.expected == "compiles" and result.graph.tokens > 0
    return expected and compiled.error is None and not compiled.loops


def _place(result: Result) -> tuple[str, str, int, int, str]:
    graph = result.graph
    return graph.model, graph.kind, graph.tokens, graph.layers, result.compiled.target
