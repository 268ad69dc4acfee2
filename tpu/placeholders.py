"""Device memory that is not there: a model's shapes without its weights.

A graph holds the shapes of its parameters, not their values. So while a shard is built for export,
whatever it would bring to the device becomes a placeholder: a parameter that was never filled. A
model of 16 GB is traced in a few hundred megabytes, with all of its layers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch_xla.core.xla_builder as xla_builder
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: Smaller ones are really brought: they may be constants that a graph computes with.
_SMALL: Final = 1 << 16


class Placeholders(TorchFunctionMode):
    """While active, `tensor.to(an XLA device)` of anything large gives a placeholder.

    Tensors on the `meta` device, which have a shape and nothing else, may stand for weights; large
    ones that `torch.zeros` makes are such.
    """

    def __init__(self) -> None:
        super().__init__()
        #: Bytes that the placeholders would take.
        self.nbytes = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Do what was called, or give a placeholder in its place."""
        kwargs = kwargs or {}
        if func is torch.zeros and not kwargs.get("device"):
            kwargs["device"] = "meta" if _nbytes(args, kwargs) > _SMALL else "cpu"
        if func is Tensor.cpu and args[0].is_meta:
            return args[0]
        if func is Tensor.to and _to_xla(args[1:], kwargs):
            tensor = args[0]
            if tensor.is_meta or (tensor.device.type == "cpu" and tensor.nbytes > _SMALL):
                made = placeholder(tensor.shape, _dtype(args[1:], kwargs) or tensor.dtype)
                self.nbytes += made.numel() * made.element_size()
                return made
        return func(*args, **kwargs)


def placeholder(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a device tensor that holds nothing."""
    tensor: Tensor = xla_builder.create_placeholder_tensor(torch.Size(shape), dtype)
    return tensor


def _nbytes(size: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    dims = size[0] if size and not isinstance(size[0], int) else size
    return int(math.prod(dims) * (kwargs.get("dtype") or torch.get_default_dtype()).itemsize)


def _to_xla(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    named = [*args, *kwargs.values()]
    return any(
        (isinstance(one, torch.device) and one.type == "xla")
        or (isinstance(one, str) and one.startswith("xla"))
        for one in named
    )


def _dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    return next((one for one in [*args, *kwargs.values()] if isinstance(one, torch.dtype)), None)
