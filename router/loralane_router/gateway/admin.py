"""`/v1/adapters`: list, load, pin and unload adapters; and vLLM's two routes for the same."""

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from loralane_router.errors import invalid
from loralane_router.gateway import fields
from loralane_router.gateway.bodies import hub_key, parse, read_json
from loralane_router.gateway.limits import Limits
from loralane_router.router import AdapterEntry, Router


class LoadBody(msgspec.Struct):
    """`POST /v1/adapters`."""

    name: str
    reference: str
    pin: bool | None = None
    api_token: str | None = None


class PinBody(msgspec.Struct):
    """`PATCH /v1/adapters/{name}`."""

    pinned: bool


class VllmLoadBody(msgspec.Struct):
    """vLLM's `POST /v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str


class VllmUnloadBody(msgspec.Struct):
    """vLLM's `POST /v1/unload_lora_adapter`."""

    lora_name: str


def row(entry: AdapterEntry) -> dict[str, object]:
    """Return one adapter as this API shows it; bytes, milliseconds, unix seconds."""
    return {
        "name": entry.name,
        "reference": entry.reference,
        "digest": entry.digest,
        "tier": entry.tier,
        "rank": entry.rank,
        "lanes": entry.lanes,
        "bytes": entry.bytes,
        "targets": entry.targets,
        "modules": entry.modules,
        "rows": entry.rows,
        "pinned": entry.pinned,
        "load_ms": entry.load_ms,
        "last_used": entry.last_used,
    }


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _load(router: Router, name: str, reference: str, token: str | None) -> AdapterEntry:
    for field, value in (("name", name), ("reference", reference)):
        if not fields.name(field, value):
            raise invalid(f"{field} must not be empty", field)
    return await router.load_adapter(name, reference, token)


class Admin:
    """The handlers; an adapter that one answers with is loaded and verified."""

    def __init__(self, router: Router, limits: Limits) -> None:
        self._router = router
        self._limits = limits

    async def list(self, _: Request) -> Response:
        """Return every adapter that the shard knows."""
        entries = await self._router.list_adapters()
        return _json({"object": "list", "data": [row(entry) for entry in entries]})

    async def load(self, request: Request) -> Response:
        """Load an adapter under a name; 201 if the name is new, else 200."""
        body = parse(await read_json(request, self._limits), LoadBody, {})
        known = any(entry.name == body.name for entry in self._router.adapters())
        token = body.api_token or hub_key(request)
        entry = await _load(self._router, body.name, body.reference, token)
        if body.pin is not None and body.pin is not entry.pinned:
            entry = await self._router.pin_adapter(body.name, body.pin)
        return _json(row(entry), 200 if known else 201)

    async def pin(self, request: Request) -> Response:
        """Protect an adapter from eviction, or no longer."""
        body = parse(await read_json(request, self._limits), PinBody, {})
        return _json(row(await self._router.pin_adapter(request.path_params["name"], body.pinned)))

    async def unload(self, request: Request) -> Response:
        """Forget an adapter; answer with what that freed."""
        name = request.path_params["name"]
        freed_bytes, freed_lanes = await self._router.unload_adapter(name)
        return _json({"name": name, "freed_host_bytes": freed_bytes, "freed_lanes": freed_lanes})

    async def vllm_load(self, request: Request) -> Response:
        """Answer as vLLM does, in plain text."""
        body = parse(await read_json(request, self._limits), VllmLoadBody, {})
        await _load(self._router, body.lora_name, body.lora_path, hub_key(request))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def vllm_unload(self, request: Request) -> Response:
        """Answer as vLLM does, in plain text."""
        body = parse(await read_json(request, self._limits), VllmUnloadBody, {})
        await self._router.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def routes(router: Router, limits: Limits) -> list[Route]:
    """Return the routes of this surface."""
    admin = Admin(router, limits)
    return [
        Route("/v1/adapters", admin.list, methods=["GET"]),
        Route("/v1/adapters", admin.load, methods=["POST"]),
        Route("/v1/adapters/{name:path}", admin.pin, methods=["PATCH"]),
        Route("/v1/adapters/{name:path}", admin.unload, methods=["DELETE"]),
        Route("/v1/load_lora_adapter", admin.vllm_load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", admin.vllm_unload, methods=["POST"]),
    ]
