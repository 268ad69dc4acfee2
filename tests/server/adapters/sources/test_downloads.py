import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from loralane_server.adapters.sources.downloads import Downloads, Expected, Pace, disk_errors
from loralane_server.errors import AdapterCorrupt, AdapterNotFound, SourceUnavailable

from tests.server.adapters.clock import Clock

BYTES = bytes(range(256)) * 64
RIGHT = Expected("weights", len(BYTES), f"sha256:{hashlib.sha256(BYTES).hexdigest()}")


class Source:
    """Gives bytes by the chunk; may be cut, wrong or slow as each test says."""

    def __init__(self, *bodies: bytes, chunk: int = 1000) -> None:
        self.bodies = list(bodies)
        self.chunk = chunk
        #: Where each read began.
        self.begins: list[int] = []
        self.cut_at: int | None = None
        self.before_chunk: Callable[[], None] = lambda: None

    def read_from(self, begin: int) -> Iterator[bytes]:
        body = self.bodies[min(len(self.begins), len(self.bodies) - 1)]
        self.begins.append(begin)
        for at in range(begin, len(body), self.chunk):
            self.before_chunk()
            if self.cut_at is not None and at >= self.cut_at:
                self.cut_at = None
                raise SourceUnavailable("cut")
            yield body[at : at + self.chunk]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def downloads(clock: Clock) -> Downloads:
    return Downloads("the test's cache", clock)


def test_a_file_appears_under_its_name_when_it_is_whole_and_right(
    downloads: Downloads, tmp_path: Path
) -> None:
    target = tmp_path / "new" / "blob"
    source = Source(BYTES)
    source.before_chunk = lambda: _assert_absent(target)

    downloads.ensure(target, RIGHT, source.read_from)

    assert target.read_bytes() == BYTES
    assert names_in(target.parent) == ["blob"]


def _assert_absent(target: Path) -> None:
    assert not target.exists()


def test_what_is_there_and_right_is_not_fetched(downloads: Downloads, tmp_path: Path) -> None:
    target = tmp_path / "blob"
    target.write_bytes(BYTES)
    source = Source(BYTES)

    downloads.ensure(target, RIGHT, source.read_from)

    assert source.begins == []


@pytest.mark.parametrize("spoilt", [BYTES[:-1], BYTES + b"x", BYTES[:-1] + b"\0", b""])
def test_what_is_there_and_wrong_is_moved_aside_and_fetched(
    spoilt: bytes, downloads: Downloads, tmp_path: Path
) -> None:
    target = tmp_path / "blob"
    target.write_bytes(spoilt)

    downloads.ensure(target, RIGHT, Source(BYTES).read_from)

    assert target.read_bytes() == BYTES
    assert (tmp_path / "blob.quarantined").read_bytes() == spoilt


@pytest.mark.parametrize("wrong", [BYTES[:-1], BYTES[:-1] + b"\0", b""])
def test_wrong_bytes_are_kept_aside_and_fetched_once_more(
    wrong: bytes, downloads: Downloads, tmp_path: Path
) -> None:
    target = tmp_path / "blob"
    source = Source(wrong, BYTES)

    downloads.ensure(target, RIGHT, source.read_from)

    assert target.read_bytes() == BYTES
    assert (tmp_path / "blob.quarantined").read_bytes() == wrong


def test_bytes_that_are_wrong_twice_are_refused_until_a_back_off_has_passed(
    downloads: Downloads, clock: Clock, tmp_path: Path
) -> None:
    target = tmp_path / "blob"
    source = Source(BYTES[:-1] + b"\0", BYTES[:-1] + b"\1", BYTES)

    for _ in range(3):
        with pytest.raises(AdapterCorrupt, match="weights does not have the checksum"):
            downloads.ensure(target, RIGHT, source.read_from)

    assert len(source.begins) == 2
    assert not target.exists()
    clock.now += 10.5
    downloads.ensure(target, RIGHT, source.read_from)
    assert target.read_bytes() == BYTES


def test_a_wrong_file_says_nothing_about_the_next_version(
    downloads: Downloads, tmp_path: Path
) -> None:
    with pytest.raises(AdapterCorrupt):
        downloads.ensure(tmp_path / "old", RIGHT, Source(b"wrong").read_from)

    downloads.ensure(tmp_path / "new", RIGHT, Source(BYTES).read_from)


def test_a_source_that_sends_too_much_is_not_listened_to(
    downloads: Downloads, tmp_path: Path
) -> None:
    source = Source(BYTES * 1000)
    chunks: list[int] = []
    source.before_chunk = lambda: chunks.append(1)

    with pytest.raises(AdapterCorrupt, match="has 17000 bytes where its source names 16384"):
        downloads.ensure(tmp_path / "blob", RIGHT, source.read_from)

    assert len(chunks) == 2 * 17


def test_without_a_checksum_the_size_is_compared(downloads: Downloads, tmp_path: Path) -> None:
    downloads.ensure(tmp_path / "a", Expected("a", 3), Source(b"abc").read_from)

    with pytest.raises(AdapterCorrupt, match="has 3 bytes where its source names 4"):
        downloads.ensure(tmp_path / "b", Expected("b", 4), Source(b"abc").read_from)


def test_an_md5_is_compared_too(downloads: Downloads, tmp_path: Path) -> None:
    right = Expected("a", 3, f"md5:{hashlib.md5(b'abc').hexdigest()}")

    downloads.ensure(tmp_path / "a", right, Source(b"abc").read_from)

    with pytest.raises(AdapterCorrupt, match="checksum"):
        downloads.ensure(tmp_path / "b", right, Source(b"abd").read_from)


