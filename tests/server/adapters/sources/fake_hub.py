"""A hub on the loopback: HEAD and GET of `/org/name/resolve/revision/file`, scripted per file."""

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Fault:
    """How a file is refused or spoilt."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    #: Send so many bytes of a body, then cut the connection.
    cut_after: int | None = None
    #: Accept and never answer, until the hub is closed or `held` is set.
    hang: bool = False
    #: Send no body of a whole file before this is set.
    held: threading.Event | None = None
    #: Send one byte of a body at a time, this many seconds apart.
    drip_s: float | None = None
    #: Redirect to the same place.
    loop: bool = False
    #: Redirect bodies to the same path of this host; HEAD names size and etag as the hub does.
    moved_to: str = ""
    #: Send this instead of the file, with the file's size and etag named.
    body: bytes | None = None
    #: What the answers say of the file instead of the truth.
    etag: str = ""
    commit: str = ""


@dataclass
class Repo:
    """One repository: its files, one commit, and who may read it."""

    files: dict[str, bytes]
    commit: str = "c" * 40
    needs_token: str | None = None
    faults: dict[str, Fault] = field(default_factory=dict)
    #: Whether the answers come without a Range.
    ignores_range: bool = False


class FakeHub:
    """Answers as huggingface.co does, as far as its clients look."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.repos: dict[str, Repo] = {}
        #: (method, repo, file) -> requests.
        self.requests: Counter[tuple[str, str, str]] = Counter()
        #: Bytes of bodies sent, by file.
        self.sent: Counter[str] = Counter()
        self.closed = threading.Event()
        #: Set = answers flow; clear to hold every answer back.
        self.open = threading.Event()
        self.open.set()
        #: Authorization headers that came, with the method and the file.
        self.given: list[tuple[str, str, str]] = []

    def total(self, method: str | None = None) -> int:
        """Requests so far."""
        return sum(n for key, n in self.requests.items() if method in (None, key[0]))


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Run a hub on a free port of the loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.closed.set()
        hub.open.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _answer(self, *, with_body: bool) -> None:
        hub: FakeHub = self.server.hub  # type: ignore[attr-defined]
        owner, name, _, revision, file = self.path.lstrip("/").split("/", 4)
        repo_id = f"{owner}/{name}"
        hub.requests[self.command, repo_id, file] += 1
        hub.open.wait()
        repo = hub.repos.get(repo_id)
        if repo is None:
            return self._refuse(404, {"X-Error-Code": "RepoNotFound"})
        given = self.headers.get("authorization", "")
        hub.given.append((self.command, file, given))
        if repo.needs_token is not None and given != f"Bearer {repo.needs_token}":
            return self._refuse(401, {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", repo.commit):
            return self._refuse(404, {"X-Error-Code": "RevisionNotFound"})
        fault = repo.faults.get(file, Fault())
        if fault.hang:
            (fault.held or hub.closed).wait()
            self.close_connection = True
            return None
        if fault.loop:
            return self._refuse(302, {"Location": self.path})
        if fault.status:
            return self._refuse(fault.status, fault.headers)
        if file not in repo.files:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit}
            return self._refuse(404, headers)
        return self._send(hub, repo, file, fault, with_body=with_body)

    def _refuse(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": "0"} | headers).items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, hub: FakeHub, repo: Repo, file: str, fault: Fault, *, with_body: bool) -> None:
        content = repo.files[file]
        etag = fault.etag or hashlib.sha256(content).hexdigest()
        if fault.body is not None:
            content = fault.body
        span = self.headers.get("Range", "")
        body = content
        if span and not repo.ignores_range and not fault.moved_to:
            begin, end = span.removeprefix("bytes=").split("-")
            body = content[int(begin) : int(end) + 1]
            self.send_response(206)
        elif fault.moved_to:
            body = b""
            self.send_response(302)
        else:
            self.send_response(200)
        if fault.moved_to:
            self.send_header("Location", fault.moved_to + self.path)
        self.send_header("X-Repo-Commit", fault.commit or repo.commit)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Linked-Etag", f'"{etag}"')
        self.send_header("X-Linked-Size", str(len(repo.files[file])))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not with_body:
            return
        if fault.cut_after is not None:
            body = body[: fault.cut_after]
            self.close_connection = True
        if fault.held is not None and body is content:
            fault.held.wait()
        hub.sent[file] += len(body)
        if fault.drip_s is None:
            self.wfile.write(body)
        else:
            self._drip(hub, body, fault.drip_s)

    def _drip(self, hub: FakeHub, body: bytes, pause_s: float) -> None:
        for byte in body:
            if hub.closed.wait(pause_s):
                return
            try:
                self.wfile.write(bytes([byte]))
            except OSError:  # the client has had enough
                self.close_connection = True
                return
