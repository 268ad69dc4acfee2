"""`make tpu-check`: compiles what was exported, judges it, writes RESULTS.md.

    python -m tpu.check [FOLDER] [--results FILE] [--jobs N]

Each graph is compiled in a process of its own, because a compiler that meets what it cannot do ends
its process. Exits with 1 if a gate fails.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Final

from tpu.gates import Result, judge
from tpu.records import FOLDER, Compiled, Exported, read_compiled, read_exported
from tpu.table import markdown

RESULTS: Final = Path(__file__).parent / "RESULTS.md"
_TIMEOUT: Final = 300


def main() -> int:
    """Compile, judge, tell."""
    arguments = _arguments()
    graphs = list(read_exported(arguments.folder))
    jobs = [(graph, target) for graph in graphs for target in graph.targets]
    if not jobs:
        print(f"{arguments.folder} holds no exported graph; python -m tpu.export makes them")
        return 1
    print(f"== compiling {len(jobs)} graphs with libtpu; nothing is run", flush=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        made = pool.map(lambda job: _compile(arguments.folder, *job), jobs)
        results = list(_told(jobs, made))
    verdicts = judge(results)
    page = markdown(results, verdicts, _versions(arguments.folder))
    arguments.results.write_text(page)
    print(page)
    failed = [verdict for verdict in verdicts if not verdict.holds]
    for verdict in failed:
        print(f"FAILS: {verdict.gate}: {verdict.subject}: {verdict.found}", file=sys.stderr)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tpu.check", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=2, help="compilers at once, 1 GB each")
    return parser.parse_args()


def _compile(folder: Path, graph: Exported, target: str) -> Compiled:
    """Run one compiler; what ends without an answer is an error with its last words."""
    answer = folder / f"{graph.name}.{target}.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tpu.compile", str(folder), graph.name, target]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        return Compiled(graph.name, target, _TIMEOUT, error=f"no answer within {_TIMEOUT} s")
    if not answer.exists():
        return Compiled(graph.name, target, 0.0, error=f"died: {ended.stderr[-800:]}")
    return read_compiled(answer)


def _told(jobs: list[tuple[Exported, str]], made: Iterator[Compiled]) -> Iterator[Result]:
    for at, ((graph, target), compiled) in enumerate(zip(jobs, made, strict=True), 1):
        word = "compiled" if compiled.error is None else "refused"
        print(
            f"  {at}/{len(jobs)} {graph.name} on {target}: {word}, {compiled.seconds:.1f} s",
            flush=True,
        )
        yield Result(graph, compiled)


def _versions(folder: Path) -> dict[str, str]:
    exporter = json.loads((folder / "versions").read_text())
    return {**exporter, **{name: version(name) for name in ("jax", "jaxlib", "libtpu")}}


if __name__ == "__main__":
    sys.exit(main())
