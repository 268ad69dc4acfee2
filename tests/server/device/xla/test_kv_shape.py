"""KV memory is counted as it is allocated."""

import pytest
from loralane_server.device.xla.kv_shape import kv_shape


@pytest.mark.parametrize(
    ("head_dim", "kernel", "stored"),
    [(64, False, 64), (64, True, 128), (128, True, 128), (192, True, 256)],
)
def test_heads_are_padded_for_the_kernel_alone(head_dim: int, kernel: bool, stored: int) -> None:
    assert kv_shape(3, 8, head_dim, kernel=kernel)[-1] == stored
