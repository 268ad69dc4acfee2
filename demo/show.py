"""`make demo`: serve the embedded model, ask the base and every adapter at once, show the answers.

    python -m demo.show [--prompts FILE] [any option of `loralane serve`]

Prompts are asked one after the other; each goes to all models in one batch.
"""

import argparse
import asyncio
import json
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from demo.batch import Answer, Batch, Models, RequestFailed, ask_all, list_models
from demo.layout import WIDTH, Paint, answers, table
from demo.serving import NotServing, serving

_PROMPTS: Final = Path(__file__).parents[1] / "server" / "loralane_server" / "demo" / "prompts.json"
_SHOWN: Final = 3
_TIMEOUT_S: Final = 60.0
_COLUMNS: Final = (
    "adapter",
    "tier",
    "rank",
    "lanes",
    "targets",
    "KiB",
    "load ms",
    "first token cold",
    "warm",
)


@dataclass(frozen=True, slots=True)
class Screen:
    """Where the demo is shown."""

    paint: Paint
    #: Whether a line may be written over.
    live: bool

    def progress(self, seconds: float) -> None:
        """Show that the model still loads."""
        if self.live:
            print(f"\r  loading ... {seconds:.1f} s", end="", flush=True)

    def heading(self, text: str) -> None:
        """Begin a section."""
        print(f"\n{self.paint.bold(text)}")

    def batch(self, base: str, batch: Batch) -> None:
        """Show what every model said to one question."""
        pairs = [(_label(base, answer.model), answer.text) for answer in batch.answers]
        print(answers(pairs, self.paint))
        shared = f"{batch.tokens} tokens in {batch.steps} steps of the model"
        print(self.paint.dim(f"  {shared} (from /metrics)"))


def main(argv: Sequence[str] | None = None) -> int:
    """Show the demo; return the exit status."""
    args, serve_arguments = _parser().parse_known_args(argv)
    terminal = sys.stdout.isatty()
    screen = Screen(Paint(colours=terminal and "NO_COLOR" not in os.environ), live=terminal)
    prompts = json.loads(args.prompts.read_text(encoding="utf-8"))["prompts"][:_SHOWN]
    try:
        asyncio.run(_show(screen, prompts, serve_arguments))
    except (NotServing, RequestFailed, httpx.HTTPError) as exc:
        print(f"\ndemo: {exc}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m demo.show",
        description="Ask the base and every adapter at once. Other options go to `loralane serve`.",
        allow_abbrev=False,
    )
    parser.add_argument("--prompts", type=Path, default=_PROMPTS, help='{"prompts": [...]}')
    return parser


async def _show(screen: Screen, prompts: Sequence[str], serve_arguments: Sequence[str]) -> None:
    command = shlex.join(["loralane", "serve", *serve_arguments])
    screen.heading(textwrap.shorten(f"$ {command}", WIDTH, placeholder=" ..."))
    began = time.perf_counter()
    async with (
        serving(serve_arguments, screen.progress) as url,
        httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False) as client,
    ):
        start = "\r" if screen.live else ""
        print(f"{start}  ready on {url} after {time.perf_counter() - began:.1f} s")
        models = await list_models(client)
        await _converse(screen, client, models, prompts)
    print(_next_steps(screen.paint, models, prompts[0]))


async def _converse(
    screen: Screen, client: httpx.AsyncClient, models: Models, prompts: Sequence[str]
) -> None:
    first, *others = prompts
    names = models.names
    await ask_all(client, [models.base], first)  # what a process does once is no adapter's time
    screen.heading(f"“{first}”  asked of {_count(models)}, all at once")
    cold = await ask_all(client, names, first)
    screen.batch(models.base, cold)
    warm = await ask_all(client, names, first)
    for prompt in others:
        screen.heading(f"“{prompt}”")
        screen.batch(models.base, await ask_all(client, names, prompt))
    listed = (await client.get("/v1/adapters")).raise_for_status().json()["data"]
    screen.heading("Adapters; first token of “" + first + "”, cold and asked again")
    print(_adapters(screen.paint, models, listed, cold.answers, warm.answers))


def _count(models: Models) -> str:
    adapters = len(models.adapters)
    return f"the base and {adapters} adapter{'s' if adapters != 1 else ''}"


def _label(base: str, model: str) -> str:
    return "base" if model == base else model


def _adapters(
    paint: Paint,
    models: Models,
    listed: Sequence[dict[str, Any]],
    cold: Sequence[Answer],
    warm: Sequence[Answer],
) -> str:
    """Return the table of adapters; times to first token in ms, the base's in the first row."""
    facts = {entry["name"]: entry for entry in listed}
    rows = []
    for before, after in zip(cold, warm, strict=True):
        known = _facts(facts[before.model]) if before.model != models.base else [""] * 6
        times = [f"{before.first_ms:.0f} ms", f"{after.first_ms:.0f} ms"]
        rows.append([_label(models.base, before.model), *known, *times])
    return table(_COLUMNS, rows, paint)


def _facts(entry: dict[str, Any]) -> list[str]:
    counts = [str(entry[field]) for field in ("rank", "lanes", "targets")]
    return [entry["tier"], *counts, f"{entry['bytes'] / 1024:.0f}", f"{entry['load_ms']:.1f}"]


def _next_steps(paint: Paint, models: Models, prompt: str) -> str:
    """Return what to type next; it works against a server on its default port."""
    model = models.adapters[0] if models.adapters else models.base
    messages = [{"role": "user", "content": prompt}]
    body = json.dumps({"model": model, "messages": messages})
    return f"""
{paint.bold("Next: `make serve` keeps serving. Then")}

curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
  -d {shlex.quote(body)}

{paint.bold("or, in Python (pip install openai)")}

from openai import OpenAI
client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
messages = {json.dumps(messages)}
reply = client.chat.completions.create(model={json.dumps(model)}, messages=messages)
print(reply.choices[0].message.content)"""


if __name__ == "__main__":
    sys.exit(main())
