"""gRPC for text: `Inference` and `grpc.health.v1` on top of the router."""

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from loralane_proto import inference_pb2 as pb
from loralane_proto import inference_pb2_grpc, shard_pb2

from loralane_router.errors import RequestError, invalid
from loralane_router.fleet.shards import ERROR_TRAILER
from loralane_router.requests import (
    AdapterWaitPolicy,
    Delta,
    Merge,
    Message,
    Parameters,
    TextRequest,
    bearer_key,
)
from loralane_router.router import Generation, Router

_SURFACE: Final = "grpc"
_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Inference"].full_name


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """`Generate`: the text of one request as it is made."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: "grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateReply]",
    ) -> AsyncIterator[pb.GenerateReply]:
        """Yield the deltas of one request; a client that goes away ends it."""
        status = grpc.StatusCode.INTERNAL
        generation: Generation | None = None
        try:
            generation = await self._router.open(text_request(request, _key(context)))
            async for reply in _replies(generation):
                yield reply
            status = grpc.StatusCode.OK
        except RequestError as error:
            status = error.status.grpc
            await context.abort(status, error.message, ((ERROR_TRAILER, _trailer(error)),))
        except (asyncio.CancelledError, GeneratorExit):
            status = grpc.StatusCode.CANCELLED
            raise
        finally:
            if generation is not None:
                await generation.aclose()
            self._router.metrics.requests.labels(_SURFACE, status.name).inc()


class InferenceServer:
    """The router's gRPC port: `Inference`, and `grpc.health.v1` that follows `Router.ready`."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._server = grpc.aio.server()
        self._health = health.HealthServicer()
        self._follower: asyncio.Task[None] | None = None
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(router), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self, host: str, port: int) -> int:
        """Serve; return the port, which is a free one for port 0."""
        bound = self._server.add_insecure_port(f"{host}:{port}")
        await self._set_health(self._router.ready)
        self._follower = asyncio.create_task(self._follow(), name="grpc-health")
        await self._server.start()
        return bound

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop accepting, give running calls `grace_s` seconds, then end them."""
        await self._health.enter_graceful_shutdown()
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.wait([self._follower])
        await self._server.stop(grace_s)

    async def _follow(self) -> None:
        async for ready in self._router.ready_changes():
            await self._set_health(ready)

    async def _set_health(self, ready: bool) -> None:
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if ready else response.NOT_SERVING
        for service in ("", _SERVICE):
            await self._health.set(service, status)


def _key(context: "grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateReply]") -> str | None:
    """Return the bearer key of a call's `authorization` metadata."""
    for name, value in context.invocation_metadata() or ():
        if name == "authorization":
            return bearer_key(value if isinstance(value, str) else value.decode("ascii", "replace"))
    return None


def text_request(request: pb.GenerateRequest, key: str | None = None) -> TextRequest:
    """Return the router's form of a request and its caller's key.

    Raises RequestError without an input, or with a policy that there is not.
    """
    return TextRequest(
        adapter=request.adapter,
        prompt=_prompt(request),
        parameters=Parameters(
            max_tokens=request.max_tokens or None,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p if request.HasField("top_p") else 1.0,
            seed=request.seed if request.HasField("seed") else None,
            stop=tuple(request.stop),
            ignore_eos=request.ignore_eos,
        ),
        token=request.token or None,
        merge=_merge(request) if request.HasField("merge") else None,
        key=key,
        priority=request.priority,
        max_wait_for_adapter_s=request.max_wait_for_adapter_ms / 1000 or None,
        adapter_wait_policy=_policy(request.adapter_wait_policy),
    )


def _policy(given: str) -> AdapterWaitPolicy:
    match given:
        case "" | "fail":
            return "fail"
        case "base":
            return "base"
        case _:
            raise invalid(
                f"adapter_wait_policy must be fail or base, not {given[:40]!r}",
                "adapter_wait_policy",
            )


def _merge(request: pb.GenerateRequest) -> Merge:
    if request.adapter:
        raise invalid("adapter and merge exclude each other", "merge")
    merge = request.merge
    return Merge(
        members=tuple((member.adapter, member.weight) for member in merge.members),
        strategy=merge.strategy or "linear",
        density=merge.density,
        majority_sign=merge.majority_sign or "total",
    )


def _prompt(request: pb.GenerateRequest) -> str | tuple[int, ...] | tuple[Message, ...]:
    match request.WhichOneof("input"):
        case "prompt":
            return request.prompt
        case "chat":
            return tuple(Message(m.role, m.content) for m in request.chat.messages)
        case "token_ids":
            return tuple(request.token_ids.ids)
        case _:
            raise invalid("one of prompt, chat and token_ids must be set", "prompt")


async def _replies(generation: Generation) -> AsyncIterator[pb.GenerateReply]:
    completion_tokens = 0
    first = True
    async for delta in generation:
        completion_tokens += len(delta.tokens)
        reply = pb.GenerateReply(text=delta.text, token_ids=[token.id for token in delta.tokens])
        if first:
            reply.adapter_digest = generation.adapter_digest
            reply.adapter_cold_ms = generation.cold_ms
            reply.is_fallback = generation.is_fallback
            first = False
        if delta.finish_reason is not None:
            reply.finish_reason = _finish_reason(delta)
            reply.usage.prompt_tokens = generation.prompt_tokens
            reply.usage.completion_tokens = completion_tokens
            reply.usage.cached_tokens = generation.cached_tokens
        yield reply


def _finish_reason(delta: Delta) -> str:
    return "length" if delta.finish_reason == "length" else "stop"


def _trailer(error: RequestError) -> bytes:
    return shard_pb2.Error(
        kind=error.kind,
        message=error.message,
        tensors=error.tensors,
        retry_after_ms=round(1000 * (error.retry_after_s or 0)),
    ).SerializeToString()
