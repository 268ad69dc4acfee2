"""`make bench-rotation`: more adapters are wanted than lanes hold; what does taking turns cost?

    python -m bench.rotation [--adapters 16] [--fit 4] [--seconds 30] [serve's own options]

Two servers with few rows, one with lanes for all adapters and one with lanes for a few. Clients of
every adapter send their next request when the last one is answered; the servers take turns.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from bench.adapters import RANK, rank16, warm_page_cache
from bench.load import Work
from bench.model import DEFAULT_FOLDER, VOCAB, ready
from bench.promises import Promise, at_least, conclude, run
from bench.report import save
from bench.stream import Client, Server, leave_imports_alone
from bench.tallies import (
    by_tenant,
    first_tokens,
    least_of_fair,
    rate_within,
    tokens_within,
    waited_within,
)
from bench.traffic import Answer, CpuShare, Fresh, closed_loop
from bench.windows import Window
from demo.serving import serving

#: What the project promises.
LEAST_RATE_OF_RESIDENT, LEAST_OF_FAIR_SHARE = 0.6, 0.5
#: What the two servers are called.
RESIDENT, SCARCE = "all fit", "some fit"


@dataclass(frozen=True, slots=True)
class Turn:
    """One server's turn; seconds, tokens per second."""

    server: str
    rate: float
    first_p50: float
    first_p99: float
    #: Of each adapter: tokens in the window, and the longest wait for a first token.
    tokens: Mapping[str, float]
    longest: Mapping[str, float]
    #: Requests that were refused or cut off.
    failed: int
    generator: float

    @classmethod
    def of(
        cls,
        server: str,
        answers: Sequence[Answer],
        adapters: Sequence[str],
        window: Window,
        generator: float,
    ) -> "Turn":
        """Sum up what waited, and what came, within a window."""
        waited = waited_within(answers, window)
        waiting, tenants = by_tenant(waited), by_tenant(answers)
        return cls(
            server=server,
            rate=rate_within(answers, window),
            first_p50=first_tokens(waited, 0.5),
            first_p99=first_tokens(waited, 0.99),
            tokens={name: tokens_within(tenants.get(name, ()), window) for name in adapters},
            longest={
                name: max((answer.first for answer in waiting.get(name, ())), default=0.0)
                for name in adapters
            },
            failed=sum(not answer.complete for answer in answers),
            generator=generator,
        )


async def turn(
    server: str, client: Client, fresh: Fresh, adapters: Sequence[str], args: argparse.Namespace
) -> Turn:
    """Let the clients of all adapters ask one server for a while."""
    cpu, began = CpuShare(), time.perf_counter()
    seconds = args.settle + args.seconds
    answers = await closed_loop(client, tuple(adapters) * args.streams, fresh, seconds)
    window = Window(began + args.settle, began + seconds)
    return Turn.of(server, answers, adapters, window, cpu.share)


def promises(turns: Sequence[Turn]) -> list[Promise]:
    """Judge all turns together: means of the rates, sums of what each adapter got."""
    scarce = [one for one in turns if one.server == SCARCE]
    rates = {
        name: fmean(one.rate for one in turns if one.server == name) for name in (RESIDENT, SCARCE)
    }
    got = {name: sum(one.tokens[name] for one in scarce) for name in scarce[0].tokens}
    failed = sum(one.failed for one in turns)
    return [
        at_least(
            "tokens/s with lanes for some, over those with lanes for all:",
            rates[SCARCE] / rates[RESIDENT] if rates[RESIDENT] else float("nan"),
            LEAST_RATE_OF_RESIDENT,
        ),
        at_least(
            "tokens of the adapter that got least, over an equal share:",
            least_of_fair(got, tuple(got)),
            LEAST_OF_FAIR_SHARE,
        ),
        Promise(f"{failed} requests were refused or cut off", not failed),
    ]


def show(turns: Sequence[Turn]) -> None:
    """Print a table, milliseconds and tokens per second, and how long each adapter waited."""
    print(f"{'':9}  tok/s  first p50      p99  longest  generator")
    for one in turns:
        print(
            f"{one.server:9} {one.rate:6.0f} {one.first_p50 * 1e3:10.0f} {one.first_p99 * 1e3:8.0f}"
            f" {max(one.longest.values()) * 1e3:8.0f} {one.generator:10.0%}"
        )
    scarce = [one for one in turns if one.server == SCARCE]
    waits = {name: max(one.longest[name] for one in scarce) for name in scarce[0].longest}
    told = ", ".join(f"{name} {wait:.1f}" for name, wait in waits.items())
    print(f"longest wait for a first token where some fit, seconds: {told}")


async def _run(args: argparse.Namespace, more: Sequence[str]) -> list[Turn]:
    model = ready(args.model, args.dtype)
    adapters = rank16(args.model, args.dtype, args.adapters)
    warm_page_cache(adapters.values())
    work = Work(model.name, tuple(adapters), args.prompt_tokens, args.new_tokens, VOCAB)
    root = f"--adapter-root={args.model / 'rank16'}"
    lanes = {RESIDENT: args.adapters * RANK, SCARCE: args.fit * RANK}
    async with AsyncExitStack() as stack:
        servers = {}
        for name, count in lanes.items():
            flags = [root, f"--max-rows={args.rows}", f"--lanes={count}", *more]
            servers[name] = Server.at(
                await stack.enter_async_context(serving([str(model), *flags]))
            )
        fresh = Fresh(work)
        for server in servers.values():
            with closing(Client(server)) as client:
                await closed_loop(client, work.adapters, fresh, args.warm)
        turns = []
        for n in range(args.rounds):
            for name in list(servers)[:: 1 if n % 2 == 0 else -1]:
                # A server closes connections that were idle while the other had its turn.
                with closing(Client(servers[name])) as client:
                    turns.append(await turn(name, client, fresh, work.adapters, args))
        return turns


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 if all promises hold."""
    args, serve_arguments = _parser().parse_known_args(argv)
    leave_imports_alone()
    turns = run(args.limit, _run(args, serve_arguments))
    show(turns)
    status = conclude(promises(turns))
    record = {
        "dtype": args.dtype,
        "serve": serve_arguments,
        "adapters": args.adapters,
        "fit": args.fit,
        "rows": args.rows,
        "turns": [asdict(one) for one in turns],
    }
    print(f"written to {save(args.out, record)}")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.rotation", allow_abbrev=False)
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER, help="made if missing")
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--adapters", type=int, default=16, help="that are wanted at once")
    parser.add_argument("--fit", type=int, default=4, help="adapters that the few lanes hold")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--streams", type=int, default=2, help="requests of an adapter at once")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--warm", type=float, default=5.0, help="seconds")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds before each window")
    parser.add_argument("--seconds", type=float, default=30.0, help="measured each time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that all may take")
    parser.add_argument("--out", type=Path, default=Path("bench/results/rotation.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
