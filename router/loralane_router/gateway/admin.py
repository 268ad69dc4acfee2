"""`/v1/adapters`: list, validate, load, pin and unload adapters; and vLLM's two routes for it."""

from dataclasses import asdict
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from loralane_router.adapters.facts import AdapterEntry, AdapterFacts, AtShard
from loralane_router.errors import RequestError, invalid
from loralane_router.gateway import fields
from loralane_router.gateway.bodies import hub_key, parse, read_json
from loralane_router.gateway.failures import Failure
from loralane_router.gateway.limits import Limits
from loralane_router.gateway.pages import page_of
from loralane_router.router import Router

_PAGE: Final = 100
_MOST: Final = 1000
#: Seconds; a hundred years, below which floats and clocks are safe.
_LONGEST_TTL_S: Final = 100 * 365.25 * 86400


class LoadBody(msgspec.Struct):
    """`POST /v1/adapters`."""

    name: str
    reference: str
    pin: bool | None = None
    ttl_s: float | None = None
    api_token: str | None = None


class ValidateBody(msgspec.Struct):
    """`POST /v1/adapters/validate`."""

    reference: str
    tensors: bool | None = None
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
    """Return one adapter as this API shows it; bytes, milliseconds, seconds, unix seconds."""
    facts = entry.facts
    places = {"shards": [_place(place) for place in entry.shards]} if entry.shards else {}
    return {
        "name": entry.name,
        "reference": entry.reference,
        "digest": facts.digest,
        "tier": facts.tier,
        **_shape(facts),
        "host_bytes": facts.host_bytes,
        "rows": facts.rows,
        "pinned": facts.pinned,
        "ttl_s": facts.ttl_s,
        "last_used": facts.last_used,
        "load_ms": facts.load_ms,
        "load_times": asdict(facts.load_times) if facts.load_times else None,
        **places,
    }


def _place(place: AtShard) -> dict[str, object]:
    """Return where an adapter is, and as what, if there are several shards."""
    facts = place.facts
    return {
        "shard": place.shard,
        "digest": facts.digest,
        "tier": facts.tier,
        "rows": facts.rows,
        "pinned": facts.pinned,
    }


def _shape(facts: AdapterFacts) -> dict[str, object]:
    return {
        "rank": facts.rank,
        "lanes": facts.lanes,
        "bytes": facts.bytes,
        "targets": facts.targets,
        "modules": facts.modules,
    }


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _refuse_empty(**texts: str) -> None:
    for field, value in texts.items():
        if not fields.name(field, value):
            raise invalid(f"{field} must not be empty", field)


class Admin:
    """The handlers; an adapter that one answers with is loaded and verified."""

    def __init__(self, router: Router, limits: Limits) -> None:
        self._router = router
        self._limits = limits

    async def list(self, request: Request) -> Response:
        """Return a page of the adapters that the shard knows, by name."""
        limit, after = page_of(request, _PAGE, _MOST)
        page = await self._router.list_adapters(limit, after)
        data = [row(entry) for entry in page.entries]
        listed = {"object": "list", "data": data, "has_more": page.has_more, "total": page.total}
        return _json(listed)

    async def validate(self, request: Request) -> Response:
        """Say what an adapter is, or what a request for it would be answered; load nothing."""
        body = parse(await read_json(request, self._limits), ValidateBody, {})
        _refuse_empty(reference=body.reference)
        token = body.api_token or hub_key(request)
        try:
            facts, notes = await self._router.validate_adapter(
                body.reference, token, tensors=bool(body.tensors)
            )
        except RequestError as error:
            failure = Failure.of(error)
            return _json({"valid": False, "status": failure.http, **failure.openai()})
        facts_shown = {"reference": body.reference, "digest": facts.digest, **_shape(facts)}
        return _json({"valid": True, **facts_shown, "notes": notes})

    async def load(self, request: Request) -> Response:
        """Load an adapter under a name; 201 if the name is new, else 200."""
        body = parse(await read_json(request, self._limits), LoadBody, {})
        _refuse_empty(name=body.name, reference=body.reference)
        if body.ttl_s is not None and not 0 <= body.ttl_s <= _LONGEST_TTL_S:
            raise invalid(f"ttl_s must be between 0 and {_LONGEST_TTL_S:.0f} seconds", "ttl_s")
        known = self._router.adapter(body.name) is not None
        token = body.api_token or hub_key(request)
        entry = await self._router.load_adapter(body.name, body.reference, token, body.ttl_s)
        if body.pin is not None and body.pin is not entry.facts.pinned:
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
        _refuse_empty(name=body.lora_name, reference=body.lora_path)
        await self._router.load_adapter(body.lora_name, body.lora_path, hub_key(request))
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
        Route("/v1/adapters/validate", admin.validate, methods=["POST"]),
        Route("/v1/adapters/{name:path}", admin.pin, methods=["PATCH"]),
        Route("/v1/adapters/{name:path}", admin.unload, methods=["DELETE"]),
        Route("/v1/load_lora_adapter", admin.vllm_load, methods=["POST"]),
        Route("/v1/unload_lora_adapter", admin.vllm_unload, methods=["POST"]),
    ]
