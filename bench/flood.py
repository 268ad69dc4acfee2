"""`make bench-flood`: does one tenant that floods hurt those that send their fair share?

    python -m bench.flood [--tenants 8] [--flood 10] [--seconds 60] [serve's own options]

Tenants are adapters. All send at random times, each an equal share of what the server can do (of
`--load` of it), which is measured first. Then the last one sends ten times as much. The same
again as one flow, by an API key that all send (`--weights`): then the router serves whoever came
first. Each of the three is measured in every round; prompts are never the same, arrival times are.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain
from math import inf, nan
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Final

from bench.adapters import rank16, warm_page_cache
from bench.figures import percentile
from bench.load import Work
from bench.model import DEFAULT_FOLDER, VOCAB, ready
from bench.promises import Promise, at_least, at_most, conclude, run
from bench.report import save
from bench.stream import Client, Server, leave_imports_alone
from bench.tallies import by_tenant, capacity, rate_within, sent_within, served, statuses
from bench.traffic import Answer, CpuShare, Fresh, Traffic, closed_loop, poisson, together
from bench.windows import Window
from demo.serving import serving

#: What the project promises.
MOST_P99_OF_FAIR, LEAST_RATE_OF_FIRST_COME = 2.0, 0.95
#: What the three measurements of a round are called.
NAMES = FAIR, FLOOD, FIRST_COME = "fair share", "flood", "first come"
_ONE_FLOW_KEY: Final = "everybody"
_STEP_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Who sends how much; the last tenant is the one that floods. Seconds, requests per second."""

    tenants: tuple[str, ...]
    share: float
    flood: float
    settle: float
    seconds: float
    #: Load that goes on after what is measured, so that the last measured request is under it.
    tail: float

    @property
    def lasts(self) -> float:
        """Of one measurement."""
        return self.settle + self.seconds + self.tail

    def arrivals(self, name: str, seed: int) -> list[tuple[float, str]]:
        """Return when who sends: the victims at the same times whatever the last one does."""
        rates = [self.share] * len(self.tenants)
        if name != FAIR:
            rates[-1] *= self.flood
        return together(
            {
                tenant: poisson(rate, self.lasts, 100 * seed + n)
                for n, (tenant, rate) in enumerate(zip(self.tenants, rates, strict=True))
            }
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement: what the victims and the one that floods saw; seconds, tokens per second."""

    name: str
    #: Times to first token of victims' requests, infinite where there was none.
    victims: tuple[float, ...]
    flooder: tuple[float, ...]
    rate: float
    statuses: Mapping[int, int]
    #: What the generator itself took of one core.
    generator: float
    #: Tokens that each tenant had got, by seconds.
    served: Mapping[str, list[float]]

    @property
    def unserved(self) -> int:
        """Victims' requests that were refused, cut off, or had no token when the load ended."""
        return self.victims.count(inf)

    @classmethod
    def of(
        cls, name: str, answers: Sequence[Answer], plan: Plan, window: Window, generator: float
    ) -> "Measured":
        """Sum up what was sent, and what came, within a window."""
        asked, tenants = by_tenant(sent_within(answers, window)), by_tenant(answers)
        firsts = {name: [answer.first for answer in asked.get(name, ())] for name in plan.tenants}
        return cls(
            name=name,
            flooder=tuple(firsts.pop(plan.tenants[-1])),
            victims=tuple(chain.from_iterable(firsts.values())),
            rate=rate_within(answers, window),
            statuses=statuses(list(chain.from_iterable(asked.values()))),
            generator=generator,
            served={name: served(tenants.get(name, ()), window, _STEP_S) for name in plan.tenants},
        )


async def measure(client: Client, plan: Plan, name: str, fresh: Fresh, seed: int) -> Measured:
    """Send one plan's traffic and call off what is left at its end."""
    traffic, cpu, began = Traffic(client), CpuShare(), time.perf_counter()
    await traffic.offer(plan.arrivals(name, seed), fresh)
    await asyncio.sleep(max(0.0, began + plan.lasts - time.perf_counter()))
    share = cpu.share
    traffic.call_off()
    window = Window(began + plan.settle, began + plan.settle + plan.seconds)
    return Measured.of(name, traffic.answers, plan, window, share)


def promises(rounds: Sequence[Measured]) -> list[Promise]:
    """Judge all rounds together: percentiles over all victims' requests, means of the rates."""
    p99 = {name: _p99(rounds, name) for name in (FAIR, FLOOD)}
    rates = {name: _rate(rounds, name) for name in (FLOOD, FIRST_COME)}
    unserved = sum(one.unserved for one in rounds if one.name == FLOOD)
    return [
        at_most(
            "victims' p99 to first token in the flood, over that in the fair share:",
            p99[FLOOD] / p99[FAIR] if p99[FAIR] else nan,
            MOST_P99_OF_FAIR,
        ),
        at_least(
            "tokens/s in the flood, over those of first come first served:",
            rates[FLOOD] / rates[FIRST_COME] if rates[FIRST_COME] else nan,
            LEAST_RATE_OF_FIRST_COME,
        ),
        Promise(f"{unserved} of the victims' requests got nothing in the flood", not unserved),
    ]


def _p99(rounds: Sequence[Measured], name: str) -> float:
    return percentile([first for one in rounds if one.name == name for first in one.victims], 0.99)


def _rate(rounds: Sequence[Measured], name: str) -> float:
    found = [one.rate for one in rounds if one.name == name]
    return fmean(found) if found else 0.0


def show(rounds: Sequence[Measured]) -> None:
    """Print a table: milliseconds, tokens per second."""
    print(f"{'':12} victims  first p50      p99  unserved  flooder p50   tok/s  generator")
    for one in rounds:
        p50, p99, last = (
            1e3 * percentile(values, share)
            for values, share in ((one.victims, 0.5), (one.victims, 0.99), (one.flooder, 0.5))
        )
        print(
            f"{one.name:12} {len(one.victims):7} {p50:10.0f} {p99:8.0f} {one.unserved:9} "
            f"{last:12.0f} {one.rate:7.0f} {one.generator:10.0%}"
        )


async def _run(args: argparse.Namespace, more: Sequence[str]) -> tuple[Plan, list[Measured]]:
    model = ready(args.model, args.dtype)
    adapters = rank16(args.model, args.dtype, args.tenants)
    warm_page_cache(adapters.values())
    work = Work(model.name, tuple(adapters), args.prompt_tokens, args.new_tokens, VOCAB)
    with TemporaryDirectory(prefix="loralane-bench-") as folder:
        weights = Path(folder) / "weights.json"
        weights.write_text(json.dumps({"keys": {_ONE_FLOW_KEY: 1}}), encoding="utf-8")
        flags = [f"--adapter-root={args.model / 'rank16'}", f"--weights={weights}", *more]
        async with serving([str(model), *flags]) as url:
            with closing(Client(Server.at(url))) as client:
                plan = await _plan(client, work, args)
                return plan, await _rounds(client, plan, work, args)


async def _plan(client: Client, work: Work, args: argparse.Namespace) -> Plan:
    """Measure what the server can do, and share a part of it out."""
    fresh = Fresh(work, spread=args.spread)
    await closed_loop(client, work.adapters, fresh, args.warm)
    began = time.perf_counter()
    answers = await closed_loop(client, work.adapters * args.streams, fresh, args.capacity)
    can = capacity(answers, Window(began, began + args.capacity)) / work.new_tokens
    share = args.load * can / len(work.adapters)
    print(f"the server can do {can:.2f} requests/s; a tenant's fair share is {share:.2f}")
    return Plan(work.adapters, share, args.flood, args.settle, args.seconds, args.tail)


async def _rounds(
    client: Client, plan: Plan, work: Work, args: argparse.Namespace
) -> list[Measured]:
    key = {"authorization": f"Bearer {_ONE_FLOW_KEY}"}
    # Prompts of one are never sent in another: the prefix cache would know them.
    fresh = {
        name: Fresh(
            work,
            key if name == FIRST_COME else {},
            first_seed=n * 100_000_000,
            spread=args.spread,
        )
        for n, name in enumerate(NAMES, start=1)
    }
    done = []
    for n in range(args.rounds):
        for name in NAMES[n % 3 :] + NAMES[: n % 3]:
            done.append(await measure(client, plan, name, fresh[name], n + 1))
            await asyncio.sleep(args.pause)
    return done


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 if all promises hold."""
    args, serve_arguments = _parser().parse_known_args(argv)
    leave_imports_alone()
    plan, rounds = run(args.limit, _run(args, serve_arguments))
    show(rounds)
    status = conclude(promises(rounds))
    record = {
        "dtype": args.dtype,
        "serve": serve_arguments,
        "plan": asdict(plan),
        "rounds": [asdict(one) for one in rounds],
    }
    print(f"written to {save(args.out, record)}")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.flood", allow_abbrev=False)
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER, help="made if missing")
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--tenants", type=int, default=8, help="each an adapter; the last floods")
    parser.add_argument("--flood", type=float, default=10.0, help="times its fair share")
    parser.add_argument("--load", type=float, default=0.95, help="all fair shares, of capacity")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--spread", type=int, default=12, help="answers differ by so many tokens")
    parser.add_argument("--streams", type=int, default=4, help="of a tenant, to find the capacity")
    parser.add_argument("--warm", type=float, default=5.0, help="seconds")
    parser.add_argument("--capacity", type=float, default=20.0, help="seconds")
    parser.add_argument("--settle", type=float, default=10.0, help="seconds before each window")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured each time")
    parser.add_argument("--tail", type=float, default=8.0, help="seconds of load after it")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between measurements")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that all may take")
    parser.add_argument("--out", type=Path, default=Path("bench/results/flood.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
