"""`GET /v1/models`: the base and the adapters, as vLLM lists them."""

import time

import msgspec
from loralane_proto import shard_pb2 as pb
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loralane_router.errors import RequestError
from loralane_router.router import Router


def list_models(router: Router, created: int) -> list[dict[str, object]]:
    """Return the base, under each of its names, and every adapter with its `parent` and `root`."""
    info = router.info
    base = {info.model_id: None, router.config.served_model_name or info.model_id: None}
    common = {
        "object": "model",
        "created": created,
        "owned_by": "loralane",
        "max_model_len": info.max_model_len,
    }
    bases = [{"id": name, "root": info.model_id, "parent": None} | common for name in base]
    adapters = [
        {"id": entry.name, "root": entry.reference, "parent": info.model_id} | common
        for entry in router.adapters()
    ]
    return bases + adapters


def routes(router: Router) -> list[Route]:
    """Return the routes of this surface."""
    created = int(time.time())

    async def listing(_: Request) -> Response:
        body = {"object": "list", "data": list_models(router, created)}
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def single(request: Request) -> Response:
        name = request.path_params["name"]
        for model in list_models(router, created):
            if model["id"] == name:
                return Response(msgspec.json.encode(model), media_type="application/json")
        raise RequestError(pb.ERROR_KIND_NOT_FOUND, f"no model {name!r} is known", param="model")

    return [
        Route("/v1/models", listing, methods=["GET"]),
        Route("/v1/models/{name:path}", single, methods=["GET"]),
    ]
