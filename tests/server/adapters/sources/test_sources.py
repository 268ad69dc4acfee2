import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loralane_server.adapters.sources.files import Reads, opened
from loralane_server.adapters.sources.hub_source import HubSettings
from loralane_server.adapters.sources.references import (
    AdapterRoot,
    HubPlace,
    S3Place,
    S3Root,
    parse_root,
)
from loralane_server.adapters.sources.sources import Candidates, LocalPlace, Sources
from loralane_server.errors import (
    AdapterCorrupt,
    AdapterError,
    AdapterIncompatible,
    AdapterNotFound,
    InvalidRequest,
    ShardError,
)

from tests.server.adapters.samples import FUZZ, adapter_files, store_at, write
from tests.server.adapters.sources.fake_hub import fake_hub


def sources(*roots: AdapterRoot, **aliases: str) -> Sources:
    return Sources(Reads(), aliases=aliases, roots=roots, hub=HubSettings())


def test_an_adapter_is_named_by_its_path_or_relative_to_a_root(tmp_path: Path) -> None:
    folder = write(tmp_path / "root" / "team" / "a", adapter_files())
    found = sources(tmp_path / "root")

    assert found.place(str(folder)).at == LocalPlace(folder, (tmp_path / "root",))
    assert found.place("team/a") == found.place(str(folder))


def test_a_folder_below_a_root_wins_over_the_hub_and_an_alias_over_both(tmp_path: Path) -> None:
    write(tmp_path / "org" / "x", adapter_files())

    assert sources(tmp_path).place("org/x").at == LocalPlace(tmp_path / "org" / "x", (tmp_path,))
    aliased = sources(tmp_path, **{"org/x": "other/y@v1"}).place("org/x")
    assert aliased.at == HubPlace("other/y", "v1")
    assert aliased.trusted


def test_a_folder_of_the_working_directory_never_shadows_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "org" / "x", adapter_files())
    monkeypatch.chdir(tmp_path)

    assert sources().place("org/x").at == HubPlace("org/x", "main")


def test_an_alias_may_lead_to_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "anywhere", adapter_files())
    monkeypatch.chdir(tmp_path)
    found = sources(absolute=str(folder), relative="anywhere", missing="./nowhere")

    assert found.place("absolute").at == LocalPlace(folder)
    assert found.place("relative").at == LocalPlace(folder)
    assert found.place("missing").at == LocalPlace(tmp_path / "nowhere")


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/3", "a" * 40, "feature_x"])
def test_a_hub_id_may_carry_a_revision(revision: str) -> None:
    assert sources().place(f"org/name@{revision}").at == HubPlace("org/name", revision)


PATHS = [
    "../secret", "..", "./../../etc", "a/../../secret", "/etc", "/", "..%2fsecret",
    "%2e%2e/secret", "..\\secret", "a\0b", "~root", "~/x", "file:///etc", "org/x/../../y", "", " ",
    "a" * 5000, "/" + "a" * 1000, "\u2025/secret", "https://example.org/a", "s3://bucket/a", ".",
    "a/./b", "a\nb/c", "org/name@", "org/name@../x", "org/name@a b", "org/name@x/",
]  # fmt: skip
HUB_IDS = [
    "a--b/c", "-a/b", "a/b.", "a/b.git", "a/b/c", "a b/c",
    f"a/{'x' * 97}", "a/..", "\u00e9/x", "a/",
]  # fmt: skip


@pytest.mark.parametrize("reference", PATHS + HUB_IDS)
def test_what_may_not_be_named_is_refused_without_touching_anything(
    reference: str, tmp_path: Path
) -> None:
    write(tmp_path / "secret", adapter_files())
    (tmp_path / "root").mkdir()

    with pytest.raises((AdapterNotFound, InvalidRequest)) as caught:
        sources(tmp_path / "root").place(reference)

    assert len(caught.value.message) < 300
    caught.value.to_proto()


def test_a_bucket_that_is_not_given_is_refused_as_a_folder_that_is_not() -> None:
    with pytest.raises(AdapterNotFound, match="is not below an --adapter-root"):
        sources().place("s3://bucket/a")


