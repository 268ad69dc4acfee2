"""`make bench-long-prompt`: what do 16 streams notice of a prompt of 4,000 tokens beside them?

    python -m bench.long_prompt [--step-tokens 512] [--also 128,256,1024] [serve's own options]

The prompt is computed in chunks, each beside the streams' next tokens. So a gap between two tokens
may be longer by one chunk's time, and by no more. One chunk's time is measured alone, where it is
dearest: at the end of the prompt, all before it being in the prefix cache already. What one at the
beginning of a prompt takes, which the shard tries to stay near all along, is shown beside it.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

from bench.adapters import rank16, warm_page_cache
from bench.load import Work
from bench.model import DEFAULT_FOLDER, VOCAB, longer, ready
from bench.promises import NotMeasured, Promise, at_most, conclude, run
from bench.report import save
from bench.storm import STREAMS, Streams, quiet
from bench.stream import Client, Server, Stream, leave_imports_alone
from bench.traffic import read
from bench.windows import Comparison, Window, compare
from demo.serving import serving

_CONTEXT: Final = 8192
_MAX_MODEL_LEN: Final = 4608
_LOWEST_ID: Final = 16
#: Streams go to the base and to an adapter in turn.
_ADAPTERS: Final = 4
_STREAM_PROMPT: Final = 64
_CHUNKS: Final = 5


class NotCached(NotMeasured):
    """The prefix cache kept less of a prompt than one chunk's time can be measured with."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One size of step; seconds."""

    step_tokens: int
    #: One chunk alone at the end of the prompt, and at the beginning.
    chunk: float
    first_chunk: float
    #: First token of the prompt alone, and beside the streams.
    alone: float
    beside: float
    prompts: tuple[Comparison, ...]

    @property
    def quiet_p99(self) -> float:
        """Gaps of the streams alone: the median of the windows around each prompt."""
        return median(one.quiet.p99 for one in self.prompts)

    @property
    def p99(self) -> float:
        """Gaps of the streams while a prompt is computed."""
        return median(one.storm.p99 for one in self.prompts)

    @property
    def largest(self) -> float:
        """The longest gap of all while a prompt was computed."""
        return max(one.storm.largest for one in self.prompts)


class Asking:
    """Prompts of random ids for one server, and their times to first token."""

    def __init__(self, client: Client, model: str) -> None:
        self._client = client
        self._model = model
        self._draw = random.Random(17)

    def ids(self, count: int) -> list[int]:
        """Return a prompt like no other."""
        return self._draw.choices(range(_LOWEST_ID, VOCAB), k=count)

    async def first(self, prompt: Sequence[int]) -> tuple[float, int]:
        """Return (seconds to the first token, tokens found in the prefix cache)."""
        fields: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": 0,
        }
        stream = await self._client.post("/v1/completions", json.dumps(fields).encode())
        return read(self._model, stream.sent, stream.events).first, cached_tokens(stream)

    async def chunks(self, prompt_tokens: int, step_tokens: int, times: int) -> list[float]:
        """Return the seconds of one chunk at the end of a prompt, several times.

        Raises NotCached.
        """
        before = self.ids(prompt_tokens - step_tokens)
        await self.first([*before, *self.ids(1)])
        found = []
        for _ in range(times):
            seconds, cached = await self.first([*before, *self.ids(step_tokens)])
            # What is short of a whole page is computed again.
            if len(before) - cached > step_tokens // 4:
                raise NotCached(
                    f"only {cached} of {len(before)} tokens were in the prefix cache, so that "
                    f"what was measured is not one chunk of {step_tokens}"
                )
            found.append(seconds)
        return found


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    usage: _Usage | None = None


def cached_tokens(stream: Stream) -> int:
    """Return how much of a prompt the server says it did not compute; 0 if it says nothing."""
    usages = (msgspec.json.decode(data, type=_Event).usage for _, data in stream.events)
    details = (usage.prompt_tokens_details for usage in usages if usage is not None)
    return max((found.cached_tokens for found in details if found is not None), default=0)


