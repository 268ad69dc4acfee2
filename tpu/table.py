"""The figures as Markdown, for RESULTS.md and the terminal."""

from collections.abc import Iterator, Mapping, Sequence

from tpu.chips import GIB, TARGETS
from tpu.gates import Extra, Result, Verdict, extras

_HEAD = (
    "| graph | chip | compile s | peak HBM GiB | limit | in place | flops G | HBM GB a run | "
    "LoRA adds | collectives | kernels |"
)


def markdown(
    results: Sequence[Result], verdicts: Sequence[Verdict], versions: Mapping[str, str]
) -> str:
    """Return the whole page."""
    return "\n".join(
        (*_preface(results, versions), *_figures(results), "", *_verdicts(verdicts), "")
    )


def _preface(results: Sequence[Result], versions: Mapping[str, str]) -> Iterator[str]:
    context = max((result.graph.context for result in results), default=0)
    yield "# Compiled for TPUs, not run on one"
    yield ""
    yield (
        "Written by `make tpu-check`. These are the shard's own graphs, traced at the shapes of "
        "real models, with all of their layers unless a line says otherwise, and compiled ahead of "
        "time by the compiler in libtpu. No TPU was there: nothing here was executed, and no line "
        "says how long anything takes."
    )
    yield ""
    yield (
        f"Peak HBM is one chip's: all weights, KV pages and lanes of the shard, and what the graph "
        f"needs beside them. HBM a run is read from the compiled schedule; to it comes what the "
        f"attention kernel fetches at {context:,} tokens of context a row, which no schedule shows."
    )
    yield ""
    yield ", ".join(f"{name} {version}" for name, version in versions.items()) + "."
    yield ""


def _figures(results: Sequence[Result]) -> Iterator[str]:
    yield _HEAD
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: |"
    more = extras(results)
    for result in results:
        yield _line(result, more.get(result.name))


def _line(result: Result, extra: Extra | None) -> str:
    graph, compiled = result.graph, result.compiled
    limit = TARGETS[compiled.target].hbm_limit / GIB
    fewer = "" if graph.layers == graph.model_layers else f", {graph.layers} layers"
    cells = [graph.name + fewer, compiled.target, f"{compiled.seconds:.1f}"]
    if compiled.error is not None:
        cells += ["refused", f"{limit:.2f}", "", "", "", "", "", ""]
    else:
        cells += [
            f"{result.peak / GIB:.2f}",
            f"{limit:.2f}",
            f"{compiled.aliased / GIB:.2f} GiB",
            f"{compiled.flops / 1e9:.1f}",
            f"{result.hbm / 1e9:.2f}",
            "" if extra is None else str(extra),
            str(sum(compiled.collectives.values())),
            str(compiled.kernels),
        ]
    return "| " + " | ".join(cells) + " |"


def _verdicts(verdicts: Sequence[Verdict]) -> Iterator[str]:
    failed = sum(not verdict.holds for verdict in verdicts)
    yield f"## Gates: {len(verdicts) - failed} hold, {failed} fail"
    yield ""
    yield "| gate | graph | | found |"
    yield "| --- | --- | --- | --- |"
    for verdict in verdicts:
        mark = "holds" if verdict.holds else "**fails**"
        found = " ".join(verdict.found.replace("|", "/").split())
        yield f"| {verdict.gate} | {verdict.subject} | {mark} | {found} |"
