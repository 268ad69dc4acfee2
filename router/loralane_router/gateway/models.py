"""`GET /v1/models`: the base and the adapters, as vLLM lists them.

OpenAI's clients expect one list with everything; a thousand adapters are that list, and beyond it
`has_more` is true and `?after=` goes on. One model is found by its name among any number.
"""

import time
from typing import Final

import msgspec
from loralane_proto import shard_pb2 as pb
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loralane_router.adapters.facts import AdapterEntry
from loralane_router.errors import RequestError
from loralane_router.gateway.pages import page_of
from loralane_router.router import Router

_PAGE: Final = 1000


class Models:
    """The handlers. `created` is the unix time of the start, for every model the same."""

    def __init__(self, router: Router, created: int) -> None:
        self._router = router
        self._created = created

    async def listing(self, request: Request) -> Response:
        """Return the base, under each of its names, and the adapters in the order of theirs."""
        limit, after = page_of(request, _PAGE, _PAGE)
        page = self._router.adapters(limit, after)
        data = [self._adapter(entry) for entry in page.entries]
        if not after:
            data = [self._base(name) for name in self._base_names()] + data
        return _json({"object": "list", "data": data, "has_more": page.has_more})

    async def single(self, request: Request) -> Response:
        """Return one model. Raises RequestError (404)."""
        name = request.path_params["name"]
        if name in self._base_names():
            return _json(self._base(name))
        entry = self._router.adapter(name)
        if entry is None:
            raise RequestError(
                pb.ERROR_KIND_NOT_FOUND, f"no model {name!r} is known", param="model"
            )
        return _json(self._adapter(entry))

    def _base_names(self) -> list[str]:
        own = self._router.info.model_id
        return list(dict.fromkeys([own, self._router.config.served_model_name or own]))

    def _base(self, name: str) -> dict[str, object]:
        return self._row(name, self._router.info.model_id, None)

    def _adapter(self, entry: AdapterEntry) -> dict[str, object]:
        """`parent` is the base, `root` what the name stands for."""
        return self._row(entry.name, entry.reference, self._router.info.model_id)

    def _row(self, name: str, root: str, parent: str | None) -> dict[str, object]:
        return {
            "id": name,
            "root": root,
            "parent": parent,
            "object": "model",
            "created": self._created,
            "owned_by": "loralane",
            "max_model_len": self._router.info.max_model_len,
        }


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def routes(router: Router) -> list[Route]:
    """Return the routes of this surface."""
    models = Models(router, int(time.time()))
    return [
        Route("/v1/models", models.listing, methods=["GET"]),
        Route("/v1/models/{name:path}", models.single, methods=["GET"]),
    ]
