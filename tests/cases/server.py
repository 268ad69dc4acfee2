"""The product as a case needs it: `loralane serve` on a tiny base, beside a fake hub."""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from tests.cases import base as tiny
from tests.cases.base import Base
from tests.cases.fake_hub import FakeHub, running
from tests.cases.materialise import Adapter, default_adapter
from tests.cases.oracle import Oracle, scripted_head
from tests.cases.tensors import NotUnderstood

START_S: Final = 120
_STOP_S: Final = 20
_TICK_S: Final = 0.1
_LANE_PAGE: Final = 8
#: On XLA the limits decide how many graphs are compiled: these leave several of each kind. What a
#: case sets itself comes after them, and counts.
_XLA_LIMITS: Final = ("--max-rows=8", "--step-tokens=128", "--lanes=128")
#: An adapter that every server has, to see that neighbours of a case's adapters are still right.
NEIGHBOUR, NEIGHBOUR_SEED = "neighbour", 4711
#: The model's folder, which gives it its id.
MODEL = "tiny"


class CannotServe(Exception):
    """The server refuses to start with these settings; the message is its own."""


@dataclass(frozen=True)
class ServerSpec:
    """What a server is started with. Cases with equal specs share one."""

    base: Base
    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    #: Bytes of a file system of its own for the hub cache, as `mount` writes them.
    cache_size: str | None = None
    #: Servers with adapters in their cache from the start are not shared.
    cache: tuple[tuple[str, str], ...] = ()
    root: str = "$TMP/adapters"


def read_spec(setup: Mapping[str, Any], max_rank: int) -> ServerSpec:
    """Turn a case's setup into a spec. Raises NotUnderstood."""
    flags: list[str] = []
    root = "$TMP/adapters"
    for key, value in setup.get("server", {}).items():
        if key == "adapter_root":
            root = value
        else:
            flags += _flags(key, value, max_rank)
    if "--device=xla" in flags:
        flags = [*_XLA_LIMITS, *flags]
    environment = [("HF_HUB_OFFLINE", "1")] if setup.get("offline") else []
    cache_size = setup.get("cache_fs")
    if cache_size is not None:
        found = re.fullmatch(r"tmpfs size=(\w+)", cache_size)
        if found is None:
            raise NotUnderstood(f"cache_fs {cache_size!r}")
        cache_size = found[1]
    return ServerSpec(
        tiny.read_base(setup),
        tuple(flags),
        tuple(environment),
        cache_size,
        tuple(setup.get("hub_cache", {}).items()),
        root,
    )


def _flags(key: str, value: Any, max_rank: int) -> list[str]:
    if key == "max_active_adapters":
        pages = -(-max_rank // _LANE_PAGE)
        return [f"--lanes={value * pages * _LANE_PAGE}"]
    if key == "backend":
        return [f"--device={value.split('/')[0]}"]
    if key == "tensor_parallel":
        return ["--device=xla", f"--tensor-parallel={value}"]
    if key == "lora":
        return [] if value else ["--lanes=0"]
    simple = {
        "max_concurrent": "--max-rows",
        "queue": "--max-queue",
        "max_positions": "--max-model-len",
        "max_model_len": "--max-model-len",
        "lanes": "--lanes",
        "host_cache": "--host-cache",
    }
    if key in simple:
        return [f"{simple[key]}={value}"]
    if key in ("warmup", "skip_if_unsupported", "fully_sharded_lora"):
        return []  # every device warms up by itself; the others come with tensor_parallel
    raise NotUnderstood(f"server setting {key!r}")


@dataclass
class Server:
    """A running product."""

    url: str
    tmp: Path
    root: Path
    cache: Path
    hub: FakeHub
    oracle: Oracle
    base_id: str
    neighbour: Adapter
    process: subprocess.Popen[bytes]
    log: Path = field(repr=False)
    #: Whether the neighbour could be served when the server was fresh.
    serves_adapters: bool = True

    def resident_bytes(self) -> int:
        """Return the memory that the server's processes hold."""
        parent = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in (parent, *parent.children(recursive=True)))

    def seen_from_inside(self, path: Path) -> Path:
        """Return where a file of the server's own mounts is seen."""
        return Path(f"/proc/{self.process.pid}/root{path}")


@contextlib.contextmanager
def serving(spec: ServerSpec, tmp: Path, prepare_cache: Any) -> Iterator[Server]:
    """Start a server and stop it at the end. Raises CannotServe.

    `prepare_cache(folder)` fills the hub cache before the start.
    """
    hub = FakeHub()
    weights = model_weights(spec.base)
    tiny.write_base(spec.base, weights, tmp / MODEL)
    root, cache = Path(spec.root.replace("$TMP", str(tmp))), tmp / "hf" / "hub"
    for folder in (root, cache, tmp / "cwd"):
        folder.mkdir(parents=True, exist_ok=True)
    prepare_cache(cache)
    neighbour = default_adapter(NEIGHBOUR_SEED)
    neighbour.write(root / NEIGHBOUR)
    generation = {"eos_token_id": tiny.EOS, **json.loads(spec.base.generation)}
    stops = generation["eos_token_id"]
    oracle = Oracle(
        weights, tied=spec.base.tied, stops=stops if isinstance(stops, list) else [stops]
    )
    with running(hub) as hub_url, contextlib.ExitStack() as stack:
        log = tmp / "server.log"
        process = stack.enter_context(_child(spec, tmp, root, cache, hub_url, log))
        url = _wait_ready(process, log)
        yield Server(url, tmp, root, cache, hub, oracle, MODEL, neighbour, process, log)


@functools.lru_cache(maxsize=8)
def model_weights(base: Base) -> dict[str, Any]:
    """Return a base's weights, with a head that says its script if it has one."""
    weights = tiny.random_weights(base)
    if base.script:
        weights["lm_head.weight"] = scripted_head(weights, base.prompts, base.script)
    return weights


@contextlib.contextmanager
def _child(
    spec: ServerSpec, tmp: Path, root: Path, cache: Path, hub_url: str, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable, "-m", "loralane_router", "serve", str(tmp / MODEL), "--port=0",
        f"--adapter-root={root}", "--threads=1", *spec.flags
    ]  # fmt: skip
    if spec.cache_size is not None:
        if shutil.which("unshare") is None:
            raise CannotServe("unshare: not found")
        mount = f'mount -t tmpfs -o size={spec.cache_size} tmpfs "$0" && exec "$@"'
        command = ["unshare", "-rm", "sh", "-c", mount, str(cache), *command]
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))},
        "HF_ENDPOINT": hub_url,
        "HF_HOME": str(tmp / "hf"),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        **dict(spec.environment),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=tmp / "cwd", env=environment, stdout=output, stderr=output
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        text = log.read_text(errors="replace")
        found = re.search(r"loralane serves .* on (http://\S+)", text)
        if found:
            return found[1]
        if process.poll() is not None:
            lines = [line for line in text.splitlines() if line.strip()]
            told = [line for line in lines if "loralane: " in line or "error: " in line]
            raise CannotServe((told or lines or ["it ended without a word"])[-1])
        time.sleep(_TICK_S)
    raise CannotServe(f"not ready within {START_S} s")


async def is_alive(http: httpx.AsyncClient) -> bool:
    """Whether the server says that it is ready."""
    try:
        return (await http.get("/health/ready", timeout=10)).status_code == 200
    except httpx.HTTPError:
        return False
