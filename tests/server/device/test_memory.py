import psutil
import pytest
import torch
from loralane_server.device.memory import lazy_zeros, mapped


@pytest.mark.parametrize("shape", [(2, 3), (1,), (0, 4), (2, 0)])
def test_zeros_have_the_shape_that_was_asked_for_also_without_elements(
    shape: tuple[int, ...],
) -> None:
    found = lazy_zeros(shape, torch.float32)

    assert found.shape == shape
    assert found.eq(torch.zeros(shape)).all()


def test_a_mapped_tensor_goes_back_to_the_kernel_when_it_is_freed() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    tensor = mapped((64, 1 << 20), torch.uint8).fill_(1)

    held = process.memory_info().rss - before
    del tensor
    kept = process.memory_info().rss - before

    assert held >= 64 << 20
    assert kept < 8 << 20
