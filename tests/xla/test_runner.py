"""The runner: all graphs before the first step, and no step after the device failed."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from loralane_server.assembly import DEMO
from loralane_server.device.seam import GraphCount, Sampling, StepInput, chosen_for
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


@pytest.fixture(scope="module")
def runner() -> XlaRunner:
    device = XlaDevice(SPEC, BUCKETS, dtype=torch.float32, pages=PAGES, tpu=False)
    runner = runner_on(device)
    runner.compile()
    return runner


def second(token: int, row: int) -> StepInput:
    """The second token of a row whose first is in its page: greedy, with its log-probability."""
    step = step_of([(1, 1, (row,), ())])
    step.tokens[:] = token
    return replace(step, top_logprobs=0)


ASKED = {
    "greedy": Sampling(),
    "biased": Sampling(logit_bias=((33, 100.0),)),
    "drawn": Sampling(temperature=5.0, seed=3),
    "cut": Sampling(temperature=5.0, seed=4, top_k=50),
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED.keys())
@pytest.mark.parametrize("row", [0, 1])
def test_the_next_step_takes_on_the_device_what_a_row_of_the_last_one_chose(
    runner: XlaRunner, asked: Sampling, row: int
) -> None:
    """Whatever chose it, in a graph of other rows."""
    wanted = [Sampling(logit_bias=((44, 100.0),))] * 2
    wanted[row] = asked
    both = replace(step_of([(0, 1, (0,), ()), (0, 1, (1,), ())]), sampling=wanted)

    first = runner.submit(both)
    ahead = runner.submit(second(chosen_for(row), row))

    tokens, followed = first.fetch().tokens, ahead.fetch()
    told = runner.submit(second(int(tokens[row]), row)).fetch()
    assert tokens[1 - row] == 44 != tokens[row]
    assert followed.tokens.tolist() == told.tokens.tolist()
    assert followed.logprobs is not None
    assert followed.logprobs.tolist() == told.logprobs.tolist()  # type: ignore[union-attr]


def test_every_row_takes_its_own_for_as_many_steps_as_there_are(runner: XlaRunner) -> None:
    def step(position: int, tokens: Sequence[int]) -> StepInput:
        made = step_of([(position, 1, (0,), ()), (position, 1, (1,), ())])
        made.tokens[:] = tokens
        return made

    told, tokens = [], [100, 101]
    for position in range(8):
        tokens = runner.submit(step(position, tokens)).fetch().tokens.tolist()
        told.append(tokens)

    ahead = [runner.submit(step(0, [100, 101]))]
    followed = []
    for position in range(1, 8):
        ahead.append(runner.submit(step(position, [chosen_for(0), chosen_for(1)])))
        followed.append(ahead.pop(0).fetch().tokens.tolist())
    followed.append(ahead.pop().fetch().tokens.tolist())

    assert followed == told
    assert len({tuple(pair) for pair in told}) > 1


def test_a_device_that_fails_in_a_step_says_so(device: XlaDevice) -> None:
    runner = runner_on(device)
    runner.compile()
    runner.submit(decode_step()).fetch()
    cell = device.kv_cells()[0]
    cell.tensor = cell.tensor[:1]

    with pytest.raises(DeviceFailed, match="the device failed in a step"):
        runner.submit(decode_step()).fetch()