def test_a_cut_connection_is_taken_up_where_it_broke(downloads: Downloads, tmp_path: Path) -> None:
    source = Source(BYTES)
    source.cut_at = 5000

    downloads.ensure(tmp_path / "blob", RIGHT, source.read_from)

    assert source.begins == [0, 5000]
    assert (tmp_path / "blob").read_bytes() == BYTES


def test_a_source_that_gives_nothing_is_unavailable_and_leaves_nothing(
    downloads: Downloads, tmp_path: Path
) -> None:
    source = Source(BYTES)
    source.cut_at = 0

    with pytest.raises(SourceUnavailable, match="cut"):
        downloads.ensure(tmp_path / "blob", RIGHT, source.read_from)

    assert names_in(tmp_path) == []


def test_a_source_that_is_busy_is_left_alone_but_not_for_longer_than_others_should_wait(
    downloads: Downloads, clock: Clock, tmp_path: Path
) -> None:
    asked: list[int] = []

    def read_from(begin: int) -> Iterator[bytes]:
        asked.append(begin)
        if len(asked) == 1:
            raise SourceUnavailable("busy", retry_after_ms=200_000)
        yield BYTES

    waits = []
    for _ in range(3):
        with pytest.raises(SourceUnavailable, match="busy") as caught:
            downloads.ensure(tmp_path / "blob", RIGHT, read_from)
        waits.append(caught.value.retry_after_ms)
        clock.now += 10

    assert (waits, asked) == ([30_000, 20_000, 10_000], [0])
    downloads.ensure(tmp_path / "blob", RIGHT, read_from)
    assert (tmp_path / "blob").read_bytes() == BYTES


def test_a_source_that_refuses_is_heard_and_leaves_nothing(
    downloads: Downloads, tmp_path: Path
) -> None:
    def read_from(begin: int) -> Iterator[bytes]:
        raise AdapterNotFound("gone")
        yield b""

    with pytest.raises(AdapterNotFound, match="gone"):
        downloads.ensure(tmp_path / "blob", RIGHT, read_from)

    assert names_in(tmp_path) == []


def test_a_source_that_drips_is_given_up_after_half_a_minute(
    downloads: Downloads, clock: Clock, tmp_path: Path
) -> None:
    source = Source(BYTES, chunk=1)

    def one_second() -> None:
        clock.now += 1.0

    source.before_chunk = one_second

    with pytest.raises(SourceUnavailable, match="weights comes too slowly: 30 bytes in 30 s"):
        downloads.ensure(tmp_path / "blob", RIGHT, source.read_from)

    assert names_in(tmp_path) == []
    assert source.begins == [0]


def test_a_source_that_reconnects_for_each_byte_is_given_up_too(
    downloads: Downloads, clock: Clock, tmp_path: Path
) -> None:
    def read_from(begin: int) -> Iterator[bytes]:
        clock.now += 0.5
        yield BYTES[begin : begin + 1]
        raise SourceUnavailable("cut")

    with pytest.raises(SourceUnavailable, match="too slowly"):
        downloads.ensure(tmp_path / "blob", RIGHT, read_from)


def test_pace_judges_each_half_minute_by_itself() -> None:
    clock = Clock()
    pace = Pace(clock, least_per_s=10, window_s=30)

    for _ in range(10):
        clock.now += 30
        pace.add(300)
    clock.now += 29
    pace.add(1)
    clock.now += 1

    with pytest.raises(TimeoutError, match="2 bytes in 30 s"):
        pace.add(1)


def test_a_disk_without_room_for_the_file_is_named_and_nothing_is_written(
    downloads: Downloads, tmp_path: Path
) -> None:
    source = Source(BYTES)

    with pytest.raises(SourceUnavailable, match="no space left on the disk of the test's cache"):
        downloads.ensure(tmp_path / "blob", Expected("huge", 1 << 60), source.read_from)

    assert names_in(tmp_path) == []
    assert source.begins == []
    downloads.ensure(tmp_path / "blob", RIGHT, source.read_from)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_meanwhile_is_named(
    code: int, downloads: Downloads, tmp_path: Path
) -> None:
    source = Source(BYTES)

    def fill_up() -> None:
        if source.begins == [0]:
            raise OSError(code, os.strerror(code))

    source.before_chunk = fill_up

    with pytest.raises(SourceUnavailable, match="no space left on the disk of the test's cache"):
        downloads.ensure(tmp_path / "blob", RIGHT, source.read_from)

    assert names_in(tmp_path) == []
    source.before_chunk = lambda: None
    downloads.ensure(tmp_path / "blob", RIGHT, source.read_from)
    assert (tmp_path / "blob").read_bytes() == BYTES


def test_a_cache_in_which_nothing_can_be_made_or_removed_says_so_without_its_path(
    downloads: Downloads, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(SourceUnavailable, match="the test's cache cannot be written") as caught:
        downloads.ensure(tmp_path / "file" / "blob", RIGHT, Source(BYTES).read_from)

    assert str(tmp_path) not in caught.value.message


def test_a_cache_that_cannot_be_written_says_so_without_its_path(tmp_path: Path) -> None:
    with (
        pytest.raises(SourceUnavailable, match="the cache cannot be written: Read-only") as caught,
        disk_errors("the cache", tmp_path / "blob"),
    ):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    assert str(tmp_path) not in caught.value.message
