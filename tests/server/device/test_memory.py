import pytest
import torch
from loralane_server.device.memory import lazy_zeros


@pytest.mark.parametrize("shape", [(2, 3), (1,), (0, 4), (2, 0)])
def test_zeros_have_the_shape_that_was_asked_for_also_without_elements(
    shape: tuple[int, ...],
) -> None:
    found = lazy_zeros(shape, torch.float32)

    assert found.shape == shape
    assert found.eq(torch.zeros(shape)).all()
