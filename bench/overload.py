"""`make bench-overload MINUTES=5`: ten times more is asked for than can be done, for minutes.

    python -m bench.overload [--minutes 5] [--times 10] [serve's own options]

What the server can do at most is measured first, with clients that wait for their answers; then
time to first token at half of it. Then requests arrive at random at ten times that rate, whatever
comes back, and no refusal is tried again. Then half of it again: how long until that is as before?
At last short overloads and what the server can do take turns: each overload, the long one too, is
compared with what the server could do before it and after it, since a shared machine changes within
a minute, and the median counts. There are many turns because one comparison alone is right to about
a tenth.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Final

from bench.adapters import rank16, warm_page_cache
from bench.figures import percentile
from bench.load import Work
from bench.model import DEFAULT_FOLDER, VOCAB, ready
from bench.overload_figures import NORMAL, Measured, answered, promises, refusals, show
from bench.processes import sampling
from bench.promises import conclude, run
from bench.report import save
from bench.stream import Client, Server, leave_imports_alone
from bench.tallies import (
    capacity,
    first_tokens,
    growth,
    rate_within,
    recovered_after,
    statuses,
)
from bench.traffic import CpuShare, Fresh, Traffic, closed_loop, poisson
from bench.windows import Window
from demo.serving import serving

#: How long what was accepted may take to end.
_FINISH_S: Final = 60.0


class Phases:
    """The phases of a run, one after another, on one server."""

    def __init__(self, client: Client, work: Work, args: argparse.Namespace) -> None:
        self._client = client
        self._work = work
        self._args = args
        self._fresh = Fresh(work, each_token=False, spread=args.spread)

    async def run(self) -> Measured:
        """Go through all. What was accepted in the overload ends while the load is half again."""
        args, client = self._args, self._client
        await closed_loop(client, self._work.adapters, self._fresh, args.warm)
        peaks = [await self._peak()]
        can = peaks[0] / self._work.new_tokens
        print(
            f"peak {peaks[0]:.0f} tokens/s = {can:.1f} requests/s; at least {self._lasts():.0f} s"
        )
        normal = first_tokens((await self._half(can, seed=1)).answers, 0.5)
        seconds = 60 * args.minutes
        async with sampling(args.sample) as samples:
            over, cpu = Traffic(client), CpuShare()
            # The queue must fill first; what comes after the arrivals have ended is no overload.
            window = await self._overload(over, can, seconds, args.settle, seed=2)
            share = cpu.share
        after = await self._half(can, seed=3)
        await over.finish(_FINISH_S)
        goodputs = [rate_within(answered(over.answers), window)]
        peaks.append(await self._peak())
        for turn in range(args.turns):
            goodputs.append(await self._goodput(can, seed=4 + turn))
            peaks.append(await self._peak())
        accepted, refused = answered(over.answers), refusals(over.answers)
        began = window.begin - args.settle
        settled = began + min(60.0, seconds / 2)
        return Measured(
            peaks=peaks,
            goodputs=goodputs,
            can=can,
            offered=len(over.answers) / (window.end - began),
            normal_p50=normal,
            accepted_p50=first_tokens(accepted, 0.5),
            accepted_p99=first_tokens(accepted, 0.99),
            refusals_p50=percentile(refused, 0.5),
            refusals_p99=percentile(refused, 0.99) if refused else inf,
            recovery=recovered_after(after.answers, window.end, normal, NORMAL),
            statuses=statuses(over.answers),
            memory={role: growth(taken, settled) for role, taken in samples.memory.items()},
            generator=share,
        )

    def _lasts(self) -> float:
        args = self._args
        return float(60 * args.minutes + 2 * args.half + 2 * (args.turns + 1) * args.peak)

    def _arrivals(self, rate: float, seconds: float, seed: int) -> list[tuple[float, str]]:
        adapters = self._work.adapters
        times = poisson(rate, seconds, seed)
        return [(at, adapters[n % len(adapters)]) for n, at in enumerate(times)]

    async def _peak(self) -> float:
        """Return the tokens per second of clients that wait for their answers."""
        adapters, seconds = self._work.adapters, self._args.peak
        names = [adapters[n % len(adapters)] for n in range(self._args.clients)]
        began = time.perf_counter()
        answers = await closed_loop(self._client, names, self._fresh, seconds)
        return capacity(answers, Window(began + seconds / 4, began + seconds))

    async def _overload(
        self, over: Traffic, can: float, seconds: float, settle: float, seed: int
    ) -> Window:
        """Offer more than the server can do; return from when to when, but for the beginning."""
        arrivals = self._arrivals(can * self._args.times, seconds, seed)
        # Made before: it would be half of what the generator costs.
        calls = iter([self._fresh(tenant) for _, tenant in arrivals])
        began = time.perf_counter()
        await over.offer(arrivals, lambda _: next(calls))
        return Window(began + settle, time.perf_counter())

    async def _goodput(self, can: float, seed: int) -> float:
        """Return the tokens per second of an overload that is as short as a look at the peak."""
        over, seconds = Traffic(self._client), self._args.peak
        window = await self._overload(over, can, seconds, seconds / 4, seed)
        await over.finish(_FINISH_S)
        return rate_within(answered(over.answers), window)

    async def _half(self, can: float, seed: int) -> Traffic:
        traffic = Traffic(self._client)
        await traffic.offer(self._arrivals(can / 2, self._args.half, seed), self._fresh)
        await traffic.finish(_FINISH_S)
        return traffic


async def _run(args: argparse.Namespace, more: Sequence[str]) -> Measured:
    model = ready(args.model, args.dtype)
    adapters = rank16(args.model, args.dtype, args.adapters)
    warm_page_cache(adapters.values())
    work = Work(model.name, tuple(adapters), args.prompt_tokens, args.new_tokens, VOCAB)
    flags = [
        f"--adapter-root={args.model / 'rank16'}",
        f"--max-rows={args.max_rows}",
        f"--max-queue={args.max_queue}",
        f"--kv-memory={args.kv_memory}",
    ]
    async with serving([str(model), *flags, *more]) as url:
        with closing(Client(Server.at(url))) as client:
            return await Phases(client, work, args).run()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 if all promises hold."""
    args, serve_arguments = _parser().parse_known_args(argv)
    leave_imports_alone()
    limit = 60 * args.minutes + args.limit + 4 * args.turns * args.peak
    measured = run(limit, _run(args, serve_arguments))
    show(measured)
    status = conclude(promises(measured))
    record = {"dtype": args.dtype, "serve": serve_arguments, "measured": asdict(measured)}
    print(f"written to {save(args.out, record)}")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.overload", allow_abbrev=False)
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER, help="made if missing")
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--minutes", type=float, default=5.0, help="of overload")
    parser.add_argument("--times", type=float, default=10.0, help="what it can do, offered")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--spread", type=int, default=48, help="answers differ by so many tokens")
    parser.add_argument("--max-rows", type=int, default=8)
    parser.add_argument("--max-queue", type=int, default=8, help="a full one drains in seconds")
    parser.add_argument("--kv-memory", type=int, default=128 << 20, help="full before minute one")
    parser.add_argument("--clients", type=int, default=10, help="that find the peak, rows and more")
    parser.add_argument("--warm", type=float, default=5.0, help="seconds")
    parser.add_argument("--peak", type=float, default=20.0, help="seconds for each look at it")
    parser.add_argument("--turns", type=int, default=20, help="of a short overload and the peak")
    parser.add_argument("--half", type=float, default=25.0, help="seconds at half load, twice")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds of overload not counted")
    parser.add_argument("--sample", type=float, default=1.0, help="seconds between looks at memory")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds beside the overloads")
    parser.add_argument("--out", type=Path, default=Path("bench/results/overload.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
