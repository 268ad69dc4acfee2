"""`make bench-cold`: time to first token of adapters that were never used, against warm ones.

    python -m bench.cold [--adapters 16] [--peer-url URL [--peer-models a,b] [--peer-base NAME]]
                         [serve's own options]

One request at a time, prompts of 64 tokens, adapters of rank 16 whose files are in the page cache.
A peer is any OpenAI-compatible server that runs already, serves the same model and knows the same
adapters; its turns alternate with ours.
"""

import argparse
import asyncio
import json
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.adapters import rank16, warm_page_cache
from bench.figures import timing
from bench.load import Work
from bench.model import DEFAULT_FOLDER, VOCAB, make
from bench.report import save
from bench.stream import Client, Server, leave_imports_alone
from demo.serving import serving

#: What the project promises: cold over warm.
MOST_COLD_OF_WARM: Final = 1.35
_NEW_TOKENS: Final = 4
#: Requests of a warm adapter, and of the base, for each cold one.
_WARM_TIMES: Final = 3
_WARM_UPS: Final = 4
_COLD_HEADER: Final = "x-loralane-adapter-cold-ms"


@dataclass(frozen=True, slots=True)
class Turn:
    """One adapter on one server: times to first token in milliseconds."""

    adapter: str
    base: float
    cold: float
    warm: float
    #: What the server itself says of the cold one's wait; None where it says nothing.
    waited: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over a server's turns, milliseconds; the ratio is the median of the turns' ratios."""

    base: float
    cold: float
    warm: float
    cold_of_warm: float

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> "Summary":
        """Sum up at least one turn."""
        return cls(
            base=median(turn.base for turn in turns),
            cold=median(turn.cold for turn in turns),
            warm=median(turn.warm for turn in turns),
            cold_of_warm=median(turn.cold / turn.warm for turn in turns),
        )


class Timed:
    """One server that is asked for first tokens, never with the same prompt twice."""

    def __init__(self, client: Client, work: Work, *, one_event_a_token: bool) -> None:
        self._client = client
        self._work = work
        #: Such servers send an event for each token anyway; ours does where it may not hold back.
        self._more = {} if one_event_a_token else {"logprobs": 0}
        self._seeds = count()

    async def warm_up(self) -> None:
        """Ask the base a few times; what a first request costs is not what is measured."""
        for _ in range(_WARM_UPS):
            await self._first(self._work.base)

    async def turn(self, adapter: str) -> Turn:
        """Measure one adapter that this server never used. Raises StreamFailed."""
        base = [(await self._first(self._work.base))[0] for _ in range(_WARM_TIMES)]
        cold, waited = await self._first(adapter)
        warm = [(await self._first(adapter))[0] for _ in range(_WARM_TIMES)]
        return Turn(adapter, median(base), cold, median(warm), waited)

    async def _first(self, model: str) -> tuple[float, float | None]:
        body = json.loads(self._work.body(model, next(self._seeds), _NEW_TOKENS))
        stream = await self._client.post("/v1/completions", json.dumps(body | self._more).encode())
        waited = stream.headers.get(_COLD_HEADER)
        return timing(stream).first * 1e3, None if waited is None else float(waited)


async def alternate(
    servers: Mapping[str, Timed], adapters: Mapping[str, Sequence[str]]
) -> dict[str, list[Turn]]:
    """Measure each server's adapters, one of each in turn; the first server changes every time."""
    turns: dict[str, list[Turn]] = {name: [] for name in servers}
    for server in servers.values():
        await server.warm_up()
    for n in range(max(map(len, adapters.values()))):
        order = list(servers) if n % 2 == 0 else list(servers)[::-1]
        for name in order:
            if n < len(adapters[name]):
                turns[name].append(await servers[name].turn(adapters[name][n]))
    return turns


