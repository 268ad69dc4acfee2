from pathlib import Path
from typing import Any

import httpx
import pytest
from loralane_server.adapters.sources.hub_http import body_client
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.errors import (
    AdapterNotFound,
    InvalidRequest,
    ShardError,
    SourceUnavailable,
)

from tests.server.adapters.samples import (
    adapter_files,
    load,
)
from tests.server.adapters.sources.fake_hub import FakeHub, Fault, Repo, fake_hub

WEIGHTS = "adapter_model.safetensors"


def test_a_private_adapter_is_never_handed_to_a_token_that_was_not_checked(
    hub: FakeHub, hub_store: AdapterStore
) -> None:
    hub.repos["org/priv"] = Repo(adapter_files(), needs_token="TOKEN_A")
    index = hub_store.resolve("org/priv", "TOKEN_A").result()
    load(hub_store, index.digest)

    for token in (None, "TOKEN_B"):
        with pytest.raises(AdapterNotFound, match="may not see it") as caught:
            hub_store.resolve("org/priv", token).result()
        assert "TOKEN" not in caught.value.message

    assert hub_store.resolve("org/priv", "TOKEN_A").result() is index


def test_a_token_is_forgotten_when_the_files_are_there(
    hub: FakeHub, hub_store: AdapterStore
) -> None:
    hub.repos["org/priv"] = Repo(adapter_files(), needs_token="TOKEN_A")
    digest = hub_store.resolve("org/priv", "TOKEN_A").result().digest
    load(hub_store, digest)

    opener: Any = hub_store.files_of(digest).open_file

    assert opener._folder.token.secret is None
    assert "TOKEN" not in repr(vars(hub_store))


def test_a_token_goes_to_the_hub_and_not_where_the_hub_redirects_to(
    hub: FakeHub, hub_store: AdapterStore
) -> None:
    with fake_hub() as storage:
        storage.repos["org/priv"] = Repo(adapter_files())
        hub.repos["org/priv"] = Repo(
            adapter_files(), needs_token="TOKEN_A", faults={WEIGHTS: Fault(moved_to=storage.url)}
        )

        load(hub_store, hub_store.resolve("org/priv", "TOKEN_A").result().digest)

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
    token: str, hub: FakeHub, hub_store: AdapterStore, caplog: pytest.LogCaptureFixture
) -> None:
    hub.repos["org/a"] = Repo(adapter_files())

    with pytest.raises(InvalidRequest, match="token holds characters") as caught:
        hub_store.resolve("org/a", token).result()

    assert hub.total() == 0
    assert token not in f"{caught.value!r} {caught.value.__cause__!r} {caplog.text}"


def test_no_error_nor_log_shows_a_token(
    hub: FakeHub, hub_store: AdapterStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    hub.repos["org/a"] = Repo(adapter_files(), faults={WEIGHTS: Fault(503)})
    hub.repos["org/b"] = Repo(adapter_files(), faults={WEIGHTS: Fault(cut_after=3)})
    hub.repos["org/priv"] = Repo(adapter_files(), needs_token="ANOTHER")

    for reference in ("org/a", "org/b", "org/priv", "org/nope"):
        with pytest.raises(ShardError) as caught:
            hub_store.resolve(reference, "hf_SECRET").result()
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
    fault: Fault, hub: FakeHub, hub_store: AdapterStore, tmp_path: Path
) -> None:
    hub.repos["org/a"] = Repo(adapter_files(), faults={WEIGHTS: fault})

    assert len(load(hub_store, hub_store.resolve("org/a").result().digest)) == 3

    blobs = tmp_path / "cache" / "models--org--a" / "blobs"
    assert len(list(blobs.iterdir())) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize("commit", ["../../evil", "a/b", ".", "", "c" * 65])
def test_a_commit_that_could_be_a_path_is_not_believed(
    commit: str, hub: FakeHub, hub_store: AdapterStore
) -> None:
    hub.repos["org/a"] = Repo(adapter_files(), commit=commit)

    with pytest.raises(SourceUnavailable, match="not from a Hugging Face hub"):
        hub_store.resolve("org/a").result()


def test_what_was_refused_to_one_caller_is_asked_for_another(
    hub: FakeHub, hub_store: AdapterStore
) -> None:
    hub.repos["org/priv"] = Repo(adapter_files(), needs_token="TOKEN_A")
    for token in (None, "TOKEN_B"):
        with pytest.raises(AdapterNotFound):
            hub_store.resolve("org/priv", token).result()

    assert hub_store.resolve("org/priv", "TOKEN_A").result().rank == 4
