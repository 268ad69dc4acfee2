"""Bytes from files, counted: the one place where adapters' bytes are read.

Never mapped: a file that is cut short while it is read raises here instead of ending the process.
"""

import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from loralane_server.adapters.formats.headers import (
    PREFIX_BYTES,
    FileHeader,
    header_end,
    parse_header,
)
from loralane_server.errors import AdapterCorrupt, AdapterNotFound, SourceUnavailable

#: size, mtime and ctime in ns, and inode: changes whenever the file is replaced or rewritten. Only
#: ctime cannot be set: `cp -p` and archives bring an older mtime along, and a file that takes the
#: place of a deleted one often gets its inode.
StatIdentity = tuple[int, int, int, int]

_CHUNK: Final = 1 << 30
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW


class Reads:
    """How many bytes of adapters were read, by kind; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._header_bytes = 0
        self._tensor_bytes = 0

    @property
    def header_bytes(self) -> int:
        """Of safetensors headers, from disks and from the hub."""
        return self._header_bytes

    @property
    def tensor_bytes(self) -> int:
        """Of tensors, by range."""
        return self._tensor_bytes

    def add_header(self, count: int) -> None:
        """Count bytes of a header."""
        with self._lock:
            self._header_bytes += count

    def add_tensor(self, count: int) -> None:
        """Count bytes of a tensor."""
        with self._lock:
            self._tensor_bytes += count


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a regular file, closed at the end; links, pipes and devices are refused.

    The path must be resolved: a link in its place was put there since it was checked.

    Raises:
        AdapterNotFound: it is not there, or no regular file.
        SourceUnavailable: the disk fails; also when it fails inside the block.
    """
    try:
        descriptor = os.open(path, _READ_FLAGS)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise AdapterNotFound(f"{path.name} is not a file")
            yield descriptor
        finally:
            os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise AdapterNotFound(f"{path.name} is missing") from exc
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise AdapterNotFound(f"{path.name} is a link") from exc
        raise SourceUnavailable(f"{path.name} cannot be read: {exc.strerror}") from exc


def identity_of(path: Path) -> StatIdentity:
    """What names a file's bytes without reading them; raises as `opened`."""
    with opened(path) as descriptor:
        return identity_of_open(os.fstat(descriptor))


def read_whole(path: Path, limit: int) -> tuple[bytes, StatIdentity]:
    """A small file and its identity.

    Raises:
        AdapterCorrupt: larger than `limit`.
    """
    with opened(path) as descriptor:
        status = os.fstat(descriptor)
        if status.st_size > limit:
            raise AdapterCorrupt(f"{path.name} is larger than {limit} bytes")
        content = bytearray(status.st_size)
        read_into(descriptor, content, 0, path.name)
        return bytes(content), identity_of_open(status)


def read_header(path: Path, name: str, reads: Reads) -> tuple[FileHeader, StatIdentity]:
    """A safetensors file's header, reading no byte behind it, and the file's identity."""
    with opened(path) as descriptor:
        status = os.fstat(descriptor)
        size = status.st_size
        prefix = bytearray(min(PREFIX_BYTES, size))
        read_into(descriptor, prefix, 0, name)
        head = bytearray(header_end(bytes(prefix), size, name))
        read_into(descriptor, head, 0, name)
        reads.add_header(len(head))
        return parse_header(bytes(head), size, name), identity_of_open(status)


def read_into(descriptor: int, buffer: bytearray | memoryview, offset: int, name: str) -> None:
    """Fill the buffer from the file's bytes at `offset`; raises `AdapterCorrupt` where it ends."""
    view = memoryview(buffer)
    while view:
        count = os.preadv(descriptor, [view[:_CHUNK]], offset)
        if count == 0:
            raise AdapterCorrupt(f"{name} is truncated: it ends at byte {offset}")
        view = view[count:]
        offset += count


def identity_of_open(status: os.stat_result) -> StatIdentity:
    """What names the bytes of a file that is open, from its status."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