def load_times(url: str) -> dict[str, float]:
    """Ask our server how long its loads took and on what: medians of all, milliseconds."""
    with urllib.request.urlopen(f"{url}/v1/adapters?limit=1000") as reply:
        rows: list[dict[str, Any]] = json.load(reply)["data"]
    loads = [{"load_ms": row["load_ms"], **row["load_times"]} for row in rows if row["load_times"]]
    return {name: median(load[name] for load in loads) for name in loads[0]} if loads else {}


def findings(summaries: Mapping[str, Summary]) -> Iterator[str]:
    """Yield what was promised, and whether it holds in this run."""
    ours = summaries["loralane"]
    yield _told(
        f"cold / warm = {ours.cold_of_warm:.2f}, at most {MOST_COLD_OF_WARM}",
        ours.cold_of_warm <= MOST_COLD_OF_WARM,
    )
    if "peer" in summaries:
        peer = summaries["peer"]
        yield _told(
            f"cold {ours.cold:.1f} ms, the peer's warm {peer.warm:.1f} ms", ours.cold < peer.warm
        )


def _told(what: str, holds: bool) -> str:
    return f"{'holds' if holds else 'DOES NOT HOLD'}: {what}"


def show(summaries: Mapping[str, Summary], loads: Mapping[str, float]) -> None:
    """Print a table in milliseconds, what a load was spent on, and what holds."""
    print(f"{'first token, ms':16}{'base':>8}{'warm':>8}{'cold':>8}  cold/warm")
    for name, s in summaries.items():
        print(f"{name:16}{s.base:8.1f}{s.warm:8.1f}{s.cold:8.1f}{s.cold_of_warm:11.2f}")
    print("a load: " + ", ".join(f"{name} {value:.1f}" for name, value in loads.items()))
    for line in findings(summaries):
        print(line)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args, serve_arguments = _parser().parse_known_args(argv)
    if not (args.model / args.dtype).is_dir():
        print(f"making {args.model}")
        make(args.model)
    leave_imports_alone()
    turns, loads = asyncio.run(_run(args, serve_arguments))
    summaries = {name: Summary.of(measured) for name, measured in turns.items()}
    show(summaries, loads)
    record = {
        "dtype": args.dtype,
        "serve": serve_arguments,
        "summaries": {name: asdict(summary) for name, summary in summaries.items()},
        "load_times": loads,
        "turns": {name: [asdict(turn) for turn in measured] for name, measured in turns.items()},
    }
    print(f"written to {save(args.out, record)}")
    return 0


async def _run(
    args: argparse.Namespace, serve_arguments: Sequence[str]
) -> tuple[dict[str, list[Turn]], dict[str, float]]:
    model = args.model / args.dtype
    ours = rank16(args.model, args.dtype, args.adapters)
    warm_page_cache(ours.values())
    root = f"--adapter-root={args.model / 'rank16'}"
    adapters = {"loralane": tuple(ours)}
    async with serving([str(model), root, *serve_arguments]) as url:
        with closing(Client(Server.at(url))) as client, closing(_peer(args)) as peer:
            servers = {"loralane": Timed(client, _work(args, model.name), one_event_a_token=False)}
            if args.peer_url:
                adapters["peer"] = (
                    tuple(args.peer_models.split(",")) if args.peer_models else tuple(ours)
                )
                servers["peer"] = Timed(peer, _work(args, args.peer_base), one_event_a_token=True)
            turns = await alternate(servers, adapters)
        return turns, load_times(url)


def _work(args: argparse.Namespace, base: str) -> Work:
    return Work(base, (), args.prompt_tokens, _NEW_TOKENS, VOCAB)


def _peer(args: argparse.Namespace) -> Client:
    return Client(Server.at(args.peer_url or "http://127.0.0.1"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.cold", allow_abbrev=False)
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER, help="made if missing")
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--adapters", type=int, default=16, help="each is cold once")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--peer-url", metavar="URL", help="another server, running already")
    parser.add_argument("--peer-models", help="its adapters, by commas; default: ours by name")
    parser.add_argument("--peer-base", default="base", help="what it calls the base")
    parser.add_argument("--out", type=Path, default=Path("bench/results/cold.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
