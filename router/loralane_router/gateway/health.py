"""Whether the process lives, whether it can serve, and its metrics."""

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from loralane_router.router import Router


def routes(router: Router) -> list[Route]:
    """Return the routes of this surface; those without `live` answer 503 until ready."""

    async def live(_: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(_: Request) -> Response:
        if router.ready:
            return JSONResponse({"status": "ready"})
        headers = {"Retry-After": "1"}
        return JSONResponse({"status": "not ready"}, status_code=503, headers=headers)

    async def metrics(_: Request) -> Response:
        body = generate_latest(router.metrics.registry)
        return Response(body, headers={"content-type": CONTENT_TYPE_LATEST})

    get = ["GET"]
    return [
        Route("/health/live", live, methods=get),
        Route("/health/ready", ready, methods=get),
        Route("/health", ready, methods=get),
        Route("/ping", ready, methods=get),
        Route("/startup", ready, methods=get),
        Route("/", ready, methods=get),
        Route("/metrics", metrics, methods=get),
    ]
