"""`make bench`: serve the random model, measure base, one adapter and eight, and cold adapters.

    python -m bench.run [--dtype bf16|f32] [--streams 1,8,32] [--rounds 5] [serve's own options]

The model is made on the first run. Ratios compare figures of the same turn of the same run.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

from bench.load import MODES, Arrivals, Generator, Work, run_cases
from bench.model import ADAPTERS, DEFAULT_FOLDER, VOCAB, make
from bench.report import Case, show, write
from bench.stream import Client, Server, leave_imports_alone
from demo.serving import serving

#: Adapters that no throughput case uses, so that they are cold afterwards.
_FRESH: Final = range(8, ADAPTERS)


@dataclass(frozen=True, slots=True)
class Cold:
    """Medians over fresh adapters, one request at a time: time to first token in milliseconds."""

    base: float
    cold: float
    warm: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args, serve_arguments = _parser().parse_known_args(argv)
    if not (args.model / args.dtype).is_dir():
        print(f"making {args.model}")
        make(args.model)
    leave_imports_alone()
    cases, cold = asyncio.run(_run(args, serve_arguments))
    show(cases)
    print(f"first token, ms: base {cold.base:.1f}, cold {cold.cold:.1f}, warm {cold.warm:.1f}")
    about = {"dtype": args.dtype, "serve": serve_arguments, "cold": asdict(cold)}
    print(f"written to {write(args.out, about, cases)}")
    return 0


async def _run(args: argparse.Namespace, serve_arguments: Sequence[str]) -> tuple[list[Case], Cold]:
    names = tuple(f"a{index:02d}" for index in range(ADAPTERS))
    folder: Path = args.model
    aliases = [f"--adapter={name}={folder / 'adapters' / name}" for name in names]
    model = folder / args.dtype
    work = Work(model.name, names, args.prompt_tokens, args.new_tokens, VOCAB)
    async with serving([str(model), *aliases, *serve_arguments]) as url:
        with closing(Client(Server.at(url))) as client:
            generator = Generator(client, work)
            cases = []
            for streams in map(int, args.streams.split(",")):
                cases += await run_cases(generator, MODES, Arrivals(streams), args.rounds)
            return cases, await _first_tokens(generator, work)


async def _first_tokens(generator: Generator, work: Work) -> Cold:
    firsts: list[list[float]] = []
    for name in (work.adapters[index] for index in _FRESH):
        timings = [await generator.one(model) for model in (work.base, name, name)]
        firsts.append([timing.first * 1000 for timing in timings])
    base, cold, warm = (median(times) for times in zip(*firsts, strict=True))
    return Cold(base, cold, warm)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.run", allow_abbrev=False)
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER, help="made if missing")
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--streams", default="1,8,32", help="sizes of bursts, by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("bench/results/run.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
