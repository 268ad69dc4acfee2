"""`loralane serve | shard | router | check`: one command line for both packages.

The model's and the adapters' flags belong to the shard: they are declared here once for help and
spelling, and handed on as they were given. What they mean, and their defaults, only the server
knows; this package does not import it.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Final

from loralane_router import logs
from loralane_router.config import RouterConfig
from loralane_router.queueing.weights import Weights
from loralane_router.serve import CannotStart, run


@dataclass(frozen=True, slots=True)
class Flag:
    """One option that is handed on to the shard."""

    name: str
    metavar: str | None
    help: str
    choices: tuple[str, ...] | None = None
    #: Whether it may be given several times.
    many: bool = False

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Declare it; None = not given."""
        parser.add_argument(
            self.name,
            metavar=self.metavar,
            help=self.help,
            choices=self.choices,
            action="append" if self.many else "store",
        )

    def given(self, args: argparse.Namespace) -> list[str]:
        """Return the arguments that say the same to the shard."""
        value = getattr(args, self.name.removeprefix("--").replace("-", "_"))
        values = value if self.many else [value]
        return [f"{self.name}={text}" for text in values or () if text is not None]


MODEL_FLAGS: Final = (
    Flag("--adapter", "NAME=REF", "an adapter and its alias; repeatable", many=True),
    Flag(
        "--adapter-root",
        "DIR|s3://BUCKET/PREFIX",
        "folder or S3 prefix below which clients may name adapters; repeatable",
        many=True,
    ),
    Flag("--adapter-cache", "DIR", "where adapters from S3 are kept (default ~/.cache/loralane)"),
    Flag("--adapter-ttl", "SECONDS", "forget adapters that were unused for so long; 0 = never"),
    Flag("--preload", "NAME", "an adapter that is resident before requests are taken", many=True),
    Flag("--pin", "NAME", "the same, and never evicted", many=True),
    Flag("--device", None, "where to compute", ("auto", "cpu", "xla")),
    Flag("--dtype", None, "what to compute in", ("auto", "float32", "bfloat16")),
    Flag("--tensor-parallel", "N", "devices that share the model (XLA only)"),
    Flag("--max-model-len", "N", "prompt and generated tokens together, at most"),
    Flag("--max-rows", "N", "requests that run at once, at most"),
    Flag("--lanes", "N", "lanes of the adapter pool: the sum of ranks that fit"),
    Flag("--kv-memory", "BYTES", "memory of the KV cache"),
    Flag("--host-cache", "BYTES", "host memory for adapters that are not resident"),
    Flag("--step-tokens", "N", "tokens of one step, at most: streams, then chunks of prompts"),
    Flag("--prefix-cache", None, "compute prompts that begin alike once", ("on", "off")),
    Flag("--threads", "N", "threads that compute"),
    Flag("--log-format", None, "log lines for people or for machines", ("text", "json")),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status. `shard` and `check` become another program."""
    args = _parser().parse_args(argv)
    if args.command in ("shard", "check"):
        command = shard_command(args.command, args, _own_flags(args))
        os.execv(command[0], command)
    logs.configure(args.log_format or "text")
    try:
        return asyncio.run(_serve(args))
    except (CannotStart, ValueError) as exc:
        sys.stderr.write(f"loralane: {exc}\n")
        return 2


async def _serve(args: argparse.Namespace) -> int:
    if args.command == "router":
        return await run(router_config(args, tuple(args.shard)))
    with TemporaryDirectory(prefix="loralane-") as folder:
        # A socket that only this user reaches, and no port that somebody else may take first.
        address = f"unix:{folder}/shard"
        command = shard_command("shard", args, [f"--listen={address}"])
        return await run(router_config(args, (address,)), command)


def _own_flags(args: argparse.Namespace) -> list[str]:
    if args.command == "shard":
        return [f"--listen={args.listen}"]
    token = [] if args.token is None else [f"--token={args.token}"]
    return [*token, "--tensors"] if args.tensors else token


def shard_command(verb: str, args: argparse.Namespace, more: Sequence[str]) -> list[str]:
    """Return the command that runs the server package with the flags that were given."""
    given = [text for flag in MODEL_FLAGS for text in flag.given(args)]
    named = [] if args.model is None else [args.model]
    if verb == "check":
        given += [f"--model={model}" for model in named]
        named = [args.reference]
    return [sys.executable, "-m", "loralane_server", verb, *given, *more, "--", *named]


def router_config(args: argparse.Namespace, shards: tuple[str, ...]) -> RouterConfig:
    """Return the router's settings. Raises ValueError."""
    return RouterConfig(
        shards=shards,
        host=args.host,
        port=args.port,
        grpc_port=args.grpc_port,
        log_format=args.log_format or "text",
        max_queue=args.max_queue,
        max_queue_tokens=args.max_queue_tokens,
        served_model_name=args.served_model_name,
        weights=Weights() if args.weights is None else Weights.load(args.weights),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loralane", description="One base model, many LoRA adapters, one batch."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="a shard and a router in front of it")
    shard = commands.add_parser("shard", help="one shard: one model, one device, many adapters")
    router = commands.add_parser("router", help="the router in front of shards")
    check = commands.add_parser("check", help="dry run: what an adapter is and whether it fits")
    for command in (serve, shard):
        command.add_argument(
            "model", nargs="?", metavar="MODEL", help="hub id or folder; none = the embedded demo"
        )
    for command in (serve, shard, check):
        for flag in MODEL_FLAGS:
            flag.add_to(command)
    for command in (serve, router):
        _add_router_flags(command)
    shard.add_argument("--listen", default="127.0.0.1:8101", metavar="HOST:PORT|unix:PATH")
    router.add_argument(
        "--shard",
        action="append",
        required=True,
        metavar="HOST:PORT|unix:PATH|dns:NAME:PORT",
        help="a shard, or all that a name has in DNS, asked again every few seconds; repeatable; "
        "all serve the same model",
    )
    router.add_argument("--log-format", choices=("text", "json"))
    check.add_argument("reference", metavar="REF", help="hub id, alias or path")
    check.add_argument("--model", metavar="MODEL", help="hub id or folder; none = the demo")
    check.add_argument("--token", help="hub token for this adapter")
    check.add_argument("--tensors", action="store_true", help="read every tensor too")
    return parser


def _add_router_flags(parser: argparse.ArgumentParser) -> None:
    defaults = RouterConfig(shards=("127.0.0.1:8101",))
    parser.add_argument("--host", default=defaults.host, help="address to serve on")
    parser.add_argument("--port", type=int, default=defaults.port, help="HTTP; 0 = any free port")
    parser.add_argument("--grpc-port", type=int, metavar="N", help="also serve gRPC there")
    parser.add_argument(
        "--max-queue", type=int, default=defaults.max_queue, metavar="N", help="then answer 429"
    )
    parser.add_argument(
        "--max-queue-tokens",
        type=int,
        metavar="N",
        help="also answer 429 while the prompts that wait have so many tokens (default: no bound)",
    )
    parser.add_argument(
        "--weights", metavar="FILE", help="JSON: what adapters and API keys are due; else 1 each"
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="another name of the base")
