"""The three requests that we make to S3, bounded in time, and its errors turned into ours.

boto3 comes with the extra `s3` and is imported when the first request is made.
"""

import base64
import binascii
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final

from loralane_server.adapters.sources.references import S3Place
from loralane_server.adapters.sources.refusals import retry_after_ms
from loralane_server.adapters.sources.remote import METADATA_TIMEOUT_S, RemoteFile
from loralane_server.errors import (
    AdapterCorrupt,
    AdapterForbidden,
    AdapterNotFound,
    ShardError,
    SourceUnavailable,
)

_CHUNK: Final = 1 << 18
#: More than all threads that may ask at once.
_CONNECTIONS: Final = 256
_MD5_ETAG: Final = re.compile(r'"[0-9a-f]{32}"')
_ENCRYPTED: Final = ("aws:kms", "aws:kms:dsse")


class ObjectReplaced(AdapterCorrupt):
    """The object is no longer the version that was resolved."""


class S3Client:
    """Asks S3, or what `AWS_ENDPOINT_URL` names, with the shard's own credentials.

    Any thread may call. `endpoint` None = as boto3 finds it, like region and credentials.
    """

    def __init__(self, endpoint: str | None = None, timeout_s: float = METADATA_TIMEOUT_S) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        #: Guarded by the lock; boto3's clients have no static type.
        self._made: Any = None

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            if self._made is not None:
                self._made.close()

    def head(self, place: S3Place, name: str) -> RemoteFile:
        """What an object is now.

        Raises:
            AdapterNotFound, AdapterForbidden, SourceUnavailable: see `s3_errors`.
        """
        with s3_errors(place, name):
            found = self._client.head_object(
                Bucket=place.bucket, Key=f"{place.key}/{name}", ChecksumMode="ENABLED"
            )
        return RemoteFile(
            name,
            found.get("VersionId", ""),
            found["ETag"],
            found["ContentLength"],
            checksum_of(found),
        )

    def read(self, place: S3Place, file: RemoteFile, begin: int, end: int) -> bytes:
        """The bytes `[begin, end)` of that version of an object, and no more.

        Raises:
            SourceUnavailable: they do not come in time.
            As `stream`.
        """
        deadline = time.monotonic() + self._timeout_s
        content = bytearray()
        for chunk in self.stream(place, file, begin, end):
            content += chunk
            if len(content) >= end - begin:
                return bytes(content[: end - begin])
            if time.monotonic() > deadline:
                break
        raise SourceUnavailable(
            f"{file.name} of {place}: S3 does not answer in full "
            f"({len(content)} of {end - begin} bytes in {self._timeout_s:g} s)"
        )

    def stream(self, place: S3Place, file: RemoteFile, begin: int, end: int) -> Iterator[bytes]:
        """The bytes `[begin, end)` of that version of an object, as they come.

        Raises:
            ObjectReplaced: the key holds another version by now.
            As `s3_errors`, also in the middle.
        """
        version = {"VersionId": file.version} if file.version else {}
        with s3_errors(place, file.name):
            answer = self._client.get_object(
                Bucket=place.bucket,
                Key=f"{place.key}/{file.name}",
                Range=f"bytes={begin}-{end - 1}",
                IfMatch=file.etag,
                **version,
            )
            with closing(answer["Body"]) as body:
                # What has come, however little: the public `read` waits for all that it asks for,
                # and a store that drips would never be noticed.
                while chunk := body._raw_stream.read1(_CHUNK):
                    yield chunk

    @property
    def _client(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = _make_client(self._endpoint, self._timeout_s)
            return self._made


def _make_client(endpoint: str | None, timeout_s: float) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=timeout_s,
        read_timeout=timeout_s,
        max_pool_connections=_CONNECTIONS,
        # Whoever asked may ask again, and is told when; a retry in here would hold a thread.
        retries={"total_max_attempts": 1, "mode": "standard"},
        # Checksums of whole objects are compared where the whole object is read.
        response_checksum_validation="when_required",
    )
    # A session of our own: boto3's default one may not be made by two threads at once.
    return boto3.session.Session().client("s3", endpoint_url=endpoint, config=config)


def checksum_of(found: Mapping[str, Any]) -> str:
    """The checksum of a whole object that its metadata names, as in `RemoteFile`; "" = none.

    An ETag is an MD5 only for what was uploaded in one part and is not encrypted by KMS or by a
    key of the customer's; the checksum of a multipart upload may be one of its parts' checksums.
    """
    sha256 = found.get("ChecksumSHA256", "")
    if sha256 and "-" not in sha256 and found.get("ChecksumType") != "COMPOSITE":
        try:
            return f"sha256:{base64.b64decode(sha256, validate=True).hex()}"
        except binascii.Error:
            return ""
    hidden = found.get("ServerSideEncryption") in _ENCRYPTED or found.get("SSECustomerAlgorithm")
    return "md5" if _MD5_ETAG.fullmatch(found["ETag"]) and not hidden else ""


@contextmanager
def s3_errors(place: S3Place, name: str) -> Iterator[None]:
    """Turn what boto3 raises into ours.

    Raises:
        AdapterNotFound: no such bucket, object or version.
        AdapterForbidden: the shard's credentials may not read it; S3 says so of missing objects
            too, where they may not list the bucket.
        ObjectReplaced: the object is another by now.
        AdapterCorrupt: it ends before the range that was asked for.
        SourceUnavailable: busy, away, too slow, or the shard has no credentials.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    what = f"{name} of {place}"
    try:
        yield
    except ClientError as exc:
        raise _refused(exc.response, what) from exc
    except (BotoCoreError, HTTPError, OSError, ValueError) as exc:
        raise SourceUnavailable(f"{what}: S3 does not answer ({type(exc).__name__})") from exc


def _refused(response: Mapping[str, Any], what: str) -> ShardError:
    about = response.get("ResponseMetadata", {})
    status = about.get("HTTPStatusCode", 0)
    if status == 404:
        return AdapterNotFound(f"{what}: no such bucket or object")
    if status in (401, 403):
        return AdapterForbidden(f"{what}: no such object, or this shard may not read it")
    if status == 412:
        return ObjectReplaced(f"{what} has changed since it was resolved; request it again")
    if status == 416:
        return AdapterCorrupt(f"{what} is truncated: it is shorter than its header says")
    return SourceUnavailable(
        f"{what}: S3 answers {status}",
        retry_after_ms=retry_after_ms(about.get("HTTPHeaders", {}).get("retry-after", "")),
    )
