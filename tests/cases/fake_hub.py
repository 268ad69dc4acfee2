"""A hub on the loopback whose every answer a case can script: status, headers, delay, speed, cuts.

It serves HEAD and GET of `/org/name/resolve/revision/file`, which is all that downloads use.
"""

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

_TICK_S: Final = 0.05


@dataclass
class Script:
    """How the hub answers for one file, or for all files of a repository."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    #: Before an answer begins.
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    #: Of a body, then the connection is cut.
    close_after_bytes: int | None = None
    hang: bool = False
    redirect_to_self: bool = False
    #: So many answers are `status`, the others are whole.
    times: int | None = None


@dataclass(frozen=True)
class Revision:
    """One commit."""

    commit: str
    files: Mapping[str, bytes]


@dataclass
class Repo:
    """One repository; revisions are asked for by name or by commit."""

    revisions: Mapping[str, Revision]
    needs_token: str | None = None
    #: By file name; "" = every file.
    scripts: dict[str, Script] = field(default_factory=dict)
    #: Before the body of a weights file begins.
    weights_delay_s: float = 0.0


class FakeHub:
    """What the hub holds, and what it was asked. Any thread may read the counts."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.closed = threading.Event()
        self._lock = threading.Lock()
        #: Requests by (repository, file).
        self._requests: Counter[tuple[str, str]] = Counter()
        #: Bodies sent whole, by (repository, file): downloads, not looks at a header.
        self._downloads: Counter[tuple[str, str]] = Counter()
        self._failed: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Requests so far, of any kind."""
        return sum(self._requests.values())

    def requests(self, repo: str) -> dict[str, int]:
        """Return how often each file of a repository was asked for, HEAD and GET."""
        return {file: n for (name, file), n in self._requests.items() if name == repo}

    def downloads(self, repo: str, file: str) -> int:
        """Return how often a whole file was sent."""
        return self._downloads[repo, file]

    def install(self, repos: Mapping[str, Repo]) -> None:
        """Hold these repositories and no others; forget all counts."""
        with self._lock:
            self.repos = dict(repos)
            for counts in (self._requests, self._downloads, self._failed):
                counts.clear()

    def note_request(self, repo: str, file: str) -> None:
        """Count a request."""
        with self._lock:
            self._requests[repo, file] += 1

    def note_download(self, repo: str, file: str) -> None:
        """Count a whole body."""
        with self._lock:
            self._downloads[repo, file] += 1

    def may_fail(self, repo: str, script: Script) -> bool:
        """Whether this answer is one of those that fail."""
        with self._lock:
            self._failed[repo] += 1
            return script.times is None or self._failed[repo] <= script.times


@contextmanager
def running(hub: FakeHub) -> Iterator[str]:
    """Serve a hub on a free port; yields its URL."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.hub = hub
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        hub.closed.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: FakeHub

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that leave are what some cases are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _answer(self, *, with_body: bool) -> None:
        hub = self.server.hub
        parts = self.path.lstrip("/").split("/", 4)
        if len(parts) != 5 or parts[2] != "resolve":
            hub.note_request(self.path, "")
            self._refuse(404, {"X-Error-Code": "RepoNotFound"})
            return
        name, revision, file = f"{parts[0]}/{parts[1]}", parts[3], parts[4]
        hub.note_request(name, file)
        repo = hub.repos.get(name)
        if repo is None:
            self._refuse(404, {"X-Error-Code": "RepoNotFound"})
        elif self._is_stranger(repo):
            self._refuse(401, {"X-Error-Code": "RepoNotFound"})
        else:
            self._play(name, repo, revision, file, with_body=with_body)

    def _is_stranger(self, repo: Repo) -> bool:
        given = self.headers.get("authorization", "")
        return repo.needs_token is not None and given != f"Bearer {repo.needs_token}"

    def _play(self, name: str, repo: Repo, asked: str, file: str, *, with_body: bool) -> None:
        hub = self.server.hub
        named = {r.commit: r for r in repo.revisions.values()} | dict(repo.revisions)
        revision = named.get(asked)
        script = repo.scripts.get(file, repo.scripts.get("", Script()))
        hub.closed.wait(script.delay_s)
        if script.hang:
            hub.closed.wait()
        elif script.redirect_to_self:
            self._refuse(302, {"Location": self.path})
        elif script.status and hub.may_fail(name, script):
            self._refuse(script.status, script.headers)
        elif revision is None:
            self._refuse(404, {"X-Error-Code": "RevisionNotFound"})
        elif file not in revision.files:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": revision.commit}
            self._refuse(404, headers)
        else:
            if with_body and file.endswith(".safetensors"):
                hub.closed.wait(repo.weights_delay_s)
            self._send(name, revision, file, script, with_body=with_body)

    def _refuse(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": "0"} | dict(headers)).items():
            self.send_header(name, value)
        self.end_headers()

    def _send(
        self, name: str, revision: Revision, file: str, script: Script, *, with_body: bool
    ) -> None:
        content = revision.files[file]
        body, etag = self._range_of(content), hashlib.sha256(content).hexdigest()
        self.send_response(200 if body is content else 206)
        headers = {
            "X-Repo-Commit": revision.commit,
            "ETag": f'"{etag}"',
            "X-Linked-Etag": f'"{etag}"',
            "X-Linked-Size": str(len(content)),
            "Content-Length": str(len(body)),
            **script.headers,
        }
        for header, value in headers.items():
            self.send_header(header, value)
        self.end_headers()
        if with_body and self._write(body, script) and len(body) == len(content):
            self.server.hub.note_download(name, file)

    def _range_of(self, content: bytes) -> bytes:
        span = self.headers.get("Range", "")
        if not span:
            return content
        begin, _, end = span.removeprefix("bytes=").partition("-")
        return content[int(begin) : int(end) + 1 if end else None]

    def _write(self, body: bytes, script: Script) -> bool:
        """Send a body as scripted; whether all of it went out."""
        whole = len(body)
        if script.close_after_bytes is not None:
            body = body[: script.close_after_bytes]
        if script.bytes_per_s:
            self._drip(body, script.bytes_per_s)
        else:
            self.wfile.write(body)
        self.close_connection |= len(body) < whole
        return len(body) == whole

    def _drip(self, body: bytes, bytes_per_s: float) -> None:
        started, sent = time.monotonic(), 0
        while sent < len(body) and not self.server.hub.closed.wait(_TICK_S):
            due = min(len(body), int((time.monotonic() - started) * bytes_per_s))
            self.wfile.write(body[sent:due])
            self.wfile.flush()
            sent = due
