"""Load for any OpenAI-compatible server: bursts, or arrivals at random.

    python -m bench.load --url http://127.0.0.1:8000 [--modes base,one,eight] [--streams 1,8,32]

Prompts are random token ids, no two alike, and answers run to their full length (ignore_eos), so
every server does the same work; the server's own counts are checked.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, get_args

from bench.figures import Round, Timing, sum_up, timing
from bench.report import Case, show, write
from bench.stream import Client, Server, StreamFailed, leave_imports_alone

Mode = Literal["base", "one", "eight"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
_EIGHT: Final = 8
#: Ids below are often special tokens.
_LOWEST_ID: Final = 16
_WARM_TOKENS: Final = 4


@dataclass(frozen=True, slots=True)
class Work:
    """What every request asks for."""

    base: str
    adapters: tuple[str, ...]
    prompt_tokens: int = 64
    new_tokens: int = 64
    #: Prompt ids are below this.
    vocab: int = 1000
    #: A prompt of text for servers that take no ids; its tokens are the server's to count.
    text: str | None = None

    def model(self, mode: Mode, index: int) -> str:
        """Return the model that the `index`-th request of a burst names."""
        if mode == "base":
            return self.base
        return self.adapters[index % (_EIGHT if mode == "eight" else 1)]

    def body(self, model: str, seed: int, new_tokens: int) -> bytes:
        """Return a completions request; the same seed gives the same prompt."""
        draw = random.Random(seed)
        ids = draw.choices(range(_LOWEST_ID, self.vocab), k=self.prompt_tokens)
        fields = {
            "model": model,
            "prompt": ids if self.text is None else self.text,
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(fields).encode()


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When the requests of a round are sent."""

    requests: int
    #: Requests per second, exponential gaps; None = all at once.
    rate: float | None = None

    def delays(self, seed: int) -> list[float]:
        """Return each request's delay after the round's start, seconds."""
        if self.rate is None:
            return [0.0] * self.requests
        draw, at = random.Random(seed), 0.0
        return [at := at + draw.expovariate(self.rate) for _ in range(self.requests)]


class Generator:
    """Sends rounds to one server, never the same prompt twice."""

    def __init__(self, client: Client, work: Work) -> None:
        self._client = client
        self._work = work
        self._seeds = count()

    async def warm(self, mode: Mode, streams: int) -> None:
        """Send a short burst that nobody measures."""
        await self._round(mode, Arrivals(streams), _WARM_TOKENS)

    async def round(self, mode: Mode, arrivals: Arrivals) -> tuple[Round, float]:
        """Send one round; return its figures and this process's share of one core meanwhile.

        Raises StreamFailed, also when a count of tokens is not what was asked for.
        """
        began, used = time.perf_counter(), time.process_time()
        timings = await self._round(mode, arrivals, self._work.new_tokens)
        share = (time.process_time() - used) / (time.perf_counter() - began)
        return sum_up(timings), share

    async def one(self, model: str) -> Timing:
        """Send a single request to a model and wait for its end."""
        return await self._send(self._body(model, self._work.new_tokens), 0.0)

    async def _round(self, mode: Mode, arrivals: Arrivals, new_tokens: int) -> list[Timing]:
        delays = arrivals.delays(seed=next(self._seeds))
        bodies = [
            self._body(self._work.model(mode, index), new_tokens)
            for index in range(arrivals.requests)
        ]
        sends = (self._send(body, delay) for body, delay in zip(bodies, delays, strict=True))
        timings = await asyncio.gather(*sends)
        for got in timings:
            self._check(got, new_tokens)
        return timings

    def _body(self, model: str, new_tokens: int) -> bytes:
        return self._work.body(model, next(self._seeds), new_tokens)

    async def _send(self, body: bytes, delay: float) -> Timing:
        await asyncio.sleep(delay)
        return timing(await self._client.post("/v1/completions", body))

    def _check(self, got: Timing, new_tokens: int) -> None:
        prompt = got.prompt_tokens if self._work.text is not None else self._work.prompt_tokens
        if (got.prompt_tokens, got.tokens) != (prompt, new_tokens):
            raise StreamFailed(
                f"{got.prompt_tokens} + {got.tokens} tokens instead of {prompt} + {new_tokens}"
            )


