"""Nothing that a request can cause makes XLA compile after the warm-up."""

import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
import torch_xla
from loralane_server.adapters.pool import lanes_for
from loralane_server.config import ShardConfig
from loralane_server.device.seam import Sampling
from loralane_server.kv.pages import PAGE_TOKENS
from loralane_server.rows import Admission
from transformers import LlamaConfig

from tests import reference
from tests.server.conftest import Listener, digest_of, running
from tests.xla.compilations import Compilations

ROOT = Path(__file__).parents[2]
STEPS = 1000
#: They give two sizes of KV and three windows of lanes.
ROWS, LENGTH, STEP_TOKENS = 6, 512, 64
#: Room for half of the forty: they take each other's lanes all the time.
LANES = 512
#: Room for three of the longest rows: others stop for them, and go on later.
KV_MEMORY = 100 * 2 * 3 * 2 * 16 * 4 * PAGE_TOKENS
RANKS = (1, 4, 8, 12, 24, 64)
TARGETS = (
    reference.LINEARS,
    ("q_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj", "down_proj"),
    ("k_proj", "down_proj"),
)
FORTY = tuple(
    reference.AdapterRecipe(
        f"a{i}",
        RANKS[i % len(RANKS)],
        8,
        TARGETS[i % len(TARGETS)],
        layers=(1,) if i % 7 == 3 else None,
    )
    for i in range(40)
)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    folder = tmp_path_factory.mktemp("forty")
    longer = {**reference.FAMILIES["llama"].to_dict(), "max_position_embeddings": LENGTH}
    model = reference.random_model(LlamaConfig(**longer))
    reference.save_model(model, folder / "model")
    for seed, recipe in enumerate(FORTY):
        reference.save_adapter(model, recipe, folder / "adapters" / recipe.name, seed)
    config = ShardConfig(
        model=str(folder / "model"),
        adapter_roots=(folder / "adapters",),
        device="xla",
        dtype="float32",
        max_rows=ROWS,
        max_model_len=LENGTH,
        lanes=LANES,
        kv_memory=KV_MEMORY,
        step_tokens=STEP_TOKENS,
    )
    with running(config) as listener:
        yield listener


def any_sampling(rng: random.Random) -> Sampling:
    """Half of them greedy; the others with every parameter in use or not."""
    bias = [(token, rng.uniform(-8, 8)) for token in rng.sample(range(256), rng.choice((1, 9, 90)))]
    biases = tuple(bias) if rng.random() < 0.2 else ()
    if rng.random() < 0.5:
        return Sampling(logit_bias=biases)
    return Sampling(
        temperature=rng.choice((0.01, 0.7, 1.0, 2.0)),
        top_k=rng.choice((0, 1, 40, reference.VOCAB)),
        top_p=rng.choice((0.1, 0.9, 1.0)),
        seed=rng.getrandbits(64),
        logit_bias=biases,
    )


def any_admission(rng: random.Random, request_id: int, digests: list[str]) -> Admission:
    prompt = rng.choice((1, 2, rng.randint(1, LENGTH - 1), LENGTH - 1))
    return Admission(
        request_id,
        rng.choice(digests),
        tuple(rng.randrange(256) for _ in range(prompt)),
        max_tokens=min(LENGTH - prompt, rng.choice((1, 8, 30))),
        sampling=any_sampling(rng),
        logprobs=rng.choice((0, 1, 5, 20)) if rng.random() < 0.2 else None,
    )


def made(listener: Listener) -> int:
    """How many steps the shard has made."""
    return listener.steps[-1].step if listener.steps else 0


def has_moved(listener: Listener, since: int, live: list[int]) -> bool:
    return made(listener) > since or any(map(listener.ended, live))


def drive(listener: Listener, rng: random.Random, digests: list[str], steps: int) -> None:
    """Keep a changing number of rows running until so many steps were made; cancel some."""
    lanes = {d: lanes_for(listener.shard.store.summary(d).rank) if d else 0 for d in digests}
    numbers, live = count(len(listener.rows)), dict[int, Admission]()
    candidate = any_admission(rng, next(numbers), digests)
    last = made(listener) + steps

    def room(wanted: int) -> bool:
        users = {a.digest for a in (*live.values(), candidate)}
        return len(live) < wanted and sum(lanes[d] for d in users) <= LANES

    while made(listener) < last:
        wanted = rng.randint(1, ROWS)
        while room(wanted):
            live[candidate.request_id] = candidate
            listener.admit(candidate)
            candidate = any_admission(rng, next(numbers), digests)
        if rng.random() < 0.1:
            listener.cancel(rng.choice(list(live)))
        listener.wait_until(partial(has_moved, listener, made(listener), list(live)))
        live = {i: a for i, a in live.items() if not listener.ended(i)}
    listener.wait(*live)


def test_a_thousand_steps_of_every_kind_compile_nothing(shard: Listener) -> None:
    digests = ["", *(digest_of(shard.shard, recipe.name) for recipe in FORTY)]
    before = Compilations.so_far()

    drive(shard, random.Random(8), digests, STEPS)

    assert Compilations.so_far() == before
    events = [event for row in shard.rows.values() for event in row]
    assert [event.error for event in events if event.error] == []
    assert len(shard.rows) > STEPS // 20  # they did come and go
    residents = [event.residency for event in shard.steps]
    evicted = {r.digest for change in residents for r in change if r.tier != "device"}
    assert len(evicted) > len(FORTY) // 2


def test_what_would_compile_is_counted() -> None:
    device = torch_xla.device()
    (torch.ones(3, 5, device=device) + 1).cpu()
    before = Compilations.so_far()

    (torch.ones(3, 7, device=device) + 1).cpu()

    after = Compilations.so_far()
    assert after.uncached > before.uncached
    assert after.timed > before.timed
    assert after.graphs > before.graphs


FETCH_OF_SHARDED = """
import numpy, torch, torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from tests.xla.compilations import Compilations

xr.use_spmd()
mesh = xs.Mesh(numpy.arange(2), (2,), ("model",))
sharded = torch.ones(8, 4).to(torch_xla.device())
xs.mark_sharding(sharded, mesh, ("model", None))
doubled = sharded * 2
torch_xla.sync()
before = Compilations.so_far()
doubled.cpu()
print(Compilations.so_far().replicated - before.replicated)
"""


def test_a_fetch_of_a_sharded_tensor_is_counted() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FETCH_OF_SHARDED],
        cwd=ROOT,
        env={"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 0
