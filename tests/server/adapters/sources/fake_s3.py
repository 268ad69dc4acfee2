"""An S3 on the loopback: HEAD and GET of `/bucket/key`, with Range, If-Match and versions.

Signatures are not checked. Faults are scripted by key.
"""

import base64
import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class S3Fault:
    """How an object is refused or spoilt."""

    status: int = 0
    code: str = "Fault"
    headers: dict[str, str] = field(default_factory=dict)
    #: Send so many bytes of a body, then cut the connection.
    cut_after: int | None = None
    #: Only so many answers have the fault.
    times: int | None = None
    #: Accept and never answer, until the store is closed.
    hang: bool = False
    #: Send one byte of a body at a time, this many seconds apart.
    drip_s: float | None = None
    #: Instead of the object's own, with the object's size and checksum named.
    body: bytes | None = None


@dataclass
class Stored:
    """One version of an object."""

    content: bytes
    version: str = ""
    #: What the answers say of it beside size and ETag.
    headers: dict[str, str] = field(default_factory=dict)
    #: Its MD5 unless told otherwise.
    etag: str = ""

    def __post_init__(self) -> None:
        self.etag = self.etag or hashlib.md5(self.content).hexdigest()


def sha256_header(content: bytes) -> dict[str, str]:
    """What S3 says of an object that was uploaded with a SHA-256."""
    return {"x-amz-checksum-sha256": base64.b64encode(hashlib.sha256(content).digest()).decode()}


class FakeS3:
    """Answers as S3 does, as far as boto3 looks. The last of an object's versions is current."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._objects: dict[str, list[Stored]] = {}
        #: By bucket/key.
        self.faults: dict[str, S3Fault] = {}
        #: (method, bucket/key) -> requests.
        self.requests: Counter[tuple[str, str]] = Counter()
        #: Bytes of bodies sent, by bucket/key.
        self.sent: Counter[str] = Counter()
        self.closed = threading.Event()

    def put(self, key: str, stored: Stored) -> None:
        """Store a version; one without an id replaces all others."""
        kept = self._objects.get(key, []) if stored.version else []
        self._objects[key] = [*kept, stored]

    def put_all(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Store files, not versioned, below bucket/prefix."""
        for name, content in files.items():
            self.put(f"{folder}/{name}", Stored(content))

    def remove(self, key: str) -> None:
        """Remove all versions."""
        self._objects.pop(key, None)

    def find(self, key: str, version: str) -> Stored | None:
        """A version of an object; "" = the current one."""
        versions = self._objects.get(key, [])
        return next((v for v in reversed(versions) if version in ("", v.version)), None)

    def total(self, method: str | None = None) -> int:
        """Requests so far."""
        return sum(n for key, n in self.requests.items() if method in (None, key[0]))


@contextmanager
def fake_s3() -> Iterator[FakeS3]:
    """Run a store on a free port of the loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    store = FakeS3(f"http://127.0.0.1:{server.server_address[1]}")
    server.store = store  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield store
    finally:
        store.closed.set()
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
        store: FakeS3 = self.server.store  # type: ignore[attr-defined]
        url = urlsplit(self.path)
        key = unquote(url.path).lstrip("/")
        store.requests[self.command, key] += 1
        fault = self._fault(store, key)
        if fault.hang:
            store.closed.wait()
            return None
        if fault.status:
            return self._refuse(fault.status, fault.code, fault.headers, with_body=with_body)
        found = store.find(key, parse_qs(url.query).get("versionId", [""])[0])
        if found is None:
            return self._refuse(404, "NoSuchKey", {}, with_body=with_body)
        if self.headers.get("If-Match", f'"{found.etag}"') != f'"{found.etag}"':
            return self._refuse(412, "PreconditionFailed", {}, with_body=with_body)
        return self._send(store, key, found, fault, with_body=with_body)

    @staticmethod
    def _fault(store: FakeS3, key: str) -> S3Fault:
        fault = store.faults.get(key)
        if fault is None or fault.times == 0:
            return S3Fault()
        if fault.times is not None:
            fault.times -= 1
        return fault

    def _refuse(
        self, status: int, code: str, headers: Mapping[str, str], *, with_body: bool
    ) -> None:
        body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/xml", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if with_body else 0))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _send(
        self, store: FakeS3, key: str, found: Stored, fault: S3Fault, *, with_body: bool
    ) -> None:
        content = found.content if fault.body is None else fault.body
        body = content
        span = self.headers.get("Range", "")
        if span:
            begin, end = map(int, span.removeprefix("bytes=").split("-"))
            body = content[begin : end + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("ETag", f'"{found.etag}"')
        if found.version:
            self.send_header("x-amz-version-id", found.version)
        for name, value in found.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self._write(store, key, body, fault)

    def _write(self, store: FakeS3, key: str, body: bytes, fault: S3Fault) -> None:
        if fault.cut_after is not None:
            body = body[: fault.cut_after]
            self.close_connection = True
        if fault.drip_s is None:
            store.sent[key] += len(body)
            self.wfile.write(body)
            return
        for byte in body:
            if store.closed.wait(fault.drip_s):
                return
            try:
                self.wfile.write(bytes([byte]))
            except OSError:  # the client has had enough
                self.close_connection = True
                return
            store.sent[key] += 1
