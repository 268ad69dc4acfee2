"""What torch_xla runs on here, and how it is told what to use of it."""

import os

import torch_xla.runtime as xr

from loralane_server.errors import ModelUnsupported


def has_tpu() -> bool:
    """Whether XLA computes on a TPU, not on a CPU."""
    return bool(xr.device_type() == "TPU")


def use_threads(count: int) -> None:
    """Let XLA compute with `count` threads on a CPU. Only before it computes anything."""
    os.environ["NPROC"] = str(count)


def use_devices(count: int) -> None:
    """Let one program run on all of `count` devices. Only before anything is computed.

    A CPU is as many devices as one likes: they share its cores, and show that the program is right.
    Raises `ModelUnsupported` if there are not exactly so many.
    """
    if count == 1:
        return
    if not has_tpu():
        os.environ["CPU_NUM_DEVICES"] = str(count)
    xr.use_spmd()
    found = xr.global_runtime_device_count()
    if found != count:
        raise ModelUnsupported(
            f"--tensor-parallel {count}: there are {found} devices, and all of them take part"
        )
