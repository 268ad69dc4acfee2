"""`make soak MINUTES=10`: adapters come, go and are replaced under load; every token is compared.

python -m tests.soak.run [--minutes 10] [--adapters 300] [--changing 60] [--clients 24]
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.product import Command, metrics, stop_cleanly
from tests.soak.clients import Record, crowd
from tests.soak.world import SoakWorld, soak_world

_VERSIONS = 3
_LOOK_EVERY_S = 15.0
_TIMEOUT_S = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 if every answer was right."""
    args = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        say(f"computing what {args.adapters} adapters say")
        with soak_world(Path(folder), args.adapters, args.changing, _VERSIONS) as world:
            record, about = asyncio.run(_soak(world, args.clients, args.minutes * 60))
            stop_cleanly(world.served.command)
    say("\n".join(record.lines()))
    say("\n".join(f"{value:9.0f} {name}" for name, value in sorted(about["metrics"].items())))
    for name, sizes in about["mib"].items():
        say(f"MiB of the {name}: " + ", ".join(f"{mib:.0f}" for mib in sizes))
    result = {"counts": record.counts, "wrong": record.wrong, "unexpected": record.unexpected}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result | about, indent=1), encoding="utf-8")
    say(f"{'good' if record.is_good else 'FAILED'}; written to {args.out}")
    return int(not record.is_good)


def say(text: str) -> None:
    """Write a line for people."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def _soak(world: SoakWorld, clients: int, seconds: float) -> tuple[Record, dict[str, Any]]:
    end = time.monotonic() + seconds
    sizes: dict[str, list[float]] = {"router": [], "shard": []}
    looking = asyncio.create_task(_look(world.served.command, sizes))
    record = await crowd(
        world.served.url, world.shelf, world.base, clients, until(end), timeout=_TIMEOUT_S
    )
    looking.cancel()
    async with httpx.AsyncClient(base_url=world.served.url) as http:
        found = await metrics(http)
    shown = {
        name: value
        for name, value in found.items()
        if "adapter" in name and not any(part in name for part in ("digest=", "_name=", "_bucket"))
    }
    return record, {"seconds": seconds, "clients": clients, "metrics": shown, "mib": sizes}


def until(end: float) -> Callable[[Record], bool]:
    """Go on until a moment, or until something is wrong with many answers."""
    return lambda record: time.monotonic() < end and len(record.wrong) < 100


async def _look(command: Command, sizes: dict[str, list[float]]) -> None:
    processes = {"router": psutil.Process(command.pid), "shard": command.children()[0]}
    while True:
        for name, process in processes.items():
            sizes[name].append(process.memory_info().rss / 2**20)
        await asyncio.sleep(_LOOK_EVERY_S)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.run")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--adapters", type=int, default=300)
    parser.add_argument("--changing", type=int, default=60, help="adapters that are replaced")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("bench/results/soak.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
