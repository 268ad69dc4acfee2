"""Refusals: each route says them its way, and only for what could be served."""

import threading

import pytest
from loralane_proto import shard_pb2 as pb
from loralane_router.errors import RequestError, Status

TEXT_ROUTES = ["/v1/completions", "/v1/chat/completions", "/", "/generate", "/generate_stream"]
FULL = RequestError(pb.ERROR_KIND_OVERLOADED, "9 requests are waiting", retry_after_s=12.3)


BODY = {"prompt": "a", "inputs": "a", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize("path", TEXT_ROUTES)
async def test_a_refusal_says_when_to_come_back(http, router, path):
    router.full = FULL

    reply = await http.post(path, json=BODY)

    assert (reply.status_code, reply.headers["retry-after"]) == (429, "13")
    if path.startswith("/v1"):
        error = reply.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
        assert error["message"] == "9 requests are waiting"
    else:
        said = {"error": "9 requests are waiting", "error_type": "overloaded"}
        assert reply.json() == said
    assert router.requests == []


@pytest.mark.parametrize("path", TEXT_ROUTES)
async def test_what_can_never_be_served_is_told_so_though_the_queue_is_full(http, router, path):
    router.full = FULL

    reply = await http.post(path, content=b"not even JSON")

    assert reply.status_code == 400


@pytest.mark.parametrize("path", TEXT_ROUTES)
async def test_without_a_shard_no_body_is_looked_at(http, router, path):
    router.down = RequestError(pb.ERROR_KIND_UNAVAILABLE, "no shard", retry_after_s=1.0)

    reply = await http.post(path, content=b"not even JSON")

    assert reply.status_code == 503


@pytest.mark.parametrize("path", ["/v1/models", "/health/ready", "/info", "/metrics"])
async def test_what_is_no_request_for_text_is_answered_all_the_same(http, router, path):
    router.full = FULL

    assert (await http.get(path)).status_code in (200, 404)


async def test_a_body_that_is_too_long_is_told_so_whatever_waits(http, router):
    router.full = FULL

    reply = await http.post("/v1/completions", content=b"a" * 300_000)

    assert reply.status_code == 413


async def test_the_connection_serves_on_after_a_refusal(http, router):
    router.full = FULL
    refused = await http.post("/v1/completions", json={"prompt": "a" * 100_000})
    router.full = None

    served = await http.post("/v1/completions", json={"prompt": "a b"})

    assert (refused.status_code, served.status_code) == (429, 200)


class Watched(RequestError):
    """Knows which thread looks at it."""

    def __init__(self) -> None:
        super().__init__(pb.ERROR_KIND_OVERLOADED, "full")
        self.threads: set[int] = set()

    @property
    def status(self) -> Status:
        self.threads.add(threading.get_ident())
        return super().status


async def test_a_refusal_waits_for_no_thread(http, router):
    """Threads are busy with long prompts just when there is most to refuse."""
    router.full = Watched()

    reply = await http.post("/v1/completions", json={"prompt": "a"})

    assert reply.status_code == 429
    assert router.full.threads == {threading.get_ident()}, "the event loop's, which serves here"
