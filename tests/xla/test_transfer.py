"""What a step brings over and fetches, by either of the two ways."""

import numpy as np
import pytest
import torch
import torch_xla
from loralane_server.device.xla import transfer
from loralane_server.device.xla.graphs import Graphs
from loralane_server.device.xla.transfer import bring, fetch

WAYS = pytest.mark.parametrize("direct", [True, False], ids=["direct", "public"])


def test_this_torch_xla_has_the_names() -> None:
    assert transfer._DIRECT


@WAYS
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32])
def test_what_is_brought_is_what_is_fetched(dtype: type[np.generic], *, direct: bool) -> None:
    values = np.arange(-3, 5).astype(dtype).reshape(2, 4)

    brought = bring(values, direct=direct)

    assert brought.device == torch_xla.device()
    (found,) = fetch([brought], direct=direct)
    assert found.dtype == dtype
    assert found.tolist() == values.tolist()


@WAYS
def test_a_graph_runs_on_what_is_brought_and_is_waited_for(*, direct: bool) -> None:
    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        for _ in range(20):
            x = x @ x / 400
        return [x.argmax(dim=-1), x]

    ones = np.ones((400, 400), np.float32)
    graph = Graphs().compile("powers", fn, [torch.from_numpy(ones).to(torch_xla.device())])

    tokens, powers = fetch(graph.run([bring(ones, direct=direct)]), direct=direct)

    # A matrix of ones squared is 400 times itself.
    assert np.array_equal(powers, ones)
    assert tokens.shape == (400,)
