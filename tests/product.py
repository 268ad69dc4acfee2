"""The product as its users start it, and a world whose answers the reference knows.

`Command` runs `loralane` as a child process; `World` is a tiny model with adapters on disk, and the
texts that transformers and PEFT make of them.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import httpx
import psutil
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tests import reference

#: Seconds that anything may take which must happen; a busy machine is no defect.
PATIENCE_S = 60
WEIGHTS = "adapter_model.safetensors"
#: Tokens of a row at most, where `bare_flags` say so; the model could do `LONGEST`.
CONTEXT, LONGEST = 512, 16384

GOOD = (
    reference.AdapterRecipe("a", 8, 16),
    reference.AdapterRecipe("b", 1, 2),
    reference.AdapterRecipe("c", 2, 4, ("q_proj", "v_proj")),
    reference.AdapterRecipe("d", 4, 8, ("gate_proj", "up_proj", "down_proj")),
    reference.AdapterRecipe("e", 8, 4, rslora=True),
    reference.AdapterRecipe("f", 16, 32, layers=(2,)),
    reference.AdapterRecipe("g", 16, 32, rank_pattern=(("q_proj", 3), ("down_proj", 24))),
    reference.AdapterRecipe("h", 5, 10),
)


@dataclass(frozen=True)
class World:
    """A folder with `model/`, `adapters/` (a root: good and bad ones) and `outside/`."""

    folder: Path
    model: Any
    _tokenizer: Any = field(default_factory=reference.byte_tokenizer)
    _known: dict[tuple[str, tuple[int, ...], int], list[int]] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.folder / "adapters"

    @property
    def flags(self) -> list[str]:
        """What `serve` is started with, except for ports."""
        aliases = [f"--adapter={r.name}={self.root / r.name}" for r in GOOD]
        return [*self.bare_flags, *aliases]

    @property
    def bare_flags(self) -> list[str]:
        """The same without aliases."""
        return [
            str(self.folder / "model"),
            f"--adapter-root={self.root}",
            "--dtype=float32",
            f"--max-model-len={CONTEXT}",
            "--threads=1",
        ]

    def ids(self, prompt: str) -> list[int]:
        return list(self._tokenizer.encode(prompt))

    def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def tokens(self, adapter: str, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return the reference's tokens for prompts of equal length; "" = base."""
        keys = [(adapter, tuple(prompt), count) for prompt in prompts]
        new = [key for key in dict.fromkeys(keys) if key not in self._known]
        if new:
            path = self.root / adapter if adapter else None
            found = reference.greedy(self.model, path, [key[1] for key in new], count)
            self._known.update(zip(new, found, strict=True))
        return [self._known[key] for key in keys]

    def texts(self, adapter: str, prompts: Sequence[str], count: int) -> list[str]:
        """Return the reference's texts for prompts of equal length in bytes."""
        found = self.tokens(adapter, [self.ids(prompt) for prompt in prompts], count)
        return [self.decode(ids) for ids in found]

    def text(self, adapter: str, prompt: str, count: int) -> str:
        return self.texts(adapter, [prompt], count)[0]


def make_world(folder: Path) -> World:
    """Save a model, good adapters, and one adapter for each way to be bad."""
    config = LlamaConfig(
        **{**reference.FAMILIES["llama"].to_dict(), "max_position_embeddings": LONGEST}
    )
    model: Any = reference.random_model(config)
    reference.save_model(model, folder / "model")
    world = World(folder, model)
    for seed, recipe in enumerate(GOOD):
        reference.save_adapter(model, recipe, world.root / recipe.name, seed=seed)
    _save_bad(world)
    return world


def _save_bad(world: World) -> None:
    """`wide` has another base's shape, `cut` ends early, `nan` holds a NaN, `pickle` is a .bin,
    `large` fits only into many lanes."""
    reference.save_adapter(
        world.model, reference.AdapterRecipe("large", 64, 64), world.root / "large", 0
    )
    narrow = LlamaConfig(**{**world.model.config.to_dict(), "hidden_size": 32, "head_dim": 8})
    other: Any = reference.random_model(narrow)
    reference.save_adapter(other, reference.AdapterRecipe("wide", 4, 8), world.root / "wide", 0)
    for name in ("cut", "nan", "pickle"):
        shutil.copytree(world.root / "b", world.root / name)
    whole = (world.root / "cut" / WEIGHTS).read_bytes()
    (world.root / "cut" / WEIGHTS).write_bytes(whole[:-64])
    tensors = load_file(world.root / "nan" / WEIGHTS)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, world.root / "nan" / WEIGHTS)
    (world.root / "pickle" / WEIGHTS).rename(world.root / "pickle" / "adapter_model.bin")