PIECES = ["..", ".", "", "a", "org", "name", "~", "s3:", "bucket", "team", "/", "//", "\\", "\0",
          "@", "@main", "\u2025", "%2e", " ", "secret", "link"]  # fmt: skip


@FUZZ
@given(
    st.one_of(
        st.text(max_size=40),
        st.lists(st.sampled_from(PIECES), max_size=8).map("/".join),
        st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
        st.lists(st.sampled_from(PIECES), max_size=6).map(lambda p: f"s3://{'/'.join(p)}"),
    )
)
def test_whatever_is_named_leads_below_a_root_or_to_a_hub_id_or_nowhere(
    tmp_path_factory: pytest.TempPathFactory, reference: str
) -> None:
    top = tmp_path_factory.getbasetemp() / "fuzzed"
    root = write(top / "root" / "a" / "name", adapter_files()).parents[1]
    write(top / "secret", adapter_files())
    if not (root / "link").is_symlink():
        (root / "link").symlink_to(top / "secret")

    try:
        at = sources(root, S3Root("bucket", "team")).place(reference).at
    except (AdapterNotFound, InvalidRequest):
        return

    for place in at.places if isinstance(at, Candidates) else (at,):
        if isinstance(place, LocalPlace):
            assert root in place.folder.parents
        elif isinstance(place, S3Place):
            assert place.bucket == "bucket"
            assert place.key.startswith("team/")
            assert {"", ".", ".."}.isdisjoint(place.key.split("/"))
        else:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", place.repo, re.ASCII)


def test_a_subfolder_of_a_repository_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="names a subfolder of a hub repository"):
        sources(tmp_path).place("org/name/policy")


def test_a_subfolder_of_a_folder_is_an_adapter_like_any_other(tmp_path: Path) -> None:
    write(tmp_path / "a" / "policy", adapter_files())
    store = store_at(tmp_path)

    assert store.resolve("a/policy").result().rank == 4
    with pytest.raises(AdapterNotFound, match=r"adapter_config\.json is missing"):
        store.resolve("a").result()
    store.close()


def test_a_folder_is_looked_at_again_whatever_it_was_a_moment_ago(tmp_path: Path) -> None:
    store = store_at(tmp_path, clock=lambda: 0.0)
    (tmp_path / "a").mkdir()
    for _ in range(3):
        with pytest.raises(AdapterNotFound, match="missing"):
            store.resolve("a").result()
    write(tmp_path / "a", adapter_files(peft_type="IA3"))
    with pytest.raises(AdapterIncompatible):
        store.resolve("a").result()

    write(tmp_path / "a", adapter_files())

    assert store.resolve("a").result().rank == 4
    store.close()


def test_a_link_that_was_put_in_a_files_place_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "file").symlink_to(tmp_path / "secret")

    with pytest.raises(AdapterNotFound, match="file is a link"), opened(tmp_path / "file"):
        pass


@pytest.mark.parametrize(
    ("text", "root"),
    [
        ("some/folder", Path("some/folder")),
        ("s3://bucket", S3Root("bucket")),
        ("s3://bucket/", S3Root("bucket")),
        ("s3://my.bucket-1/team/adapters/", S3Root("my.bucket-1", "team/adapters")),
    ],
)
def test_a_root_is_a_folder_or_a_prefix(text: str, root: AdapterRoot) -> None:
    assert parse_root(text) == root


@pytest.mark.parametrize(
    "text",
    ["s3://", "s3:///x", "s3://B/x", "s3://bucket/a//b", "s3://bucket/../x", "s3://bucket/./x",
     "s3://user@bucket/x", "s3://b/x", "s3://bucket/a\\b"],
)  # fmt: skip
def test_a_prefix_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"s3://bucket/prefix"):
        parse_root(text)


def test_a_single_word_is_not_found_and_says_what_a_hub_id_looks_like(tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFound, match="org/name"):
        sources(tmp_path).place("nope")


