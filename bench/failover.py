"""`make bench-failover`: one of two shards is killed while 32 streams run. Who notices what?

    python -m bench.failover [--streams 32] [--new-tokens 96]

The same requests are answered once undisturbed, and once with a SIGKILL in the middle; greedy
decoding in float32 must give the same texts. From the kill on, new requests are sent all the time.
Then the shard is started again on its port.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Final

import httpx

from bench.adapters import rank16, warm_page_cache
from bench.load import Work
from bench.model import DEFAULT_FOLDER, VOCAB, ready
from bench.pair import Metrics, Pair
from bench.promises import NotMeasured, Promise, conclude, run
from bench.report import save
from bench.stream import Client, Event, Server, leave_imports_alone
from bench.tallies import statuses
from bench.traffic import Answer, Call, Fresh, Traffic, ask

#: What the project promises: traffic leaves a dead shard within so many seconds.
MOST_LEAVING_S: Final = 2.0
_ADAPTERS: Final = 3
#: Tokens of every stream before the kill.
_SETTLED: Final = 8
_TICK_S: Final = 0.02
_PROBE_TOKENS: Final = 2
_PROBE_EVERY_S: Final = 0.1
#: How long a new request may take.
_FINISH_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One kill; seconds."""

    streams: int
    #: Streams that ended in the texts of the undisturbed run, and those that did not, by status.
    exact: int
    statuses: Mapping[int, int]
    #: What became of requests whose shard went away, as the router counts them.
    replays: Mapping[str, float]
    #: The longest gap between two tokens of any stream, undisturbed and with the kill.
    quiet_gap: float
    longest_gap: float
    #: New requests: (sent after the kill, time to first token), infinite without one.
    probes: tuple[tuple[float, float], ...]
    #: From the restarted shard's "ready" until the router uses it, infinite if never.
    rejoined: float

    @property
    def left_after(self) -> float:
        """When the last new request was sent that failed; 0 if none did."""
        return max((sent for sent, first in self.probes if first == inf), default=0.0)

    @property
    def first_new(self) -> float:
        """From the kill to the first token of any new request."""
        return min((sent + first for sent, first in self.probes), default=inf)


def promises(measured: Measured) -> list[Promise]:
    """Judge a kill."""
    failed = sum(first == inf for _, first in measured.probes)
    return [
        Promise(
            f"{measured.exact} of {measured.streams} streams ended in their exact texts",
            measured.exact == measured.streams,
        ),
        Promise(
            f"{failed} of {len(measured.probes)} new requests failed, the last one sent "
            f"{measured.left_after:.1f} s after the kill, at most {MOST_LEAVING_S:.0f} s",
            measured.left_after <= MOST_LEAVING_S and bool(measured.probes),
        ),
        Promise(
            f"the restarted shard is used {measured.rejoined:.1f} s after it was ready",
            measured.rejoined < inf,
        ),
    ]


def longest_gap(answers: Sequence[Answer]) -> float:
    """Return the longest time between two tokens of any answer."""
    gaps = (later - earlier for a in answers for earlier, later in pairwise(a.times))
    return max(gaps, default=0.0)


def exact(answers: Sequence[Answer], expected: Mapping[str, str]) -> int:
    """Count the answers that came to their end with the expected text of their tenant."""
    return sum(a.complete and a.text == expected[a.tenant] for a in answers)


class Streams:
    """Requests that are all sent at once, and can be watched."""

    def __init__(self, client: Client, calls: Sequence[Call]) -> None:
        self._events: list[list[Event]] = [[] for _ in calls]
        pairs = zip(calls, self._events, strict=True)
        self._tasks = [asyncio.create_task(ask(client, call, events)) for call, events in pairs]

    async def wait_for(self, tokens: int) -> None:
        """Return when every stream has so many tokens; NotMeasured if one ended before."""
        while min(map(len, self._events)) < tokens:
            for answer in (task.result() for task in self._tasks if task.done()):
                raise NotMeasured(
                    f"{answer.tenant} ended with status {answer.status} and {answer.counted} "
                    f"tokens before all had {tokens}; ask for more --new-tokens if it was complete"
                )
            await asyncio.sleep(_TICK_S)

    async def answers(self) -> list[Answer]:
        """Return all answers."""
        return await asyncio.gather(*self._tasks)