async def measure(
    client: Client, work: Work, step_tokens: int, args: argparse.Namespace
) -> Measured:
    """Measure one server: first alone, then beside streams. Raises NotCached, StreamFailed."""
    asking = Asking(client, work.base)
    chunks = await asking.chunks(args.prompt_tokens, step_tokens, _CHUNKS)
    first_chunks = [(await asking.first(asking.ids(step_tokens)))[0] for _ in range(_CHUNKS)]
    alone = (await asking.first(asking.ids(args.prompt_tokens)))[0]
    streams = Streams(client, work)
    windows, firsts = [], []
    async with streams.running(first_seed=0):
        before = await quiet(args.quiet)
        for _ in range(args.prompts):
            began = time.perf_counter()
            firsts.append((await asking.first(asking.ids(args.prompt_tokens)))[0])
            window = Window(began, time.perf_counter())
            after = await quiet(args.quiet)
            windows.append((before, window, after))
            before = after
    return Measured(
        step_tokens=step_tokens,
        chunk=median(chunks),
        first_chunk=median(first_chunks),
        alone=alone,
        beside=median(firsts),
        prompts=tuple(compare(streams.times, *three) for three in windows),
    )


def promises(measured: Measured) -> list[Promise]:
    """Judge the size of step that is promised."""
    more = (measured.p99 - measured.quiet_p99) * 1e3
    return [
        at_most(
            f"p99 of the gaps, --step-tokens {measured.step_tokens}: longer by",
            more,
            measured.chunk * 1e3,
            " ms",
        )
    ]


def show(all_sizes: Sequence[Measured]) -> None:
    """Print a table in milliseconds."""
    print("step tokens   chunk  first  quiet p99  prompt p99  largest  prompt alone  beside")
    for one in all_sizes:
        chunks = f"{one.chunk * 1e3:7.0f} {one.first_chunk * 1e3:6.0f}"
        times = (one.quiet_p99, one.p99, one.largest, one.alone, one.beside)
        a, b, c, d, e = (1e3 * seconds for seconds in times)
        print(f"{one.step_tokens:11} {chunks} {a:10.0f} {b:11.0f} {c:8.0f} {d:13.0f} {e:7.0f}")


async def _run(args: argparse.Namespace, more: Sequence[str]) -> list[Measured]:
    model = longer(ready(args.model, args.dtype), _CONTEXT)
    adapters = rank16(args.model, args.dtype, _ADAPTERS)
    warm_page_cache(adapters.values())
    names = tuple(name for adapter in adapters for name in (model.name, adapter))
    work = Work(model.name, names, _STREAM_PROMPT, vocab=VOCAB)
    done = []
    for step_tokens in (args.step_tokens, *map(int, args.also.split(",") if args.also else ())):
        flags = [
            f"--adapter-root={args.model / 'rank16'}",
            f"--max-model-len={_MAX_MODEL_LEN}",
            f"--step-tokens={step_tokens}",
            f"--max-rows={STREAMS + 4}",
            *more,
        ]
        async with serving([str(model), *flags]) as url:
            with closing(Client(Server.at(url))) as client:
                done.append(await measure(client, work, step_tokens, args))
    return done


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 if the promise holds."""
    args, serve_arguments = _parser().parse_known_args(argv)
    leave_imports_alone()
    all_sizes = run(args.limit, _run(args, serve_arguments))
    show(all_sizes)
    status = conclude(promises(all_sizes[0]))
    record = {
        "dtype": args.dtype,
        "serve": serve_arguments,
        "sizes": [asdict(one) for one in all_sizes],
    }
    print(f"written to {save(args.out, record)}")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.long_prompt", allow_abbrev=False)
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER, help="made if missing")
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--step-tokens", type=int, default=512, help="what is judged")
    parser.add_argument("--also", default="128,256,1024", help="what is shown as well, by commas")
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--prompts", type=int, default=3, help="one after another")
    parser.add_argument("--quiet", type=float, default=5.0, help="seconds around each prompt")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds that all may take")
    parser.add_argument("--out", type=Path, default=Path("bench/results/long_prompt.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
