"""Loading beside running rows: little at a time, and nobody waits for another's load."""

import shutil
from pathlib import Path

import pytest
from loralane_server.errors import AdapterCorrupt
from loralane_server.residency import LANE_BYTES_PER_STEP
from loralane_server.rows import Admission

from tests.server.conftest import Listener
from tests.server.gated import gated

#: Of rank 64, in float32: about 0.7 MB each.
MANY = 10
#: Three, and the ends.
LAYERS = 4


@pytest.fixture(scope="module")
def many(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, and so many large adapters that they exceed the bound between two steps."""
    folder = tmp_path_factory.mktemp("many")
    (folder / "model").symlink_to(tiny / "model")
    for number in range(MANY):
        shutil.copytree(tiny / "adapters" / "r64", folder / "adapters" / f"a{number}")
    return folder


def test_however_much_has_arrived_little_is_written_between_two_steps(many: Path) -> None:
    with gated(many, lanes=MANY * 64) as (shard, listener):
        digests = [shard.digest(f"a{number}") for number in range(MANY)]
        for digest in digests:
            shard.store.hold(digest)
        loading = [shard.engine.load(digest) for digest in digests]
        shard.engine.capacity().result()  # so all loads have begun
        shard.device.may_step.clear()
        listener.admit(Admission(1, "", (1, 2, 3), max_tokens=240))
        assert shard.device.is_waiting.wait(60)

        for digest in digests:
            shard.store.open(digest)
        shard.store.wait_for_layers(MANY * LAYERS)
        shard.device.may_step.set()
        for future in loading:
            future.result(60)

        layer = sum(shard.device.written) // (MANY * (LAYERS - 1))
        assert MANY * (LAYERS - 1) * layer > LANE_BYTES_PER_STEP
        assert max(shard.device.written) <= LANE_BYTES_PER_STEP + layer
        assert len([written for written in shard.device.written if written]) == 2
        listener.cancel(1)
        listener.wait(1)


def test_who_loads_an_adapter_right_behind_its_unloading_has_it_listed(tiny: Path) -> None:
    with gated(tiny) as (shard, listener):
        digest = shard.digest("r12")
        shard.engine.load(digest).result(60)
        shard.engine.pin(digest, True).result()
        pinned = shard.store.cache.pinned

        unloading = shard.engine.unload(digest)
        listener.generate(Admission(1, digest, (1, 2, 3), max_tokens=1))

        assert pinned == {digest}
        assert unloading.result().lanes == 16
        assert unloading.result().host_bytes > 0
        assert shard.store.is_listed(digest)
        assert shard.store.cache.pinned == frozenset()
        assert list(shard.engine.tenants()) == [digest]


def test_what_owns_no_lanes_is_not_pinned(tiny: Path) -> None:
    with gated(tiny) as (shard, _):
        digest = shard.digest("r12")

        assert not shard.engine.pin(digest, True).result()
        assert shard.store.cache.pinned == frozenset()


def test_a_load_that_hangs_holds_up_no_other(many: Path) -> None:
    with gated(many, lanes=MANY * 64) as (shard, _):
        digests = [shard.digest(f"a{number}") for number in range(MANY)]
        shard.store.hold(digests[0])
        hanging = shard.engine.load(digests[0])

        for digest in digests[1:]:
            shard.engine.load(digest).result(60)

        assert not hanging.done()
        shard.store.open(digests[0])
        hanging.result(60)


def tiers(listener: Listener, digest: str) -> list[str]:
    """Where an adapter was said to be, in order."""
    return [c.tier for event in listener.steps for c in event.residency if c.digest == digest]


def test_every_move_between_device_host_and_disk_is_told_once_on_an_idle_shard_too(
    tiny: Path,
) -> None:
    with gated(tiny, lanes=16) as (shard, listener):
        first, second = shard.digest("r12"), shard.digest("r16")

        shard.store.prefetch(first)
        listener.wait_until(lambda: tiers(listener, first) == ["host"])
        shard.engine.load(first).result(60)
        listener.wait_until(lambda: tiers(listener, first) == ["host", "device"])
        shard.engine.load(second).result(60)  # takes the lanes of the first
        listener.wait_until(lambda: tiers(listener, second) == ["device"])
        shard.store.unload(first)
        listener.wait_until(lambda: tiers(listener, first)[-1] == "disk")

        assert tiers(listener, first) == ["host", "device", "host", "disk"]


def test_the_host_copy_of_what_is_in_the_pool_comes_and_goes_unmentioned(tiny: Path) -> None:
    with gated(tiny) as (shard, listener):
        digest, other = shard.digest("r12"), shard.digest("r16")
        shard.engine.load(digest).result(60)

        shard.store.cache.drop(digest)
        shard.engine.load(other).result(60)
        listener.wait_until(lambda: tiers(listener, other) == ["device"])

        assert tiers(listener, digest) == ["device"]
        shard.engine.unload(digest).result()
        listener.wait_until(lambda: tiers(listener, digest) == ["device", "disk"])


def test_a_load_that_breaks_off_says_where_the_adapter_is_instead(tiny: Path) -> None:
    with gated(tiny) as (shard, listener):
        digest = shard.digest("r12")
        shard.store.hold(digest, through=0)
        loading = shard.engine.load(digest)
        shard.until(digest, lambda progress: progress.written == 1)

        shard.store.break_off(digest, AdapterCorrupt("layer 1 is gone"))

        assert isinstance(loading.exception(60), AdapterCorrupt)
        listener.wait_until(lambda: bool(tiers(listener, digest)))
        assert set(tiers(listener, digest)) <= {"host", "disk"}