def test_a_path_outside_the_roots_is_refused_even_if_an_adapter_is_there(tmp_path: Path) -> None:
    folder = write(tmp_path / "secret", adapter_files())
    (tmp_path / "root").mkdir()

    for reference in (str(folder), str(tmp_path / "root")):
        with pytest.raises(AdapterNotFound, match="--adapter-root"):
            sources(tmp_path / "root").place(reference)


def test_a_root_may_itself_be_a_link(tmp_path: Path) -> None:
    write(tmp_path / "real" / "a", adapter_files())
    (tmp_path / "link").symlink_to(tmp_path / "real")

    found = sources(tmp_path / "link").place(str(tmp_path / "link" / "a"))

    assert found.at == LocalPlace(tmp_path / "real" / "a", (tmp_path / "real",))


def link_folder(root: Path, outside: Path) -> None:
    (root / "a").symlink_to(outside)


def link_file(root: Path, outside: Path) -> None:
    write(root / "a", adapter_files())
    (root / "a" / "adapter_model.safetensors").unlink()
    (root / "a" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")


@pytest.mark.parametrize("link", [link_folder, link_file])
def test_a_link_out_of_the_roots_is_refused(
    link: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    outside = write(tmp_path / "secret", adapter_files())
    (tmp_path / "root").mkdir()
    link(tmp_path / "root", outside)
    store = store_at(tmp_path / "root")

    for reference in ("a", str(tmp_path / "root" / "a")):
        with pytest.raises(AdapterNotFound, match="leads out"):
            store.resolve(reference).result()
    assert store.header_bytes_read == 0
    store.close()


def test_a_folder_that_is_a_link_out_of_the_roots_is_refused_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    link_folder(tmp_path / "root", write(tmp_path / "secret", adapter_files()))

    with pytest.raises(AdapterNotFound, match="leads out"):
        sources(tmp_path / "root").place("a")


def test_links_within_a_root_are_followed_as_in_a_hub_cache(tmp_path: Path) -> None:
    blobs = write(tmp_path / "blobs", adapter_files())
    (tmp_path / "snapshot").mkdir()
    for blob in blobs.iterdir():
        (tmp_path / "snapshot" / blob.name).symlink_to(blob)
    store = store_at(tmp_path)

    assert store.resolve("snapshot").result().rank == 4
    store.close()


def missing_folder(folder: Path) -> None:
    folder.rmdir()


def subfolder(folder: Path) -> None:
    write(folder / "policy", adapter_files())


def pipe(folder: Path) -> None:
    write(folder, adapter_files())
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")


def huge_config(folder: Path) -> None:
    write(folder, adapter_files() | {"adapter_config.json": b" " * ((1 << 20) + 1)})


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (missing_folder, AdapterNotFound, "folder of adapter .* is missing"),
        (subfolder, AdapterNotFound, r"adapter_config\.json is missing"),
        (pipe, AdapterNotFound, "adapter_model.safetensors is not a file"),
        (huge_config, AdapterCorrupt, r"adapter_config\.json is larger"),
    ],
)
def test_a_folder_that_is_no_adapter_is_refused(
    make: Callable[[Path], None], error: type[AdapterError], words: str, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    make(tmp_path / "a")
    store = store_at(tmp_path)

    with pytest.raises(error, match=words):
        store.resolve(str(tmp_path / "a")).result()
    store.close()


def test_an_alias_is_resolved_though_no_root_is_given(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", adapter_files())
    store = store_at(aliases={"mine": str(folder)})

    assert store.resolve("mine").result().reference == "mine"
    store.close()


def test_refused_names_reach_no_hub(tmp_path: Path) -> None:
    with fake_hub() as hub:
        store = store_at(tmp_path, hub=HubSettings(hub.url, tmp_path / "cache"))

        for reference in PATHS + HUB_IDS:
            with pytest.raises(ShardError):
                store.resolve(reference).result()

        assert hub.total() == 0
        store.close()


def test_everything_before_the_reader_works_without_torch() -> None:
    code = "import sys, loralane_server.adapters.{}; sys.exit('torch' in sys.modules)"

    for module in ("sources.sources", "formats.index"):
        done: Any = subprocess.run([sys.executable, "-c", code.format(module)], env=os.environ)
        assert done.returncode == 0
