"""Routes that are asked most are found by their path alone.

Starlette goes through six layers to the function that answers, and each looks at every message on
its way back. They tell nothing that is not known here: these routes have no parameters in their
paths. For a refusal, which does little else, the layers are a good part of what it costs.
"""

from collections.abc import Awaitable, Callable, Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from loralane_router.gateway.failures import HANDLERS


class Direct:
    """ASGI middleware: answers POST at the paths of `routes` itself; `app` answers all else."""

    def __init__(self, app: ASGIApp, routes: Iterable[Route]) -> None:
        self._app = app
        self._endpoints: dict[str, Callable[[Request], Awaitable[Response]]] = {
            route.path: route.endpoint for route in routes if "POST" in (route.methods or ())
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. An error that is not ours is answered, and raised for the log."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await endpoint(request)
        except Exception as error:
            kind, handler = next(one for one in HANDLERS.items() if isinstance(error, one[0]))
            response = await handler(request, error)
            if kind is Exception:
                await response(scope, receive, send)
                raise
        await response(scope, receive, send)