async def probe(client: Client, make: Fresh, models: Sequence[str], seconds: float) -> Traffic:
    """Send a new request ten times a second; return when all have ended."""
    traffic = Traffic(client)
    times = [n * _PROBE_EVERY_S for n in range(int(seconds / _PROBE_EVERY_S))]
    await traffic.offer([(at, models[n % len(models)]) for n, at in enumerate(times)], make)
    await traffic.finish(_FINISH_S)
    return traffic


async def measure(pair: Pair, work: Work, args: argparse.Namespace) -> Measured:
    """Run the same streams undisturbed and with a kill, then start the dead shard again."""
    models = (work.base, *work.adapters)
    fresh = Fresh(work)
    calls = [
        replace(fresh(models[n % len(models)]), tenant=f"stream {n}") for n in range(args.streams)
    ]
    async with httpx.AsyncClient(base_url=pair.url, timeout=60) as http:
        metrics = Metrics(http)
        for address in pair.addresses:
            if await metrics.wait_up(address, args.rejoin) == inf:
                raise NotMeasured(f"the router does not say that it uses {address}")
        with closing(Client(Server.at(pair.url))) as client:
            undisturbed = await Streams(client, calls).answers()
            streams = Streams(client, calls)
            await streams.wait_for(_SETTLED)
            killed = time.perf_counter()
            await pair.kill()
            new = Fresh(replace(work, new_tokens=_PROBE_TOKENS), first_seed=1_000_000)
            probes = await probe(client, new, models, args.probe)
            answers = await streams.answers()
            replays = await metrics.replays()
            await pair.restart()
            rejoined = await metrics.wait_up(pair.addresses[0], args.rejoin)
    return Measured(
        streams=args.streams,
        exact=exact(answers, {answer.tenant: answer.text for answer in undisturbed}),
        statuses=statuses(answers),
        replays=replays,
        quiet_gap=longest_gap(undisturbed),
        longest_gap=longest_gap(answers),
        probes=tuple((answer.sent - killed, answer.first) for answer in probes.answers),
        rejoined=rejoined,
    )


def show(measured: Measured) -> None:
    """Print what the verdicts rest on."""
    print(f"streams by status (200 = came to its end, 0 = cut off): {dict(measured.statuses)}")
    print(f"requests that lost their shard, as the router counts: {dict(measured.replays)}")
    print(
        f"longest gap between two tokens of a stream: {measured.quiet_gap * 1e3:.0f} ms "
        f"undisturbed, {measured.longest_gap * 1e3:.0f} ms with the kill"
    )
    print(f"first token of a new request {measured.first_new:.2f} s after the kill")


async def _run(args: argparse.Namespace, more: Sequence[str]) -> Measured:
    model = ready(args.model, args.dtype)
    adapters = rank16(args.model, args.dtype, _ADAPTERS)
    warm_page_cache(adapters.values())
    work = Work(model.name, tuple(adapters), args.prompt_tokens, args.new_tokens, VOCAB)
    flags = [
        str(model),
        f"--adapter-root={args.model / 'rank16'}",
        f"--threads={args.threads}",
        # One shard takes all streams and all new requests.
        f"--max-rows={2 * args.streams}",
        *more,
    ]
    async with Pair.running(flags) as pair:
        return await measure(pair, work, args)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 if all promises hold."""
    args, shard_arguments = _parser().parse_known_args(argv)
    leave_imports_alone()
    measured = run(args.limit, _run(args, shard_arguments))
    show(measured)
    status = conclude(promises(measured))
    record = {"dtype": args.dtype, "shard": shard_arguments, "measured": asdict(measured)}
    print(f"written to {save(args.out, record)}")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.failover", allow_abbrev=False)
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER, help="made if missing")
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="f32")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="of each shard")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--probe", type=float, default=5.0, help="seconds of new requests")
    parser.add_argument("--rejoin", type=float, default=30.0, help="seconds to wait for a shard")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that all may take")
    parser.add_argument("--out", type=Path, default=Path("bench/results/failover.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
