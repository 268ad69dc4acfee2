"""`make bench-storm`: do 50 cold adapters, loaded in a row, disturb 16 streams that decode?

    python -m bench.storm [--storms 6] [--by load|request] [serve's own options]

Twice, on servers of their own: with lanes for all adapters, and with lanes for some, so that each
load evicts another. Storms lie between quiet windows of the same streams, and are compared with
those. Between storms the adapters are unloaded, so that all are cold again.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

import httpx

from bench.adapters import RANK, rank16, warm_page_cache
from bench.load import Work
from bench.model import DEFAULT_FOLDER, VOCAB, make
from bench.report import save
from bench.stream import Client, Event, Server, leave_imports_alone
from bench.windows import Comparison, Medians, Window, compare, sum_up, worst
from demo.serving import serving

#: What the project promises.
MOST_P99_OF_QUIET, MOST_STEPS = 1.3, 2.0
STREAMS: Final = 16
#: Adapters that the streams use, resident all the time.
_USED: Final = 8
_PROMPT_TOKENS: Final = 64
#: As many as the model's context takes: a stream must outlive its windows.
_NEW_TOKENS: Final = 1900
#: Tokens of every stream before anything is measured.
_SETTLED: Final = 8
_TICK_S: Final = 0.02
_PAUSE_S: Final = 1.0
_WORST: Final = 10


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to serve."""

    name: Literal["room", "eviction"]
    lanes: int

    @classmethod
    def both(cls, adapters: int) -> "tuple[Setting, Setting]":
        """Return lanes for all adapters, and for those in use and a few more."""
        return (
            cls("room", (_USED + adapters) * RANK),
            cls("eviction", (_USED + min(8, adapters)) * RANK),
        )


class Streams:
    """Streams that decode until the block ends, and the times of their tokens."""

    def __init__(self, client: Client, work: Work) -> None:
        self._client = client
        self._work = work
        self._events: list[list[Event]] = [[] for _ in range(STREAMS)]
        self._tasks: list[asyncio.Task[object]] = []

    @asynccontextmanager
    async def running(self, first_seed: int) -> AsyncIterator[None]:
        """Start all and wait until they decode; end them with the block. Raises StreamFailed."""
        for n, events in enumerate(self._events):
            body = self._work.body(self._work.adapters[n % _USED], first_seed + n, _NEW_TOKENS)
            # With log-probabilities every token has an event: no text is held back.
            body = body[:-1] + b', "logprobs": 0}'
            follow = self._client.follow("/v1/completions", body, events)
            self._tasks.append(asyncio.create_task(follow))
        while min(map(len, self._events)) < _SETTLED:
            self.check()
            await asyncio.sleep(_TICK_S)
        try:
            yield
            self.check()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raise what ended a stream; RuntimeError if one came to its end."""
        for task in self._tasks:
            if task.done():
                task.result()
                raise RuntimeError("a stream ended too early; ask for fewer adapters a storm")

    @property
    def times(self) -> list[list[float]]:
        """When each stream's tokens came."""
        return [[at for at, _ in events] for events in self._events]


async def storm(http: httpx.AsyncClient, names: Sequence[str], by: str) -> Window:
    """Load adapters one after another, by the admin route or each by a short request."""
    began = time.perf_counter()
    for name in names:
        if by == "load":
            reply = await http.post("/v1/adapters", json={"name": name, "reference": name})
        else:
            body = {"model": name, "prompt": [17] * 8, "max_tokens": 1, "temperature": 0}
            reply = await http.post("/v1/completions", json=body)
        reply.raise_for_status()
    return Window(began, time.perf_counter())


async def quiet(seconds: float) -> Window:
    """Let the streams decode alone."""
    began = time.perf_counter()
    await asyncio.sleep(seconds)
    return Window(began, time.perf_counter())


async def forget(http: httpx.AsyncClient, names: Sequence[str]) -> None:
    """Unload adapters, so that they are cold again."""
    for name in names:
        (await http.delete(f"/v1/adapters/{name}")).raise_for_status()


