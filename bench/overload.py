"""`make bench-overload MINUTES=5`: ten times more is asked for than can be done, for minutes.

    python -m bench.overload [--minutes 5] [--times 10] [serve's own options]

What the server can do at most is measured first, with clients that wait for their answers; then
time to first token at half of it. Then requests arrive at random at ten times that rate, whatever
comes back, and no refusal is tried again. Then half of it again: how long until that is as before?
At last, what it can do once more: the peak is the mean of both, so that a machine which became
slower or faster meanwhile counts neither for the server nor against it.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Final

from bench.adapters import rank16, warm_page_cache
from bench.figures import percentile
from bench.load import Work
from bench.model import DEFAULT_FOLDER, VOCAB, ready
from bench.processes import sampling
from bench.promises import Promise, at_least, at_most, conclude, run
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
from bench.traffic import Answer, CpuShare, Fresh, Traffic, closed_loop, poisson
from bench.windows import Window
from demo.serving import serving

#: What the project promises.
LEAST_GOODPUT_OF_PEAK, MOST_REFUSAL_MS, MOST_RECOVERY_S = 0.95, 50.0, 5.0
#: What "flat" and "as before" mean here.
MOST_GROWTH, NORMAL = 1.05, 1.5
_OK: Final = 200
_REFUSED: Final = 429
#: How long what was accepted may take to end.
_FINISH_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Measured:
    """All phases; seconds, tokens per second, bytes."""

    peak_before: float
    peak_after: float
    #: Requests per second: what the server can do, and what was offered.
    can: float
    offered: float
    goodput: float
    #: Times to first token at half load before, and of what was accepted in the overload.
    normal_p50: float
    accepted_p50: float
    accepted_p99: float
    refusals_p50: float
    refusals_p99: float
    recovery: float
    #: Of all that was sent in the overload, by status; 0 = cut off.
    statuses: Mapping[int, int]
    #: Of each process: after the first minute, at the end.
    memory: Mapping[str, tuple[int, int]]
    #: What the generator itself took of one core in the overload.
    generator: float

    @property
    def peak(self) -> float:
        """What the server can do, around the overload."""
        return (self.peak_before + self.peak_after) / 2


def promises(measured: Measured) -> list[Promise]:
    """Judge a run."""
    refused = measured.statuses.get(_REFUSED, 0)
    odd = sum(measured.statuses.values()) - measured.statuses.get(_OK, 0) - refused
    found = [
        at_least(
            "goodput in the overload, over the peak:",
            measured.goodput / measured.peak if measured.peak else 0.0,
            LEAST_GOODPUT_OF_PEAK,
        ),
        at_most("refusals' p99:", measured.refusals_p99 * 1e3, MOST_REFUSAL_MS, " ms"),
        at_most("first token as before after:", measured.recovery, MOST_RECOVERY_S, " s"),
        Promise(f"{refused} refused, {odd} neither answered nor refused", refused > 0 and not odd),
    ]
    for role, (before, after) in measured.memory.items():
        what = f"{role}'s memory at the end, over that after the first minute:"
        found.append(at_most(what, after / before, MOST_GROWTH))
    return found


def refusals(answers: Sequence[Answer]) -> list[float]:
    """Return how long each refusal took, to its last byte."""
    return [answer.ended - answer.sent for answer in answers if answer.status == _REFUSED]


class Phases:
    """The phases of a run, one after another, on one server."""

    def __init__(self, client: Client, work: Work, args: argparse.Namespace) -> None:
        self._client = client
        self._work = work
        self._args = args
        self._fresh = Fresh(work, each_token=False, spread=args.spread)

    async def run(self) -> Measured:
        """Go through all. What was accepted in the overload ends while the load is half again."""
        await closed_loop(self._client, self._work.adapters, self._fresh, self._args.warm)
        before, clients = await self._peak()
        can = before / self._work.new_tokens
        print(f"peak {before:.0f} tokens/s = {can:.1f} requests/s; all takes {self._lasts():.0f} s")
        normal = first_tokens((await self._half(can, seed=1)).answers, 0.5)
        seconds = 60 * self._args.minutes
        arrivals = self._arrivals(can * self._args.times, seconds, seed=2)
        # Made before: it would be half of what the generator costs.
        calls = iter([self._fresh(tenant) for _, tenant in arrivals])
        async with sampling(self._args.sample) as samples:
            over, cpu, began = Traffic(self._client), CpuShare(), time.perf_counter()
            await over.offer(arrivals, lambda _: next(calls))
            end, share = time.perf_counter(), cpu.share
        after = await self._half(can, seed=3)
        await over.finish(_FINISH_S)
        peak_after = await self._rate(clients)
        # The queue must fill first; what comes after the arrivals have ended is not overload.
        window = Window(began + self._args.settle, end)
        accepted = [answer for answer in over.answers if answer.status == _OK]
        refused = refusals(over.answers)
        settled = began + min(60.0, seconds / 2)
        return Measured(
            peak_before=before,
            peak_after=peak_after,
            can=can,
            offered=len(over.answers) / (end - began),
            goodput=rate_within(accepted, window),
            normal_p50=normal,
            accepted_p50=first_tokens(accepted, 0.5),
            accepted_p99=first_tokens(accepted, 0.99),
            refusals_p50=percentile(refused, 0.5),
            refusals_p99=percentile(refused, 0.99) if refused else inf,
            recovery=recovered_after(after.answers, end, normal, NORMAL),
            statuses=statuses(over.answers),
            memory={role: growth(taken, settled) for role, taken in samples.memory.items()},
            generator=share,
        )

    def _lasts(self) -> float:
        return float(60 * self._args.minutes + 2 * self._args.half + self._args.peak)

    def _arrivals(self, rate: float, seconds: float, seed: int) -> list[tuple[float, str]]:
        adapters = self._work.adapters
        times = poisson(rate, seconds, seed)
        return [(at, adapters[n % len(adapters)]) for n, at in enumerate(times)]

    async def _peak(self) -> tuple[float, int]:
        """Return the most tokens per second that a number of clients gets out of it; the number."""
        return max([(await self._rate(n), n) for n in map(int, self._args.clients.split(","))])

    async def _rate(self, clients: int) -> float:
        """Return the tokens per second of so many clients that wait for their answers."""
        names = [self._work.adapters[n % len(self._work.adapters)] for n in range(clients)]
        began = time.perf_counter()
        answers = await closed_loop(self._client, names, self._fresh, self._args.peak)
        return capacity(answers, Window(began + self._args.peak / 4, began + self._args.peak))

    async def _half(self, can: float, seed: int) -> Traffic:
        traffic = Traffic(self._client)
        await traffic.offer(self._arrivals(can / 2, self._args.half, seed), self._fresh)
        await traffic.finish(_FINISH_S)
        return traffic


def show(measured: Measured) -> None:
    """Print what the verdicts rest on."""
    ms = 1e3
    print(
        f"peak {measured.peak_before:.0f} and {measured.peak_after:.0f} tokens/s; "
        f"offered {measured.offered:.1f} requests/s, "
        f"{measured.offered / measured.can:.1f} times what it can do; "
        f"goodput {measured.goodput:.0f} tokens/s"
    )
    print(
        f"first token, ms: {measured.normal_p50 * ms:.0f} at half load, in the overload p50 "
        f"{measured.accepted_p50 * ms:.0f}, p99 {measured.accepted_p99 * ms:.0f}"
    )
    print(
        f"refusals, ms: p50 {measured.refusals_p50 * ms:.1f}, p99 {measured.refusals_p99 * ms:.1f};"
        f" answers by status: {dict(measured.statuses)}"
    )
    for role, (before, after) in measured.memory.items():
        print(
            f"{role}: {before / 2**20:.1f} MiB after the first minute, {after / 2**20:.1f} at last"
        )
    print(f"the generator took {measured.generator:.0%} of a core")


async def _run(args: argparse.Namespace, more: Sequence[str]) -> Measured:
    model = ready(args.model, args.dtype)
    adapters = rank16(args.model, args.dtype, args.adapters)
    warm_page_cache(adapters.values())
    work = Work(model.name, tuple(adapters), args.prompt_tokens, args.new_tokens, VOCAB)
    flags = [
        f"--adapter-root={args.model / 'rank16'}",
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
    limit = 60 * args.minutes + args.limit
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
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--spread", type=int, default=24, help="answers differ by so many tokens")
    parser.add_argument("--max-queue", type=int, default=16, help="a full one drains in seconds")
    parser.add_argument("--kv-memory", type=int, default=128 << 20, help="full before minute one")
    parser.add_argument("--clients", default="32,40", help="numbers of them to find the peak")
    parser.add_argument("--warm", type=float, default=5.0, help="seconds")
    parser.add_argument("--peak", type=float, default=40.0, help="seconds for each number")
    parser.add_argument("--half", type=float, default=30.0, help="seconds at half load, twice")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds of overload not counted")
    parser.add_argument("--sample", type=float, default=1.0, help="seconds between looks at memory")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds beside the overload")
    parser.add_argument("--out", type=Path, default=Path("bench/results/overload.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
