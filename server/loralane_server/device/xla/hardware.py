"""What torch_xla runs on here, and how it is told what to use of it."""

import os

import torch_xla.runtime as xr


def has_tpu() -> bool:
    """Whether XLA computes on a TPU, not on a CPU."""
    return bool(xr.device_type() == "TPU")


def use_threads(count: int) -> None:
    """Let XLA compute with `count` threads on a CPU. Only before it computes anything."""
    os.environ["NPROC"] = str(count)