class Command:
    """A `loralane` command that runs; its output is drained and can be waited for."""

    def __init__(self, *arguments: str, env: Mapping[str, str] = MappingProxyType({})) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loralane_router", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **env},
        )
        self.pid = self._process.pid
        self._changed = threading.Condition()
        self._lines: list[str] = []
        self._open = 2
        pipes = (self._process.stdout, self._process.stderr)
        self._readers = [threading.Thread(target=self._drain, args=[pipe]) for pipe in pipes]
        for reader in self._readers:
            reader.start()

    @property
    def output(self) -> str:
        """What it has written so far, stdout and stderr."""
        return "\n".join(self._lines)

    def wait_for(self, pattern: str) -> str:
        """Return the first group of the first line that matches; fail if none ever will."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: not self._open or self._find(pattern), timeout=PATIENCE_S
            ), f"no line {pattern!r} in time: {self.output}"
            found = self._find(pattern)
        assert found, f"it ended without a line {pattern!r}: {self.output}"
        return found.group(1)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def wait(self) -> int:
        """Wait for its end; return its status."""
        status = self._process.wait(PATIENCE_S)
        for reader in self._readers:
            reader.join(PATIENCE_S)
        return status

    def end(self) -> None:
        """End it, whatever it does, in a test that failed."""
        if self._process.poll() is None:
            self._process.kill()
        self.wait()

    def _find(self, pattern: str) -> re.Match[str] | None:
        found = (re.search(pattern, line) for line in self._lines)
        return next((match for match in found if match), None)

    def _drain(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                with self._changed:
                    self._lines.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._open -= 1
            self._changed.notify_all()


@dataclass(frozen=True)
class Served:
    """Where a product answers."""

    command: Command
    url: str
    grpc: str


@contextmanager
def serve(*flags: str, env: Mapping[str, str] = MappingProxyType({})) -> Iterator[Served]:
    """Run `loralane serve` until the block ends; a test that ends it itself is welcome to.

    `env` is added to its environment.
    """
    command = Command("serve", *flags, "--port=0", "--grpc-port=0", env=env)
    try:
        url = command.wait_for(r"loralane serves .* on (http://\S+)")
        yield Served(command, url, command.wait_for(r"gRPC on (\S+)"))
    finally:
        command.end()


def stop_cleanly(command: Command) -> None:
    """Ask a command to end; it must do so with 0 and leave no child behind."""
    children = command.children()
    command.terminate()
    assert command.wait() == 0, command.output
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []


async def until(http: httpx.AsyncClient, **counts: int) -> dict[str, float]:
    """Wait until so many requests run or wait; return the metrics of that moment."""
    wanted = {f"loralane_requests_{name}": count for name, count in counts.items()}
    async with asyncio.timeout(PATIENCE_S):
        while wanted.items() - (found := await metrics(http)).items():  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # leaves the processor to the server
    return found


async def metrics(http: httpx.AsyncClient) -> dict[str, float]:
    """Return the samples of the router's metrics, by name with labels."""
    page = (await http.get("/metrics")).text
    lines = (line for line in page.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def assert_all_free(found: dict[str, float]) -> None:
    """No row, no page and no lane is in use."""
    assert found["loralane_rows_free"] == found["loralane_rows"]
    assert found["loralane_pages_free"] == found["loralane_pages"]
    assert found["loralane_lanes_in_use"] == 0


def events_of(body: str) -> list[Any]:
    """Return the JSON of all events of a stream, `[DONE]` left out."""
    found = (
        line.removeprefix("data:").strip() for line in body.splitlines() if line[:5] == "data:"
    )
    return [json.loads(data) for data in found if data != "[DONE]"]
