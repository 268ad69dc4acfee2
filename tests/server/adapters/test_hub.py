import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants, hf_hub_download, scan_cache_dir
from loralane_server.adapters.hub_http import body_client
from loralane_server.adapters.hub_source import HubSettings
from loralane_server.adapters.reader import LayerTensors
from loralane_server.adapters.resolver import HUB_TTL_S
from loralane_server.adapters.store import AdapterStore
from loralane_server.device.seam import ENDS
from loralane_server.errors import (
    AdapterCorrupt,
    AdapterForbidden,
    AdapterIncompatible,
    AdapterNotFound,
    InvalidRequest,
    ShardError,
    SourceUnavailable,
)

from tests.server.adapters.fake_hub import FakeHub, Fault, Repo, fake_hub
from tests.server.adapters.samples import (
    adapter_files,
    header_bytes,
    lora,
    safetensors,
    store_at,
    write,
)

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


class Clock:
    """Tells the time that it was set to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        yield hub


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(hub: FakeHub, tmp_path: Path, clock: Clock) -> Iterator[AdapterStore]:
    store = store_at(hub=HubSettings(hub.url, tmp_path / "cache", timeout_s=1.0), clock=clock)
    yield store
    hub.open.set()
    store.check()
    store.close()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Any:
    def switch() -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    return switch


def load(store: AdapterStore, digest: str) -> list[LayerTensors]:
    layers: list[LayerTensors] = []
    store.load(digest, layers.append).result()
    return layers


def test_resolving_reads_config_and_header_and_no_tensor_byte(
    hub: FakeHub, store: AdapterStore
) -> None:
    files = adapter_files()
    hub.repos["org/a"] = Repo(files)

    index = store.resolve("org/a").result()

    assert (index.rank, index.reference) == (4, "org/a")
    assert hub.sent[WEIGHTS] == header_bytes(files[WEIGHTS]) == store.header_bytes_read
    assert hub.sent[CONFIG] == len(files[CONFIG])
    assert store.tier(index.digest) == "remote"
    assert store.bytes_read == 0


def test_the_first_load_downloads_once_and_later_ones_not_at_all(
    hub: FakeHub, store: AdapterStore
) -> None:
    files = adapter_files()
    hub.repos["org/a"] = Repo(files)
    index = store.resolve("org/a").result()
    heads = hub.sent[WEIGHTS]

    first = load(store, index.digest)
    store.cache.drop(index.digest)
    second = load(store, index.digest)

    assert hub.sent[WEIGHTS] == heads + len(files[WEIGHTS])
    assert [layer.layer for layer in first] == [ENDS, 0, 1]
    assert first[-1].targets["q_proj"].a.equal(second[-1].targets["q_proj"].a)
    assert store.bytes_read == 2 * index.bytes


def test_a_cached_file_needs_no_range_request(
    hub: FakeHub, store: AdapterStore, clock: Clock
) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    index = store.resolve("org/a").result()
    load(store, index.digest)
    assert store.tier(index.digest) == "host"
    store.unload(index.digest)
    gets = hub.total("GET")

    again = store.resolve("org/a").result()

    assert again.digest == index.digest
    assert hub.total("GET") == gets
    assert store.tier(again.digest) == "disk"


def test_another_revision_is_another_adapter(
    hub: FakeHub, store: AdapterStore, clock: Clock
) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    before = store.resolve("org/a").result()
    hub.repos["org/a"] = Repo(adapter_files(lora(seed=2)), commit="d" * 40)
    clock.now += HUB_TTL_S + 1

    after = store.resolve("org/a").result()

    assert after.digest != before.digest
    assert store.resolve(f"org/a@{'d' * 40}").result() is after


def test_a_load_reads_what_was_resolved_not_what_the_branch_became(
    hub: FakeHub, store: AdapterStore
) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    index = store.resolve("org/a").result()
    hub.repos["org/a"] = Repo(adapter_files(lora(seed=2)), commit="d" * 40)

    with pytest.raises(AdapterNotFound, match="revision"):
        load(store, index.digest)


def test_the_hubs_answer_is_believed_for_a_few_seconds(
    hub: FakeHub, store: AdapterStore, clock: Clock
) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    index = store.resolve("org/a").result()
    asked = hub.total()

    assert store.resolve("org/a").result() is index
    assert hub.total() == asked
    clock.now += HUB_TTL_S + 1
    assert store.resolve("org/a").result() is index
    assert hub.total() > asked


def test_one_look_serves_all_who_ask_meanwhile(hub: FakeHub, store: AdapterStore) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    hub.open.clear()

    futures = [store.resolve("org/a") for _ in range(64)]
    hub.open.set()

    assert len({future.result().digest for future in futures}) == 1
    assert hub.requests["HEAD", "org/a", CONFIG] == 1


def test_a_private_adapter_is_never_handed_to_a_token_that_was_not_checked(
    hub: FakeHub, store: AdapterStore
) -> None:
    hub.repos["org/priv"] = Repo(adapter_files(), needs_token="TOKEN_A")
    index = store.resolve("org/priv", "TOKEN_A").result()
    load(store, index.digest)

    for token in (None, "TOKEN_B"):
        with pytest.raises(AdapterNotFound, match="may not see it") as caught:
            store.resolve("org/priv", token).result()
        assert "TOKEN" not in caught.value.message

    assert store.resolve("org/priv", "TOKEN_A").result() is index


def test_a_token_is_forgotten_when_the_files_are_there(hub: FakeHub, store: AdapterStore) -> None:
    hub.repos["org/priv"] = Repo(adapter_files(), needs_token="TOKEN_A")
    digest = store.resolve("org/priv", "TOKEN_A").result().digest
    load(store, digest)

    opener: Any = store.files_of(digest).open_file

    assert opener._folder.token.secret is None
    assert "TOKEN" not in repr(vars(store))


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
def test_what_the_hub_refuses_has_a_name(case: str, hub: FakeHub, store: AdapterStore) -> None:
    reference, faults, error, words = REFUSALS[case]
    hub.repos["org/a"] = Repo(adapter_files(), faults=faults)

    with pytest.raises(error, match=words) as caught:
        store.resolve(reference).result()

    assert store.list() == ((), 0)
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
    hub: FakeHub, store: AdapterStore, clock: Clock
) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    index = store.resolve("org/a").result()
    hub.repos["org/a"].faults[CONFIG] = Fault(503)
    clock.now += HUB_TTL_S + 1

    assert store.resolve("org/a").result() is index
    with pytest.raises(SourceUnavailable):
        store.resolve("org/a", "another").result()


def test_a_slow_hub_holds_up_nobody_else(hub: FakeHub, tmp_path: Path) -> None:
    folder = write(tmp_path / "local", adapter_files())
    store = store_at(aliases={"mine": str(folder)}, hub=HubSettings(hub.url, tmp_path / "cache"))
    for n in range(40):
        hub.repos[f"org/a{n}"] = Repo(adapter_files(lora(seed=n)))
    hub.open.clear()
    waiting = [store.resolve(f"org/a{n}") for n in range(40)]

    digest = store.resolve("mine").result().digest
    assert len(load(store, digest)) == 3

    assert not any(future.done() for future in waiting)
    hub.open.set()
    assert len({future.result().digest for future in waiting}) == 40
    store.close()


def test_a_hub_without_ranges_is_read_to_the_header_only(hub: FakeHub, store: AdapterStore) -> None:
    hub.repos["org/a"] = Repo(adapter_files(), ignores_range=True)

    assert store.resolve("org/a").result().rank == 4


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
    files: dict[str, bytes], error: type[ShardError], words: str, hub: FakeHub, store: AdapterStore
) -> None:
    hub.repos["org/a"] = Repo({CONFIG: adapter_files()[CONFIG]} | files)

    with pytest.raises(error, match=words):
        store.resolve("org/a").result()


def test_wrong_weights_are_kept_aside_fetched_once_more_and_then_refused_for_a_while(
    hub: FakeHub, store: AdapterStore, clock: Clock, tmp_path: Path
) -> None:
    files = adapter_files()
    wrong = files[WEIGHTS][:-1] + b"\xff"
    hub.repos["org/a"] = Repo(files)
    digest = store.resolve("org/a").result().digest
    hub.repos["org/a"].faults[WEIGHTS] = Fault(body=wrong)
    gets = hub.requests["GET", "org/a", WEIGHTS]

    for _ in range(3):
        with pytest.raises(AdapterCorrupt, match="checksum"):
            load(store, digest)

    assert hub.requests["GET", "org/a", WEIGHTS] == gets + 2
    [aside] = (tmp_path / "cache").rglob("*.quarantined")
    assert aside.read_bytes() == wrong
    hub.repos["org/a"].faults.clear()
    clock.now += 11
    assert len(load(store, digest)) == 3


def test_huggingface_hub_finds_our_downloads_and_nothing_else(
    hub: FakeHub, store: AdapterStore, tmp_path: Path
) -> None:
    files = adapter_files()
    hub.repos["org/a"] = Repo(files, faults={WEIGHTS: Fault(body=files[WEIGHTS][:-1] + b"\xff")})
    digest = store.resolve("org/a").result().digest
    with pytest.raises(AdapterCorrupt):
        load(store, digest)
    hub.repos["org/b"] = Repo(files)
    load(store, store.resolve("org/b").result().digest)
    asked = hub.total()

    found = scan_cache_dir(tmp_path / "cache")
    path = hf_hub_download(
        "org/b", WEIGHTS, cache_dir=tmp_path / "cache", endpoint=hub.url, local_files_only=True
    )

    assert not found.warnings
    kept = {repo.repo_id: repo for repo in found.repos}
    assert set(kept["org/b"].refs) == {"main"}
    [revision] = kept["org/b"].revisions
    assert {file.file_name for file in revision.files} == {CONFIG, WEIGHTS}
    assert [file.file_name for one in kept["org/a"].revisions for file in one.files] == [CONFIG]
    assert Path(path).read_bytes() == files[WEIGHTS]
    assert hub.total() == asked


def test_what_huggingface_hub_downloaded_is_not_downloaded_again(
    hub: FakeHub, store: AdapterStore, tmp_path: Path
) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    for name in (CONFIG, WEIGHTS):
        hf_hub_download("org/a", name, cache_dir=tmp_path / "cache", endpoint=hub.url)
    gets = hub.total("GET")

    found = store.resolve("org/a").result()

    assert store.tier(found.digest) == "disk"
    assert len(load(store, found.digest)) == 3
    assert hub.total("GET") == gets


def test_a_token_goes_to_the_hub_and_not_where_the_hub_redirects_to(
    hub: FakeHub, store: AdapterStore
) -> None:
    with fake_hub() as storage:
        storage.repos["org/priv"] = Repo(adapter_files())
        hub.repos["org/priv"] = Repo(
            adapter_files(), needs_token="TOKEN_A", faults={WEIGHTS: Fault(moved_to=storage.url)}
        )

        load(store, store.resolve("org/priv", "TOKEN_A").result().digest)

        assert {given for _, _, given in hub.given} == {"Bearer TOKEN_A"}
        assert {(method, file) for method, file, _ in storage.given} == {("GET", WEIGHTS)}
        assert {given for _, _, given in storage.given} == {""}


def test_a_redirect_from_https_to_plain_http_is_not_followed() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.scheme == "http":
            return httpx.Response(200, content=b"read by everybody")
        return httpx.Response(302, headers={"Location": f"http://storage{request.url.path}"})

    with (
        body_client(1.0, httpx.MockTransport(answer)) as client,
        pytest.raises(httpx.UnsupportedProtocol, match="to plain http"),
    ):
        client.get("https://hub/file")


@pytest.mark.parametrize("token", ["a b", "a\nb", "t\u00f6ken", "x" * 2000, "a\r\nHost: evil"])
def test_what_could_be_no_token_is_refused_unseen(
    token: str, hub: FakeHub, store: AdapterStore, caplog: pytest.LogCaptureFixture
) -> None:
    hub.repos["org/a"] = Repo(adapter_files())

    with pytest.raises(InvalidRequest, match="token holds characters") as caught:
        store.resolve("org/a", token).result()

    assert hub.total() == 0
    assert token not in f"{caught.value!r} {caught.value.__cause__!r} {caplog.text}"


def test_no_error_nor_log_shows_a_token(
    hub: FakeHub, store: AdapterStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    hub.repos["org/a"] = Repo(adapter_files(), faults={WEIGHTS: Fault(503)})
    hub.repos["org/b"] = Repo(adapter_files(), faults={WEIGHTS: Fault(cut_after=3)})
    hub.repos["org/priv"] = Repo(adapter_files(), needs_token="ANOTHER")

    for reference in ("org/a", "org/b", "org/priv", "org/nope"):
        with pytest.raises(ShardError) as caught:
            store.resolve(reference, "hf_SECRET").result()
        error: BaseException | None = caught.value
        while error is not None:
            assert "hf_SECRET" not in f"{error!r} {error} {vars(error)}"
            error = error.__cause__

    assert "hf_SECRET" not in "\n".join(
        line for line in caplog.text.splitlines() if "httpcore" not in line
    )


@pytest.mark.parametrize(
    "fault",
    [Fault(etag="../../../evil"), Fault(etag="a/b"), Fault(etag=".hidden"), Fault(etag="e" * 500)],
)
def test_an_etag_is_never_a_path(
    fault: Fault, hub: FakeHub, store: AdapterStore, tmp_path: Path
) -> None:
    hub.repos["org/a"] = Repo(adapter_files(), faults={WEIGHTS: fault})

    assert len(load(store, store.resolve("org/a").result().digest)) == 3

    blobs = tmp_path / "cache" / "models--org--a" / "blobs"
    assert len(list(blobs.iterdir())) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize("commit", ["../../evil", "a/b", ".", "", "c" * 65])
def test_a_commit_that_could_be_a_path_is_not_believed(
    commit: str, hub: FakeHub, store: AdapterStore
) -> None:
    hub.repos["org/a"] = Repo(adapter_files(), commit=commit)

    with pytest.raises(SourceUnavailable, match="not from a Hugging Face hub"):
        store.resolve("org/a").result()


def test_what_the_hub_refused_is_not_asked_for_again_at_once(
    hub: FakeHub, store: AdapterStore, clock: Clock
) -> None:
    for _ in range(5):
        with pytest.raises(AdapterNotFound, match="no such repository"):
            store.resolve("org/new").result()
    assert hub.total() == 1

    hub.repos["org/new"] = Repo(adapter_files())
    clock.now += 1.0

    assert store.resolve("org/new").result().rank == 4


def test_what_was_refused_to_one_caller_is_asked_for_another(
    hub: FakeHub, store: AdapterStore
) -> None:
    hub.repos["org/priv"] = Repo(adapter_files(), needs_token="TOKEN_A")
    for token in (None, "TOKEN_B"):
        with pytest.raises(AdapterNotFound):
            store.resolve("org/priv", token).result()

    assert store.resolve("org/priv", "TOKEN_A").result().rank == 4


def test_what_does_not_fit_is_not_read_again_at_once(
    hub: FakeHub, store: AdapterStore, clock: Clock
) -> None:
    hub.repos["org/a"] = Repo(adapter_files(peft_type="IA3"))
    for _ in range(3):
        with pytest.raises(AdapterIncompatible, match="IA3"):
            store.resolve("org/a").result()
    assert hub.requests["HEAD", "org/a", CONFIG] == 1

    hub.repos["org/a"] = Repo(adapter_files(), commit="d" * 40)
    clock.now += 1.0

    assert store.resolve("org/a").result().rank == 4


def test_a_busy_hub_is_left_alone_for_as_long_as_it_asks(
    hub: FakeHub, store: AdapterStore, clock: Clock
) -> None:
    hub.repos["org/a"] = Repo(adapter_files(), faults={CONFIG: Fault(429, {"Retry-After": "7"})})
    waits = []
    for _ in range(3):
        with pytest.raises(SourceUnavailable, match="429") as caught:
            store.resolve("org/a").result()
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


def test_sixty_four_downloads_that_hang_hold_up_no_other(hub: FakeHub, tmp_path: Path) -> None:
    names = [f"org/hangs{n}" for n in range(64)]
    for n, name in enumerate(names):
        hub.repos[name] = Repo(adapter_files(lora(seed=n + 1)))
    hub.repos["org/well"] = Repo(adapter_files(lora(seed=99)))
    store = store_at(hub=HubSettings(hub.url, tmp_path / "cache", timeout_s=30.0))
    digests = [store.resolve(name).result().digest for name in (*names, "org/well")]
    for name in names:
        hub.repos[name].faults[WEIGHTS] = Fault(hang=True)
    waiting = [store.load(digest, lambda layer: None) for digest in digests[:-1]]

    layers = load(store, digests[-1])

    assert len(layers) == 3
    assert not any(future.done() for future in waiting)
    hub.closed.set()
    for future in waiting:
        assert isinstance(future.exception(), SourceUnavailable)
    store.close()


def test_a_spoilt_file_in_the_cache_is_fetched_again(hub: FakeHub, store: AdapterStore) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    index = store.resolve("org/a").result()
    load(store, index.digest)
    store.cache.drop(index.digest)
    opener: Any = store.files_of(index.digest).open_file
    cached = opener(WEIGHTS).resolve()
    cached.write_bytes(cached.read_bytes()[:-4])

    assert len(load(store, index.digest)) == 3

    assert cached.stat().st_size == len(adapter_files()[WEIGHTS])


def test_offline_mode_serves_what_was_loaded_and_refuses_the_rest_at_once(
    hub: FakeHub, store: AdapterStore, offline: Any
) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    digest = store.resolve("org/a").result().digest
    load(store, digest)
    store.unload(digest)
    asked = hub.total()
    offline()

    assert store.resolve("org/a").result().digest == digest
    assert len(load(store, digest)) == 3
    with pytest.raises(AdapterNotFound, match="offline"):
        store.resolve("org/miss").result()
    assert hub.total() == asked


def test_the_environment_names_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/a"] = Repo(adapter_files())
    code = """
import torch
from tests.server.adapters.samples import store_at
store = store_at()
print(store.resolve("org/a").result().rank)
store.close()
"""

    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": ""},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip() == "4"
    assert hub.requests["HEAD", "org/a", WEIGHTS] == 1
