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
    Raises `ModelUnsupported` if there is no device, or several are asked for and there are not
    exactly so many.
    """
    if count > 1 and not has_tpu():
        os.environ["CPU_NUM_DEVICES"] = str(count)
    try:
        if count > 1:
            xr.use_spmd()
        found = xr.global_runtime_device_count()
    except (OSError, RuntimeError) as exc:
        raise ModelUnsupported(
            f"--device xla finds no device with PJRT_DEVICE={xr.device_type()}: {exc}; "
            "set PJRT_DEVICE to TPU or CPU, or use --device cpu"
        ) from exc
    if count not in (1, found):
        raise ModelUnsupported(
            f"--tensor-parallel {count}: there are {found} devices, and all of them take part"
        )
