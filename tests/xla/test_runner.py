"""The runner: all graphs before the first step, and no step after the device failed."""

import re

import pytest
import torch
from loralane_server.assembly import DEMO
from loralane_server.device.seam import GraphCount, StepInput
from loralane_server.device.xla.buckets import Buckets, plan_buckets
from loralane_server.device.xla.device import XlaDevice
from loralane_server.device.xla.runner import XlaRunner
from loralane_server.errors import DeviceFailed
from loralane_server.model.spec import read_model_spec
from loralane_server.model.weights import load_decoder

from tests.server.device.xla.steps import step_of

SPEC = read_model_spec(DEMO / "model")
PAGES, MAX_LEN = 8, 64
BUCKETS: Buckets = plan_buckets(max_rows=2, step_tokens=1, max_len=MAX_LEN, lanes=0)
#: Forward graphs, and four that sample for each number of rows.
DECLARED = len(BUCKETS.declared()) + 4 * len(BUCKETS.rows)


def runner_on(device: XlaDevice) -> XlaRunner:
    decoder = load_decoder(DEMO / "model", SPEC, device, torch.float32, MAX_LEN)
    return XlaRunner(decoder, device, SPEC.vocab)


def decode_step() -> StepInput:
    return step_of([(0, 1, (0,), ())])


@pytest.fixture
def device() -> XlaDevice:
    return XlaDevice(SPEC, BUCKETS, dtype=torch.float32, pages=PAGES, tpu=False)


def test_every_declared_graph_is_compiled_and_shown(
    device: XlaDevice, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = runner_on(device)
    before = runner.graphs

    runner.compile()

    assert before == GraphCount(declared=DECLARED, compiled=0)
    assert runner.graphs == GraphCount(declared=DECLARED, compiled=DECLARED)
    shown = capsys.readouterr().err
    assert all(key.name in shown for key in BUCKETS.declared())
    assert re.search(rf"{DECLARED}/{DECLARED}", shown)


def test_a_device_that_fails_in_a_step_says_so(device: XlaDevice) -> None:
    runner = runner_on(device)
    runner.compile()
    runner.submit(decode_step()).fetch()
    cell = device.kv_cells()[0]
    cell.tensor = cell.tensor[:1]

    with pytest.raises(DeviceFailed, match="the device failed in a step"):
        runner.submit(decode_step()).fetch()
