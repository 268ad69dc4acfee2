"""What --kv-memory counts is what the device allocates."""

from math import prod

import pytest
import torch
import torch_xla
from loralane_server.device.xla.attention import Kernel, XlaAttention
from loralane_server.device.xla.kv_shape import kv_shape
from loralane_server.device.xla.mesh import Mesh


@pytest.mark.parametrize("kernel", [None, Kernel()])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_pages_and_the_dustbin_take_what_they_count(kernel: Kernel | None, head_dim: int) -> None:
    attention = XlaAttention(
        layers=3,
        pages=5,
        kv_heads=2,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        device=torch_xla.device(),
        kernel=kernel,
        mesh=Mesh(),
    )

    allocated = sum(cell.tensor.numel() for cell in attention.cells)

    assert allocated == 3 * prod(kv_shape(5 + 1, 2, head_dim, kernel=kernel is not None))
