"""`python -m loralane_server shard|check`: one shard, or a dry run of one adapter."""

import argparse
import asyncio
import gc
import json
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from loralane_proto import shard_pb2_grpc as pb_grpc

from loralane_server.adapters.pool import lanes_for
from loralane_server.adapters.sources.references import parse_root
from loralane_server.assembly import Shard, assemble, find_model, open_store
from loralane_server.config import ShardConfig
from loralane_server.errors import ShardError
from loralane_server.preload import preload
from loralane_server.service import ShardService

_MESSAGE_BYTES = 64 << 20
_GRACE_SECONDS = 5.0

log = logging.getLogger("loralane_server")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = _parser().parse_args(argv)
    try:
        config = _config(args)
    except ValueError as exc:
        print(f"loralane: {exc}", file=sys.stderr)  # noqa: T201 - a command's last word
        return 2
    _set_up_logs(config.log_format)
    try:
        if args.command == "check":
            return _check(config, args.reference, args.token, args.tensors)
        return asyncio.run(_serve(config))
    except ShardError as exc:
        message = exc.message
    except MemoryError as exc:
        message = f"{exc}; lower --lanes, --kv-memory or --max-rows"
    print(f"loralane: {message}", file=sys.stderr)  # noqa: T201 - a command's last word
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="loralane")
    commands = parser.add_subparsers(dest="command", required=True)
    shard = commands.add_parser("shard", help="one shard: one model, one device, many adapters")
    shard.add_argument("model", nargs="?", help="hub id or folder; none = the embedded demo")
    shard.add_argument("--listen", default="127.0.0.1:8101", metavar="HOST:PORT|unix:PATH")
    check = commands.add_parser("check", help="dry run: what an adapter is and whether it fits")
    check.add_argument("reference", metavar="REF")
    check.add_argument("--model", help="hub id or folder; none = the embedded demo")
    check.add_argument("--token", help="hub token")
    check.add_argument("--tensors", action="store_true", help="read every tensor too")
    for command in (shard, check):
        _add_model_flags(command)
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter", action="append", default=[], metavar="NAME=REF")
    parser.add_argument("--adapter-root", action="append", default=[], metavar="DIR|s3://...")
    parser.add_argument("--adapter-cache", type=Path, metavar="DIR")
    parser.add_argument("--adapter-ttl", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--preload", action="append", default=[], metavar="NAME")
    parser.add_argument("--pin", action="append", default=[], metavar="NAME")
    parser.add_argument("--device", choices=("auto", "cpu", "xla"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="devices that share the model"
    )
    parser.add_argument("--max-model-len", type=int, metavar="N")
    parser.add_argument("--max-rows", type=int, default=32, metavar="N")
    parser.add_argument("--lanes", type=int, default=512, metavar="N")
    parser.add_argument("--kv-memory", type=int, default=2 << 30, metavar="BYTES")
    parser.add_argument("--host-cache", type=int, default=1 << 30, metavar="BYTES")
    parser.add_argument(
        "--step-tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens of one step, at most: one of each stream, and chunks of prompts in what is "
        "left, so that no stream waits longer than such a step takes",
    )
    parser.add_argument(
        "--prefix-cache",
        choices=("on", "off"),
        default="on",
        help="compute prompts of one adapter that begin alike once",
    )
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--log-format", choices=("text", "json"), default="text")


def _config(args: argparse.Namespace) -> ShardConfig:
    values: dict[str, Any] = {
        f.name: getattr(args, f.name) for f in fields(ShardConfig) if hasattr(args, f.name)
    }
    pairs = [text.partition("=") for text in args.adapter]
    if any(not name or not reference for name, _, reference in pairs):
        raise ValueError("--adapter takes NAME=REF")
    adapters = tuple((name, reference) for name, _, reference in pairs)
    roots = tuple(map(parse_root, args.adapter_root))
    named = {"preload": tuple(args.preload), "pin": tuple(args.pin)}
    return ShardConfig(**{**values, **named}, adapters=adapters, adapter_roots=roots)


def _check(config: ShardConfig, reference: str, token: str | None, tensors: bool) -> int:
    """Print what an adapter is, as JSON. Its tensors are read only if that is asked for."""
    store = open_store(config, find_model(config.model))
    try:
        found = store.validate(reference, token, tensors=tensors).result()
    finally:
        store.close()
    summary = found.summary
    facts = {
        "reference": reference,
        "digest": summary.digest,
        "rank": summary.rank,
        "lanes": lanes_for(summary.rank),
        "bytes": summary.bytes,
        "targets": summary.targets,
        "modules": list(summary.modules),
        "notes": list(found.notes),
    }
    print(json.dumps(facts, indent=2))  # noqa: T201 - the answer of `check`
    return 0


async def _serve(config: ShardConfig) -> int:
    """Serve until SIGINT or SIGTERM, or until the engine fails."""
    shard = await asyncio.to_thread(assemble, config)
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", _MESSAGE_BYTES),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 200),
            ("grpc.so_reuseport", 0),
        ]
    )
    await preload(shard.engine, shard.store, config.preload, config.pin)
    service = ShardService(shard.engine, shard.store, shard.facts)
    pb_grpc.add_ShardServicer_to_server(service, server)
    status = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    try:
        port = server.add_insecure_port(config.listen)
    except RuntimeError as exc:  # grpc says no more than that it failed
        raise ShardError(f"cannot listen on {config.listen}; try another --listen") from exc
    await status.set("", health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    host = config.listen.rpartition(":")[0]
    address = config.listen if host == "unix" else f"{host}:{port}"
    # Going through what was imported takes a collection 0.1 s, in which no step begins.
    gc.collect()
    gc.freeze()
    print(f"ready {address}", flush=True)  # noqa: T201 - the line that `serve` waits for
    expiring = asyncio.create_task(service.keep_expiring(), name="adapter-expiry")
    try:
        await _until_told_to_stop(shard)
    finally:
        expiring.cancel()
        await status.enter_graceful_shutdown()  # routers send nothing new from here on
        # Without an engine no row gets on: routers may give them to other shards at once.
        await server.stop(0 if shard.engine.stopped.done() else _GRACE_SECONDS)
        await asyncio.to_thread(shard.engine.close)
        shard.store.close()
    return 0


async def _until_told_to_stop(shard: Shard) -> None:
    """Wait for a signal; raise what ended the engine, if that comes first."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, told.set)
    engine = asyncio.wrap_future(shard.engine.stopped)
    signalled = asyncio.create_task(told.wait())
    await asyncio.wait((engine, signalled), return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    if engine.done():
        engine.result()


class _JsonLines(logging.Formatter):
    """One JSON object a line, for machines."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def _set_up_logs(log_format: str) -> None:
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s shard %(levelname)s %(message)s")
    handler.setFormatter(_JsonLines() if log_format == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for name in ("httpx", "httpx2"):  # they log URLs, and those of downloads may be signed
        logging.getLogger(name).setLevel(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
