"""Every form of the LoRA arithmetic equals a loop over rows."""

import pytest
import torch
from loralane_server.adapters.lanes import BASE, FREE, add_lanes, lora_delta

IN, OUT, LANES = 12, 10, 16


def pool(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(LANES, IN), torch.randn(LANES, OUT)


def test_each_row_gets_its_own_adapters_delta() -> None:
    a, b = pool()
    owner = torch.tensor([0] * 4 + [7] * 8 + [FREE] * 4)
    adapter = torch.tensor([7, 0, BASE, 7])
    x = torch.randn(4, IN)

    delta = lora_delta(x, a, b, owner, adapter)

    for row, who in enumerate(adapter.tolist()):
        lanes = [lane for lane, o in enumerate(owner.tolist()) if o == who]
        expected = sum((x[row] @ a[lane] * b[lane] for lane in lanes), torch.zeros(OUT))
        torch.testing.assert_close(delta[row], expected)


def test_a_base_row_is_untouched_bit_for_bit() -> None:
    a, b = pool()
    y, x = torch.randn(2, OUT), torch.randn(2, IN)

    delta = lora_delta(x, a, b, torch.zeros(LANES), torch.tensor([BASE, 0]))

    assert torch.equal(y[0] + delta[0], y[0])


@pytest.mark.parametrize("linears", [1, 2, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_linears_that_share_an_input_equal_one_at_a_time(linears: int, masked: bool) -> None:
    torch.manual_seed(1)
    outs = [OUT, 4, 6][:linears]
    a = torch.randn(LANES, linears, IN)
    bs = [torch.randn(LANES, out) for out in outs]
    x, y = torch.randn(5, IN), torch.randn(5, sum(outs))
    owner = torch.arange(LANES) // 8
    adapter = torch.tensor([0, 1, BASE, 1, 0]) if masked else torch.zeros(5)
    mine = adapter[:, None] == owner if masked else None
    starts = [sum(outs[:i]) for i in range(linears)]
    columns = [slice(s, s + out) for s, out in zip(starts, outs, strict=True)]
    expected = y.clone()
    for i in range(linears):
        who = owner if masked else torch.zeros(LANES)
        expected[:, columns[i]] += lora_delta(x, a[:, i], bs[i], who, adapter)

    add_lanes(y, x, a, list(zip(columns, bs, strict=True)), mine)

    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("linears", [1, 2])
def test_a_product_that_overflows_reaches_no_row_of_another_adapter(linears: int) -> None:
    torch.manual_seed(2)
    a, b = torch.randn(LANES, linears, IN), torch.randn(LANES, OUT)
    a[:8] = 3e38
    x, y = torch.randn(2, IN).abs() + 1, torch.zeros(2, linears * OUT)
    mine = torch.tensor([[1], [0]]) == torch.arange(LANES) // 8
    columns = [slice(i * OUT, (i + 1) * OUT) for i in range(linears)]

    add_lanes(y, x, a, [(part, b) for part in columns], mine)

    expected = [x[0] @ a[8:, i].T @ b[8:] for i in range(linears)]
    torch.testing.assert_close(y[0], torch.cat(expected))
    assert not y[1].isfinite().any()
