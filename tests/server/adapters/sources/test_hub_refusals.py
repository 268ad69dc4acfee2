from pathlib import Path

import pytest
from loralane_server.adapters.sources.hub_source import HubSettings
from loralane_server.adapters.store.resolver import HUB_TTL_S
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.errors import (
    AdapterCorrupt,
    AdapterForbidden,
    AdapterIncompatible,
    AdapterNotFound,
    ShardError,
    SourceUnavailable,
)

from tests.server.adapters.clock import Clock
from tests.server.adapters.samples import (
    adapter_files,
    load,
    lora,
    safetensors,
    store_at,
)
from tests.server.adapters.sources.fake_hub import FakeHub, Fault, Repo

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"

REFUSALS = {
    "missing repository": ("org/nope", {}, AdapterNotFound, "no such repository"),
    "missing revision": ("org/a@v9", {}, AdapterNotFound, "no such revision"),
    "missing config": (
        "org/a",
        {CONFIG: Fault(404, {"X-Error-Code": "EntryNotFound"})},
        AdapterNotFound,
        "no such file",
    ),
    "bare 401": ("org/a", {CONFIG: Fault(401)}, AdapterForbidden, "may not read it"),
    "gated": (
        "org/a",
        {CONFIG: Fault(403, {"X-Error-Code": "GatedRepo"})},
        AdapterForbidden,
        "gated",
    ),
    "gated weights": (
        "org/a",
        {WEIGHTS: Fault(403, {"X-Error-Code": "GatedRepo"})},
        AdapterForbidden,
        "gated",
    ),
    "bare 404": ("org/a", {CONFIG: Fault(404)}, AdapterNotFound, "not found"),
    "busy": ("org/a", {CONFIG: Fault(429, {"Retry-After": "7"})}, SourceUnavailable, "429"),
    "broken": ("org/a", {WEIGHTS: Fault(503)}, SourceUnavailable, "503"),
    "dripping": ("org/a", {WEIGHTS: Fault(drip_s=0.2)}, SourceUnavailable, "does not answer"),
    "silent": ("org/a", {CONFIG: Fault(hang=True)}, SourceUnavailable, "does not answer"),
    "endless redirects": (
        "org/a",
        {CONFIG: Fault(loop=True)},
        SourceUnavailable,
        "does not answer",
    ),
    "cut off": ("org/a", {WEIGHTS: Fault(cut_after=3)}, SourceUnavailable, "does not answer"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_the_hub_refuses_has_a_name(case: str, hub: FakeHub, hub_store: AdapterStore) -> None:
    reference, faults, error, words = REFUSALS[case]
    hub.repos["org/a"] = Repo(adapter_files(), faults=faults)

    with pytest.raises(error, match=words) as caught:
        hub_store.resolve(reference).result()

    assert hub_store.list() == ((), 0)
    assert isinstance(caught.value, ShardError)
    away = 500 if error is SourceUnavailable else 0
    assert caught.value.retry_after_ms == (7000 if case == "busy" else away)
    assert hub.requests["GET", "org/a", CONFIG] <= 1


def test_a_hub_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    store = store_at(hub=HubSettings("http://127.0.0.1:9", tmp_path, timeout_s=1.0))

    with pytest.raises(SourceUnavailable, match="does not answer"):
        store.resolve("org/a").result()
    store.close()


def test_an_adapter_that_was_checked_outlives_a_hub_that_does_not_answer(
    hub: FakeHub, hub_store: AdapterStore, clock: Clock
) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    index = hub_store.resolve("org/a").result()
    hub.repos["org/a"].faults[CONFIG] = Fault(503)
    clock.now += HUB_TTL_S + 1

    assert hub_store.resolve("org/a").result() is index
    with pytest.raises(SourceUnavailable):
        hub_store.resolve("org/a", "another").result()


@pytest.mark.parametrize(
    ("files", "error", "words"),
    [
        ({"adapter_model.bin": b"\x80"}, AdapterIncompatible, r"adapter_model\.bin.*safetensors"),
        ({}, AdapterNotFound, r"adapter_model\.safetensors is missing"),
        ({WEIGHTS: b""}, AdapterCorrupt, "truncated"),
        ({WEIGHTS: b"<html>sign in</html>"}, AdapterCorrupt, "HTML"),
        ({WEIGHTS: safetensors(lora())[:-1]}, AdapterCorrupt, "truncated"),
    ],
)
def test_repositories_that_hold_no_adapter_are_refused(
    files: dict[str, bytes],
    error: type[ShardError],
    words: str,
    hub: FakeHub,
    hub_store: AdapterStore,
) -> None:
    hub.repos["org/a"] = Repo({CONFIG: adapter_files()[CONFIG]} | files)

    with pytest.raises(error, match=words):
        hub_store.resolve("org/a").result()


def test_what_the_hub_refused_is_not_asked_for_again_at_once(
    hub: FakeHub, hub_store: AdapterStore, clock: Clock
) -> None:
    for _ in range(5):
        with pytest.raises(AdapterNotFound, match="no such repository"):
            hub_store.resolve("org/new").result()
    assert hub.total() == 1

    hub.repos["org/new"] = Repo(adapter_files())
    clock.now += 1.0

    assert hub_store.resolve("org/new").result().rank == 4


def test_what_does_not_fit_is_not_read_again_at_once(
    hub: FakeHub, hub_store: AdapterStore, clock: Clock
) -> None:
    hub.repos["org/a"] = Repo(adapter_files(peft_type="IA3"))
    for _ in range(3):
        with pytest.raises(AdapterIncompatible, match="IA3"):
            hub_store.resolve("org/a").result()
    assert hub.requests["HEAD", "org/a", CONFIG] == 1

    clock.now += 1.0
    for _ in range(3):
        with pytest.raises(AdapterIncompatible, match="IA3"):
            hub_store.resolve("org/a").result()
        clock.now += 0.5
    assert hub.requests["HEAD", "org/a", CONFIG] == 2

    hub.repos["org/a"] = Repo(adapter_files(), commit="d" * 40)
    clock.now += 0.5

    assert hub_store.resolve("org/a").result().rank == 4


def test_a_busy_hub_is_left_alone_for_as_long_as_it_asks(
    hub: FakeHub, hub_store: AdapterStore, clock: Clock
) -> None:
    hub.repos["org/a"] = Repo(adapter_files(), faults={CONFIG: Fault(429, {"Retry-After": "7"})})
    waits = []
    for _ in range(3):
        with pytest.raises(SourceUnavailable, match="429") as caught:
            hub_store.resolve("org/a").result()
        waits.append(caught.value.retry_after_ms)
        clock.now += 2.0

    assert waits == [7000, 5000, 3000]
    assert hub.total() == 1


def test_sixty_four_adapters_that_hang_hold_up_no_other(hub: FakeHub, tmp_path: Path) -> None:
    for n in range(64):
        hub.repos[f"org/hangs{n}"] = Repo(adapter_files(), faults={CONFIG: Fault(hang=True)})
    hub.repos["org/well"] = Repo(adapter_files())
    store = store_at(hub=HubSettings(hub.url, tmp_path / "cache", timeout_s=30.0))
    waiting = [store.resolve(f"org/hangs{n}") for n in range(64)]

    digest = store.resolve("org/well").result(timeout=25).digest
    layers = load(store, digest)

    assert len(layers) == 3
    assert not any(future.done() for future in waiting)
    hub.closed.set()
    for future in waiting:
        assert isinstance(future.exception(), SourceUnavailable)
    store.close()
