"""Pallas kernels lowered for a TPU on a machine that has none.

torch_xla has jax lower a kernel for the device that jax sees, and puts what comes out into the
graph. Here jax sees a CPU, so it is told what to lower for. Of the format's versions, the one is
named that the pinned libtpu reads: with a TPU there, jax would choose by the age of its libtpu.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import jax
import torch
from jax._src import tpu_custom_call
from torch_xla.experimental import custom_kernel

#: libtpu 0.0.21 reads Mosaic up to this version; jax 0.7.1 writes the next unless told.
_MOSAIC_VERSION: Final = 7


@contextmanager
def lowered_for_tpu() -> Iterator[None]:
    """While active, torch_xla's kernels are lowered for a TPU."""
    trace, version = custom_kernel.trace_pallas, tpu_custom_call.get_ir_version
    custom_kernel.trace_pallas = _trace
    tpu_custom_call.get_ir_version = lambda _: _MOSAIC_VERSION
    try:
        yield
    finally:
        custom_kernel.trace_pallas, tpu_custom_call.get_ir_version = trace, version


def _trace(
    kernel: Callable[..., Any],
    *args: Any,
    static_argnums: Any = None,
    static_argnames: Any = None,
    use_cache: bool = False,
    **options: Any,
) -> tuple[str, list[torch.Tensor]]:
    """Stand in for `custom_kernel.trace_pallas`; all of a model's layers share one lowering."""
    shaped = tuple(
        custom_kernel.to_jax_shape_dtype_struct(arg) if torch.is_tensor(arg) else arg
        for arg in args
    )
    payload = _lowered(
        kernel,
        shaped,
        static_argnums,
        tuple(static_argnames or ()),
        tuple(sorted(options.items())),
    )
    return payload, [arg for arg in args if torch.is_tensor(arg)]


@cache
def _lowered(
    kernel: Callable[..., Any],
    args: tuple[Any, ...],
    static_argnums: Any,
    static_argnames: tuple[str, ...],
    options: tuple[tuple[str, Any], ...],
) -> str:
    jitted = jax.jit(kernel, static_argnums=static_argnums, static_argnames=static_argnames)
    lowered = jitted.trace(*args, **dict(options)).lower(lowering_platforms=("tpu",))
    payload: str = custom_kernel._extract_backend_config(lowered.compiler_ir())
    return payload