async def run_cases(
    generator: Generator, modes: Sequence[Mode], arrivals: Arrivals, rounds: int
) -> list[Case]:
    """Measure all modes, taking turns, so that a slow minute of the machine hits all alike."""
    done: dict[Mode, list[tuple[Round, float]]] = {mode: [] for mode in modes}
    for mode in modes:
        await generator.warm(mode, min(arrivals.requests, 32))
    for _ in range(rounds):
        for mode in modes:
            done[mode].append(await generator.round(mode, arrivals))
    return [_case(mode, arrivals, done[mode], done.get("base", [])) for mode in modes]


def _case(
    mode: Mode,
    arrivals: Arrivals,
    rounds: Sequence[tuple[Round, float]],
    base: Sequence[tuple[Round, float]],
) -> Case:
    figures = [figures for figures, _ in rounds]
    middle = {name: median(getattr(f, name) for f in figures) for name in asdict(figures[0])}
    pairs = zip(figures, base, strict=False) if arrivals.rate is None else ()
    ratios = [f.decode / b.decode for f, (b, _) in pairs if b.decode]
    return Case(
        mode=mode,
        streams=arrivals.requests,
        rate=arrivals.rate,
        figures=middle,
        decode_of_base=median(ratios) if ratios else None,
        client_share=median(share for _, share in rounds),
        load=os.getloadavg()[0],
    )


def list_models(url: str) -> tuple[str, tuple[str, ...]]:
    """Ask a server for its base and its adapters; vLLM and Loralane tell them apart by parent."""
    with urllib.request.urlopen(f"{url}/v1/models") as reply:
        listed: list[dict[str, Any]] = json.load(reply)["data"]
    base = next(model["id"] for model in listed if model.get("parent") is None)
    return base, tuple(model["id"] for model in listed if model.get("parent") is not None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = _parser().parse_args(argv)
    base, adapters = list_models(args.url)
    work = Work(
        base=base,
        adapters=tuple(args.adapters.split(",")) if args.adapters else adapters,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        vocab=args.vocab,
        text=args.prompt_text,
    )
    modes = [mode for mode in MODES if mode in args.modes.split(",")]
    if len(work.adapters) < _EIGHT and "eight" in modes:
        sys.exit(f"mode eight needs {_EIGHT} adapters, the server has {len(work.adapters)}")
    leave_imports_alone()
    cases = asyncio.run(_run(work, modes, args))
    show(cases)
    print(f"written to {write(args.out, {'url': args.url, 'work': asdict(work)}, cases)}")
    return 0


async def _run(work: Work, modes: Sequence[Mode], args: argparse.Namespace) -> list[Case]:
    with closing(Client(Server.at(args.url))) as client:
        generator = Generator(client, work)
        cases = []
        for arrivals in _arrivals(args):
            cases += await run_cases(generator, modes, arrivals, args.rounds)
        return cases


def _arrivals(args: argparse.Namespace) -> Iterator[Arrivals]:
    if args.rate is not None:
        yield Arrivals(args.requests, args.rate)
        return
    for streams in args.streams.split(","):
        yield Arrivals(int(streams))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.load")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--modes", default="base,one,eight")
    parser.add_argument("--adapters", help="names, by commas; default: all that the server lists")
    parser.add_argument("--streams", default="1,8,32", help="sizes of bursts, by commas")
    parser.add_argument("--rate", type=float, help="open arrivals: requests per second")
    parser.add_argument("--requests", type=int, default=64, help="of a round, with --rate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prompt-text", help="the prompt of every request, instead of random ids")
    parser.add_argument("--vocab", type=int, default=1000, help="prompt ids are below this")
    parser.add_argument("--out", type=Path, default=Path("bench/results/load.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
