"""Routes that are found by their path alone; all else is the application's behind them."""

import pytest
from loralane_router.errors import invalid
from loralane_router.gateway.direct import Direct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route


async def behind(scope, receive, send) -> None:
    await PlainTextResponse("behind")(scope, receive, send)


async def answer(request: Request) -> Response:
    return PlainTextResponse("direct")


async def refuse(request: Request) -> Response:
    raise invalid("no such thing", "prompt")


async def leave(request: Request) -> Response:
    raise ClientDisconnect


async def fail(request: Request) -> Response:
    raise RuntimeError("a secret of ours")


DIRECT = Direct(
    behind,
    [
        Route("/answer", answer, methods=["POST"]),
        Route("/read", answer, methods=["GET"]),
        Route("/v1/refuse", refuse, methods=["POST"]),
        Route("/leave", leave, methods=["POST"]),
        Route("/v1/fail", fail, methods=["POST"]),
    ],
)


async def asked(method: str, path: str, sent: list[dict]) -> tuple[int, bytes]:
    """Send a request; return the status and the body, which are also in `sent`."""

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
    await DIRECT(scope, None, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/answer", b"direct"),
        ("GET", "/answer", b"behind"),
        ("POST", "/answer/", b"behind"),
        ("POST", "/read", b"behind"),
        ("GET", "/read", b"behind"),
    ],
)
async def test_only_a_post_at_the_very_path_is_answered_directly(method, path, body):
    assert await asked(method, path, []) == (200, body)


async def test_an_error_of_ours_is_answered_as_its_route_answers_errors():
    status, body = await asked("POST", "/v1/refuse", [])

    assert status == 400
    assert b'"message":"no such thing"' in body


async def test_a_client_that_left_is_counted_as_one():
    assert (await asked("POST", "/leave", []))[0] == 499


async def test_an_error_that_is_not_ours_is_answered_without_its_cause_and_raised_for_the_log():
    sent: list[dict] = []

    with pytest.raises(RuntimeError):
        await asked("POST", "/v1/fail", sent)

    assert sent[0]["status"] == 500
    assert b"secret" not in sent[1]["body"]
