"""Backends: a model on a device, ready to run steps. Chosen by name, imported only when chosen."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Final, Literal

import torch

from loralane_server.adapters.formats.base_shape import Abilities
from loralane_server.config import ShardConfig
from loralane_server.device.cpu import CpuDevice
from loralane_server.device.seam import LaneMemory, StepRunner
from loralane_server.device.xla.kv_shape import kv_shape
from loralane_server.errors import ModelUnsupported
from loralane_server.kv.pages import PAGE_TOKENS
from loralane_server.model.eager import EagerRunner
from loralane_server.model.spec import ModelSpec
from loralane_server.model.weights import load_decoder

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: What each device applies of an adapter; whatever needs more is refused.
ABILITIES: Final[Mapping[str, Abilities]] = {
    "cpu": Abilities("cpu"),
    "xla": Abilities("xla", vectors=False, ends=False, a_by_columns=True),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to run: which model, in what, how much of it."""

    folder: Path
    spec: ModelSpec
    dtype: torch.dtype
    #: Tokens of a row at most.
    max_len: int
    #: KV pages.
    pages: int
    config: ShardConfig


@dataclass(frozen=True, slots=True)
class Backend:
    """A model that can run steps, and the memory of its adapters."""

    name: Literal["cpu", "xla"]
    runner: StepRunner
    lanes: LaneMemory


def choose_device(config: ShardConfig, env: Mapping[str, str] = os.environ) -> str:
    """Return where to compute: "cpu", or "xla" if asked for or where there is a TPU to use.

    Raises `ModelUnsupported` if torch_xla is asked for and not installed.
    """
    installed = find_spec("torch_xla") is not None
    if config.device == "auto":
        return "xla" if installed and env.get("PJRT_DEVICE") == "TPU" else "cpu"
    if config.device == "xla" and not installed:
        raise ModelUnsupported(
            "--device xla needs torch_xla: pip install 'loralane[xla]', "
            "on a TPU VM 'loralane[tpu]'; or use --device cpu"
        )
    return config.device


def choose_dtype(config: ShardConfig, spec: ModelSpec) -> str:
    """Return the dtype to compute in: the one asked for, else float32 only if stored so.

    XLA on a CPU is always asked for float32: it computes bfloat16 many times slower.
    """
    if config.dtype != "auto":
        return config.dtype
    if spec.stored_dtype in ("float32", "float64"):
        return "float32"
    return "float32" if choose_device(config) == "xla" and not _has_tpu() else "bfloat16"


def page_numbers(config: ShardConfig, spec: ModelSpec) -> int:
    """Return how many numbers a layer's KV page takes of a device's memory, padding included."""
    kernel = choose_device(config) == "xla" and _has_tpu()
    return prod(kv_shape(1, spec.kv_heads, spec.head_dim, kernel=kernel))


def open_backend(plan: Plan) -> Backend:
    """Load the model onto its device; with everything compiled that is to be compiled."""
    opened = _open_xla if choose_device(plan.config) == "xla" else _open_cpu
    return opened(plan)


def _open_cpu(plan: Plan) -> Backend:
    if plan.config.tensor_parallel > 1:
        raise ModelUnsupported(
            "--tensor-parallel needs several XLA devices: use --device xla, or leave it out"
        )
    device = CpuDevice(
        plan.spec,
        dtype=plan.dtype,
        pages=plan.pages,
        page_tokens=PAGE_TOKENS,
        lanes=plan.config.lanes,
    )
    decoder = load_decoder(plan.folder, plan.spec, device, plan.dtype, plan.max_len)
    return Backend("cpu", EagerRunner(decoder, device), device)


def _open_xla(plan: Plan) -> Backend:
    from loralane_server.device.xla import hardware
    from loralane_server.device.xla.buckets import plan_buckets
    from loralane_server.device.xla.device import XlaDevice
    from loralane_server.device.xla.mesh import Mesh
    from loralane_server.device.xla.runner import XlaRunner

    config, tpu = plan.config, hardware.has_tpu()
    _check_divisible(plan.spec, config.tensor_parallel)
    if config.threads is not None:
        hardware.use_threads(config.threads)
    hardware.use_devices(config.tensor_parallel)
    buckets = plan_buckets(
        max_rows=config.max_rows,
        step_tokens=config.step_tokens,
        max_len=plan.max_len,
        lanes=config.lanes,
        kernel=tpu,
    )
    device = XlaDevice(
        plan.spec,
        buckets,
        dtype=plan.dtype,
        pages=plan.pages,
        tpu=tpu,
        mesh=Mesh(config.tensor_parallel),
    )
    decoder = load_decoder(plan.folder, plan.spec, device, plan.dtype, plan.max_len)
    runner = XlaRunner(decoder, device, plan.spec.vocab)
    runner.compile()
    return Backend("xla", runner, device)


def _check_divisible(spec: ModelSpec, devices: int) -> None:
    """Raise `ModelUnsupported` if the model cannot be cut into equal parts."""
    sizes = {
        "attention heads": spec.heads,
        "KV heads": spec.kv_heads,
        "MLP width": spec.linears()["gate_proj"][0],
    }
    for what, size in sizes.items():
        if size % devices:
            raise ModelUnsupported(
                f"--tensor-parallel {devices}: the model's {what}, {size}, cannot be divided so"
            )


def _has_tpu() -> bool:
    from loralane_server.device.xla import hardware

    return hardware.has_tpu()