@dataclass(frozen=True, slots=True)
class Measured:
    """All storms of one setting."""

    setting: Setting
    storms: tuple[Comparison, ...]
    #: Seconds of each storm.
    lasted: tuple[float, ...]
    #: Of each storm, one stream's longest gaps: (seconds since the storm began, length).
    worst: tuple[list[tuple[float, float]], ...]

    @property
    def medians(self) -> Medians:
        """Sum up."""
        return sum_up(self.storms)


async def measure(
    url: str, setting: Setting, work: Work, names: Sequence[str], args: argparse.Namespace
) -> Measured:
    """Measure storms, each among streams of its own. Raises StreamFailed, httpx.HTTPError."""
    storms, lasted, worst_gaps = [], [], []
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        for n in range(args.storms + 1):
            with closing(Client(Server.at(url))) as client:
                streams = Streams(client, work)
                async with streams.running(first_seed=1000 * n):
                    before = await quiet(args.quiet)
                    window = await storm(http, names, args.by)
                    after = await quiet(args.quiet)
            await forget(http, names)
            await asyncio.sleep(_PAUSE_S)
            if n:  # the first one warms up
                storms.append(compare(streams.times, before, window, after))
                lasted.append(window.end - window.begin)
                worst_gaps.append(worst(streams.times[0], window, _WORST))
    return Measured(setting, tuple(storms), tuple(lasted), tuple(worst_gaps))


def show(measured: Sequence[Measured]) -> None:
    """Print a table: times in milliseconds, gaps in median quiet steps; and what holds."""
    print("lanes      quiet p50     p99  storm p50     p99   p99 of quiet  largest gap  when quiet")
    for one in measured:
        m = one.medians
        print(
            f"{one.setting.name:9}{m.quiet_p50 * 1e3:11.1f}{m.quiet_p99 * 1e3:8.1f}"
            f"{m.storm_p50 * 1e3:11.1f}{m.storm_p99 * 1e3:8.1f}{m.p99_of_quiet:15.2f}"
            f"{m.largest_in_steps:7.2f} steps{m.quiet_largest_in_steps:6.2f} steps"
        )
    for one in measured:
        m = one.medians
        for what, value, most in (
            ("p99 during a storm / quiet", m.p99_of_quiet, MOST_P99_OF_QUIET),
            ("largest gap in steps", m.largest_in_steps, MOST_STEPS),
        ):
            holds = "holds" if value <= most else "DOES NOT HOLD"
            print(f"{holds}, {one.setting.name}: {what} = {value:.2f}, at most {most}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args, serve_arguments = _parser().parse_known_args(argv)
    if not (args.model / args.dtype).is_dir():
        print(f"making {args.model}")
        make(args.model)
    folders = rank16(args.model, args.dtype, _USED + args.adapters)
    settings = [s for s in Setting.both(args.adapters) if s.name in args.lanes.split(",")]
    leave_imports_alone()
    measured = [asyncio.run(_run(args, setting, folders, serve_arguments)) for setting in settings]
    show(measured)
    record = {
        "dtype": args.dtype,
        "serve": serve_arguments,
        "by": args.by,
        "adapters": args.adapters,
        "medians": {one.setting.name: asdict(one.medians) for one in measured},
        "storms": [asdict(one) for one in measured],
    }
    print(f"written to {save(args.out, record)}")
    return 0


async def _run(
    args: argparse.Namespace,
    setting: Setting,
    folders: Mapping[str, Path],
    serve_arguments: Sequence[str],
) -> Measured:
    warm_page_cache(folders.values())
    names = list(folders)
    model = args.model / args.dtype
    flags = [f"--adapter-root={args.model / 'rank16'}", f"--lanes={setting.lanes}"]
    work = Work(model.name, tuple(names[:_USED]), _PROMPT_TOKENS, _NEW_TOKENS, VOCAB)
    async with serving([str(model), *flags, *serve_arguments]) as url:
        return await measure(url, setting, work, names[_USED:], args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.storm", allow_abbrev=False)
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER, help="made if missing")
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--lanes", default="room,eviction", help="which settings, by commas")
    parser.add_argument("--adapters", type=int, default=50, help="loaded in each storm")
    parser.add_argument("--storms", type=int, default=6)
    parser.add_argument("--quiet", type=float, default=5.0, help="seconds before and after a storm")
    parser.add_argument("--by", choices=("load", "request"), default="load")
    parser.add_argument("--out", type=Path, default=Path("bench/results/storm.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
