"""Waves: prompts are computed as far as their adapter has arrived, and nobody else is held up.

Expected tokens are those of transformers and PEFT; the tiny model has three layers, so a wave has
at most 48 tokens.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from loralane_server.errors import AdapterCorrupt, ShardError
from loralane_server.rows import Admission, Finish

from tests import reference
from tests.server.conftest import Listener
from tests.server.gated import GatedShard, gated
from tests.server.test_exactness_wild import save_adapter

LAYERS = 3
TOKENS = 12
#: The ends, the layers, and the end of the load.
STAGES = range(-1, LAYERS + 1)

#: Adapters that are more than lanes; gain and shift come with the last layer only.
WILD = {
    "gain": {"target_modules": ["q_proj", "up_proj"], "use_dora": True, "layers_to_transform": [2]},
    "shift": {"target_modules": ["down_proj"], "lora_bias": True, "layers_to_transform": [2]},
    "ends": {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "tokens": {"target_modules": ["k_proj"], "trainable_token_indices": list(range(40, 80))},
    "head": {"target_modules": ["k_proj"], "modules_to_save": ["lm_head"]},
}

Running = tuple[GatedShard, Listener]
Expected = Callable[[str, tuple[int, ...]], list[int]]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> Expected:
    """What an adapter ("" = the base) makes of a prompt."""
    model = reference.random_model(reference.FAMILIES["llama"])

    def greedy(adapter: str, prompt: tuple[int, ...]) -> list[int]:
        path = tiny / "adapters" / adapter if adapter else None
        return reference.greedy(model, path, [prompt], TOKENS)[0]

    return greedy


@pytest.fixture
def running(tiny: Path) -> Iterator[Running]:
    with gated(tiny) as shard:
        yield shard


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(256) for _ in range(length))


def stream(request_id: int) -> Admission:
    """A row of the base that goes on until it is cancelled."""
    return Admission(request_id, "", prompt_of(5), max_tokens=240)


def more_tokens(listener: Listener, request_id: int) -> None:
    """Wait until a stream has gone on for some steps."""
    enough = len(listener.tokens(request_id)) + 4
    listener.wait_until(lambda: len(listener.tokens(request_id)) >= enough)


@pytest.mark.parametrize("adapter", ["r1", "r16-last", "r16-pattern", "r64", "r9-o"])
def test_tokens_are_the_same_when_every_layer_is_computed_as_it_comes(
    running: Running, expected: Expected, adapter: str
) -> None:
    shard, listener = running
    digest = shard.digest(adapter)
    prompts = [prompt_of(length, seed=length) for length in (7, 1, 30)]
    shard.store.hold(digest)
    listener.admit(*(Admission(i, digest, p, TOKENS) for i, p in enumerate(prompts)))

    computed = []
    for stage in STAGES[:-1]:
        shard.store.hold(digest, stage)
        caught_up = shard.until(digest, lambda p, n=stage + 1: p.written == p.computed == n)
        computed.append((caught_up.computed, sorted(caught_up.rows)))
    early = [listener.tokens(i) for i in range(3)]
    shard.store.open(digest)
    listener.wait(0, 1, 2)

    assert computed == [(0, []), (1, [0, 1, 2]), (2, [0, 1, 2]), (3, [0, 1, 2])]
    assert early == [[], [], []]
    assert [listener.tokens(i) for i in range(3)] == [expected(adapter, p) for p in prompts]


@pytest.mark.parametrize("kind", WILD)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed:Warning")
@pytest.mark.filterwarnings("ignore:Adapter 'default'.*invalid shape:Warning")
def test_what_is_not_in_lanes_arrives_in_time_too(kind: str, tmp_path: Path) -> None:
    model = reference.random_model(reference.FAMILIES["llama"])
    reference.save_model(model, tmp_path / "model")
    save_adapter(model, WILD[kind], tmp_path / "adapters" / "wild", seed=1)
    wanted = reference.greedy(model, tmp_path / "adapters" / "wild", [prompt_of(20)], TOKENS)[0]
    with gated(tmp_path) as (shard, listener):
        digest = shard.digest("wild")
        shard.store.hold(digest)
        listener.admit(Admission(1, digest, prompt_of(20), TOKENS))

        for stage in STAGES[:-1]:
            shard.store.hold(digest, stage)
            shard.until(digest, lambda p, n=stage + 1: p.computed == n)
        shard.store.open(digest)
        listener.wait(1)

        assert listener.tokens(1) == wanted
        assert wanted != listener.generate(Admission(2, "", prompt_of(20), TOKENS))[0]


def test_a_prompt_longer_than_a_wave_is_finished_by_ordinary_steps(
    running: Running, expected: Expected
) -> None:
    shard, listener = running
    digest = shard.digest("r8")
    long, short = prompt_of(150), prompt_of(9, seed=1)
    shard.store.hold(digest, through=1)
    listener.admit(Admission(1, digest, long, TOKENS), Admission(2, digest, short, TOKENS))

    rows = shard.until(digest, lambda p: p.computed == 2).rows
    shard.store.open(digest)
    listener.wait(1, 2)

    assert rows == (1,)
    assert listener.tokens(1) == expected("r8", long)
    assert listener.tokens(2) == expected("r8", short)


def test_others_go_on_while_a_load_stands_still(running: Running, expected: Expected) -> None:
    shard, listener = running
    slow, quick = shard.digest("r16"), shard.digest("r5")
    listener.admit(stream(1))
    shard.store.hold(slow, through=0)
    listener.admit(Admission(2, slow, prompt_of(20), TOKENS))
    shard.until(slow, lambda p: p.computed == 1)

    more_tokens(listener, 1)
    (other,) = listener.generate(Admission(3, quick, prompt_of(20), TOKENS))
    (still,) = shard.engine.loading().result()

    assert other == expected("r5", prompt_of(20))
    assert (still.written, still.computed) == (1, 1)
    shard.store.open(slow)
    listener.wait(2)
    assert listener.tokens(2) == expected("r16", prompt_of(20))
    listener.cancel(1)
    listener.wait(1)


def test_a_row_that_comes_late_waits_for_the_end_of_the_load(
    running: Running, expected: Expected
) -> None:
    shard, listener = running
    digest = shard.digest("r12")
    shard.store.hold(digest, through=1)
    listener.admit(Admission(1, digest, prompt_of(20), TOKENS))
    shard.until(digest, lambda p: p.computed == 2)

    listener.admit(Admission(2, digest, prompt_of(8), TOKENS))
    waiting = shard.until(digest, lambda p: p.computed == 2)
    shard.store.open(digest)
    listener.wait(1, 2)

    assert waiting.rows == (1,)
    assert listener.tokens(1) == expected("r12", prompt_of(20))
    assert listener.tokens(2) == expected("r12", prompt_of(8))


def test_a_load_that_nobody_waited_for_at_first_gets_its_wave_later(
    running: Running, expected: Expected
) -> None:
    shard, listener = running
    digest = shard.digest("r3")
    shard.store.hold(digest, through=1)
    resident = shard.engine.load(digest)
    shard.until(digest, lambda p: p.written == 2)

    listener.admit(Admission(1, digest, prompt_of(20), TOKENS))
    shard.until(digest, lambda p: p.computed == 2)
    shard.store.open(digest)
    listener.wait(1)

    assert resident.result() is None
    assert listener.tokens(1) == expected("r3", prompt_of(20))


def test_pages_of_a_cancelled_row_are_not_written_by_its_wave(
    tiny: Path, expected: Expected
) -> None:
    with gated(tiny, pages=6) as (shard, listener):
        digest = shard.digest("r24")
        shard.store.hold(digest, through=0)
        listener.admit(
            Admission(1, digest, prompt_of(20, seed=1), TOKENS),
            Admission(2, digest, prompt_of(20, seed=2), TOKENS),
        )
        shard.until(digest, lambda p: p.rows == (1, 2) and p.computed == 1)

        listener.cancel(1)
        listener.admit(stream_of_pages(3))  # takes just the pages that are free now
        more_tokens(listener, 3)
        anew = shard.until(digest, lambda p: p.rows == (2,) and p.computed == 1)
        shard.store.open(digest)
        listener.wait(2, 3)

        assert anew.written == 1
        assert listener.tokens(2) == expected("r24", prompt_of(20, seed=2))
        assert listener.tokens(3)[:TOKENS] == expected("", prompt_of(20, seed=3))


def stream_of_pages(request_id: int) -> Admission:
    """A row of the base that fills four pages."""
    return Admission(request_id, "", prompt_of(20, seed=3), max_tokens=44)


def test_a_wave_begins_behind_what_was_computed_before_its_adapter_left(
    running: Running, expected: Expected
) -> None:
    shard, listener = running
    digest = shard.digest("r9-o")
    prompt = prompt_of(40)
    listener.generate(Admission(1, digest, prompt, TOKENS))
    shard.engine.unload(digest).result()
    shard.store.hold(digest)

    listener.admit(Admission(2, digest, prompt, TOKENS), Admission(3, digest, prompt[:33], TOKENS))
    shard.store.hold(digest, through=0)
    waved = shard.until(digest, lambda p: p.computed == 1).rows
    shard.engine.check()
    shard.store.open(digest)
    listener.wait(2, 3)

    assert set(waved) == {2, 3}
    assert [listener.rows[i][0].cached_tokens for i in (1, 2, 3)] == [0, 32, 32]
    assert listener.tokens(1) == listener.tokens(2) == expected("r9-o", prompt)
    assert listener.tokens(3) == expected("r9-o", prompt[:33])


def test_a_load_that_breaks_off_fails_its_rows_and_frees_everything(
    running: Running, expected: Expected
) -> None:
    shard, listener = running
    digest = shard.digest("r48")
    shard.store.hold(digest, through=1)
    listener.admit(*(Admission(i, digest, prompt_of(20), TOKENS) for i in (1, 2)))
    loading = shard.engine.load(digest)
    shard.until(digest, lambda p: p.computed == 2)

    shard.store.break_off(digest, AdapterCorrupt("layer 2 is gone"))
    listener.wait(1, 2)

    assert [type(listener.rows[i][-1].error) for i in (1, 2)] == [AdapterCorrupt] * 2
    assert isinstance(loading.exception(), AdapterCorrupt)
    capacity = shard.engine.capacity().result()
    assert (capacity.rows_free, capacity.pages_free, capacity.lanes_free) == (
        capacity.rows_total, capacity.pages_total, capacity.lanes_total
    )  # fmt: skip
    shard.engine.check()
    shard.store.open(digest)
    (again,) = listener.generate(Admission(3, digest, prompt_of(20), TOKENS))
    assert again == expected("r48", prompt_of(20))


def test_a_wave_that_the_device_fails_ends_its_own_rows_only(running: Running) -> None:
    shard, listener = running
    digest = shard.digest("r2-qv")
    shard.store.hold(digest, through=0)
    listener.admit(Admission(1, digest, prompt_of(20), TOKENS))
    shard.until(digest, lambda p: p.computed == 1)

    shard.device.broken_layer = 1
    shard.store.hold(digest, through=1)
    listener.wait(1)
    shard.device.broken_layer = None
    shard.store.open(digest)
    (base,) = listener.generate(Admission(2, "", prompt_of(20), TOKENS))

    assert type(listener.rows[1][-1].error) is ShardError
    assert "out of order" in listener.rows[1][-1].error.message  # type: ignore[union-attr]
    assert len(base) == TOKENS
    assert shard.engine.load(digest).result() is None


def test_a_wave_counts_as_one_step(running: Running) -> None:
    shard, listener = running
    digest = shard.digest("r8-rs")
    shard.store.hold(digest, through=2)
    listener.admit(Admission(1, digest, prompt_of(20), max_tokens=3))
    shard.until(digest, lambda p: p.computed == 3)

    shard.store.open(digest)
    listener.wait(1)

    steps = [e.step for e in listener.steps for row in e.rows if row.tokens]
    assert steps == [1, 2, 3]
    assert listener.rows[1][0].cold_ms > 0
    assert listener.rows[1][1].cold_ms == 0


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_in_any_order_books_balance_and_tokens_are_right(
    tiny: Path, expected: Expected, seed: int
) -> None:
    """Rows come and are cancelled while loads advance, break off, and evict one another."""
    rng = random.Random(seed)
    names = ("r5", "r12", "r16", "r24", "r48")
    with gated(tiny, lanes=80, rows=6, pages=24) as (shard, listener):
        digests = {name: shard.digest(name) for name in names}
        asked: dict[int, tuple[str, tuple[int, ...]]] = {}
        for request_id in range(40):
            name = rng.choice((*names, ""))
            prompt = prompt_of(rng.choice((1, 6, 20, 60)), seed=request_id % 5)
            asked[request_id] = (name, prompt)
            if name:
                shard.store.hold(digests[name], rng.choice(STAGES))
            listener.admit(Admission(request_id, digests.get(name, ""), prompt, TOKENS))
            for _ in range(rng.randrange(4)):
                disturb(rng, shard, listener, list(digests.values()))
                shard.engine.check()
            if request_id % 5 == 4:  # else later rows find no room, more of them on a slow machine
                for digest in digests.values():
                    shard.store.open(digest)
                listener.wait(*asked)
        shard.engine.check()

        finished = [i for i in asked if listener.rows[i][-1].finish is Finish.LENGTH]
        assert len(finished) > 5
        for i in finished:
            assert listener.tokens(i) == expected(*asked[i]), asked[i]


def disturb(rng: random.Random, shard: GatedShard, listener: Listener, digests: list[str]) -> None:
    digest = rng.choice(digests)
    match rng.randrange(8):
        case 0:
            shard.store.break_off(digest, AdapterCorrupt("broken off"))
        case 1:
            listener.cancel(rng.randrange(40))
        case 2:
            shard.store.open(digest)
        case _:
            shard.store.hold(digest, rng.choice(STAGES))
