"""An adapter's files while it is loaded: looked up once, and watched for changes."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from loralane_server.adapters.reading.scratch import Scratch
from loralane_server.adapters.sources.files import (
    StatIdentity,
    identity_of,
    identity_of_open,
    opened,
)
from loralane_server.errors import AdapterCorrupt

#: From one of the adapter's file names to its path; see `Located.open_file`.
OpenFile = Callable[[str], Path]


class LoadFiles:
    """The files of one load, on its thread.

    Looking a file up follows links, checks roots and may download: once. After that, whatever is
    opened must still be the file that was looked up, before and after it is read. That is asked of
    the open file itself: each system call is a chance for other threads to take the interpreter.
    """

    def __init__(self, open_file: OpenFile) -> None:
        self._open_file = open_file
        self._found: dict[str, tuple[Path, StatIdentity]] = {}
        #: What layers are read into, one after another.
        self.scratch = Scratch()
        #: Milliseconds that looking up and opening took so far; on the hub this is the download.
        self.open_ms = 0.0

    @contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """Give a descriptor of a file.

        Raises:
            AdapterCorrupt: it is not, or at the end no longer, the file that was resolved.
            AdapterNotFound, SourceUnavailable: as `Located.open_file` and the disk.
        """
        began = time.perf_counter()
        path, identity = self._found.get(name) or self._find(name)
        with opened(path) as descriptor:
            self.open_ms += (time.perf_counter() - began) * 1e3
            self._check(descriptor, identity, name)
            yield descriptor
            self._check(descriptor, identity, name)

    def _find(self, name: str) -> tuple[Path, StatIdentity]:
        path = self._open_file(name)
        identity = identity_of(path)
        self._open_file(name)  # so the identity is not that of a file which came in between
        self._found[name] = path, identity
        return path, identity

    def _check(self, descriptor: int, identity: StatIdentity, name: str) -> None:
        if identity_of_open(os.fstat(descriptor)) != identity:
            raise AdapterCorrupt(f"{name} has changed since it was resolved; request it again")
