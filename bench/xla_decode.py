"""`make bench-xla-decode`: does XLA on the CPU decode as fast as plain torch, both in float32?

    python -m bench.xla_decode --xla .venv-xla/bin/python [--rounds 5]

Eight rows decode, each with an adapter of its own, of rank 16. torch and torch_xla need each its
own environment, so each backend is a child with a shard in it; they take turns, and a ratio
compares the two of one turn.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Final, Literal, get_args

from loralane_server.config import ShardConfig

from bench.adapters import RANK, rank16, warm_page_cache
from bench.alone import Alone
from bench.model import DEFAULT_FOLDER, ready
from bench.promises import NotMeasured, at_least, conclude
from bench.report import save
from bench.windows import Window, gaps_within

Backend = Literal["cpu", "xla"]

ROWS: Final = 8
_PROMPT: Final = 32
_LEAST_OF_TORCH: Final = 0.8


def config_of(
    backend: Backend, model: Path, *, max_model_len: int, lanes: int, host_cache: int = 1 << 30
) -> ShardConfig:
    """Return a shard of the random model in float32 with little to compile."""
    return ShardConfig(
        model=str(model / "f32"),
        adapter_roots=(model / "rank16",),
        device=backend,
        dtype="float32",
        max_rows=ROWS,
        max_model_len=max_model_len,
        lanes=lanes,
        host_cache=host_cache,
        step_tokens=64,
    )


class Child:
    """One backend in a process of its own; it decodes when it is told to."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    @classmethod
    @contextmanager
    def running(cls, python: Path, backend: Backend, model: Path) -> Iterator["Child"]:
        """Start it; it is ready when the block begins."""
        command = [str(python), "-m", "bench.xla_decode", f"--child={backend}", f"--model={model}"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            child = cls(process)
            child._read()
            try:
                yield child
            finally:
                process.terminate()

    def step_ms(self, tokens: int) -> float:
        """Let it decode so many tokens a row; return its median step."""
        assert self._process.stdin is not None, "stdin is a pipe"
        print(tokens, file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> float:
        """Return the next number that the child says. Raises NotMeasured if it has ended."""
        assert self._process.stdout is not None, "stdout is a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise NotMeasured("a shard ended before it was measured; see above")
        return float(json.loads(line))


def serve_as_child(backend: Backend, model: Path) -> None:
    """Decode as often as stdin says, and say how long a step took."""
    names = list(rank16(model, "f32", ROWS))
    warm_page_cache(rank16(model, "f32", ROWS).values())
    with Alone.running(config_of(backend, model, max_model_len=256, lanes=ROWS * RANK)) as alone:
        digests = [alone.digest(name) for name in names]
        print(_decode(alone, digests, 8), flush=True)
        for line in sys.stdin:
            print(_decode(alone, digests, int(line)), flush=True)


def _decode(alone: Alone, digests: Sequence[str], tokens: int) -> float:
    """Return the median step in ms while all rows decode."""
    streams = alone.finish(alone.start(digests, _PROMPT, tokens))
    together = Window(max(times[1] for times in streams), min(times[-1] for times in streams))
    return gaps_within(streams, together).p50 * 1e3


def measure(torch: Child, xla: Child, rounds: int, tokens: int) -> dict[str, list[float]]:
    """Let both decode in turns; return the steps of all rounds in ms."""
    found: dict[str, list[float]] = {"torch": [], "xla": []}
    for _ in range(rounds):
        found["torch"].append(torch.step_ms(tokens))
        found["xla"].append(xla.step_ms(tokens))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = _parser().parse_args(argv)
    ready(args.model, "f32")
    if args.child:
        serve_as_child(args.child, args.model)
        return 0
    with ExitStack() as stack:
        torch = stack.enter_context(Child.running(Path(sys.executable), "cpu", args.model))
        xla = stack.enter_context(Child.running(args.xla, "xla", args.model))
        found = measure(torch, xla, args.rounds, args.tokens)
    ratios = [t / x for t, x in zip(found["torch"], found["xla"], strict=True)]
    for name, steps in found.items():
        print(f"{name:6}{median(steps):8.2f} ms a step, {ROWS / median(steps) * 1e3:6.0f} tok/s")
    print(f"written to {save(args.out, {'step_ms': found, 'xla_of_torch': ratios})}")
    return conclude([at_least("XLA's rate over torch's", median(ratios), _LEAST_OF_TORCH)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.xla_decode", allow_abbrev=False)
    parser.add_argument("--xla", type=Path, default=Path(".venv-xla/bin/python"))
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER, help="made if missing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160, help="of each row in a round")
    parser.add_argument("--out", type=Path, default=Path("bench/results/xla_decode.json"))
    parser.add_argument("--child", choices=get_args(Backend), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
