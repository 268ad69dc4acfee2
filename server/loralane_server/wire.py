"""Between the wire's messages and the engine's records: field by field, no decisions."""

from loralane_proto import shard_pb2 as pb

from loralane_server.adapters.merging.merging import Recipe, recipe_of
from loralane_server.adapters.pool import lanes_for
from loralane_server.adapters.store.entries import AdapterSummary
from loralane_server.device.seam import Sampling
from loralane_server.kv.pages import PAGE_TOKENS
from loralane_server.rows import Admission, Capacity, Finish, Residency, RowEvent, StepEvent
from loralane_server.usage import LoadTimes

_FINISH = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    Finish.LENGTH: pb.FINISH_REASON_LENGTH,
    Finish.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    Finish.CANCELLED: pb.FINISH_REASON_CANCELLED,
    Finish.ERROR: pb.FINISH_REASON_ERROR,
}
_TIER = {"device": pb.TIER_DEVICE, "host": pb.TIER_HOST, "disk": pb.TIER_DISK}
#: As many alternatives as the wire allows a token.
MAX_TOP_LOGPROBS = 20


def read_admission(message: pb.Admission) -> Admission:
    """Return the engine's form of an admission."""
    wants_logprobs = message.want_logprobs or message.top_logprobs
    return Admission(
        request_id=message.request_id,
        digest=message.digest,
        prompt=tuple(message.prompt),
        max_tokens=message.max_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        sampling=Sampling(
            temperature=message.sampling.temperature,
            top_k=message.sampling.top_k,
            top_p=message.sampling.top_p,
            seed=message.sampling.seed,
            logit_bias=tuple(message.sampling.logit_bias.items()),
        ),
        logprobs=min(message.top_logprobs, MAX_TOP_LOGPROBS) if wants_logprobs else None,
    )


def read_recipe(message: pb.Merge) -> Recipe:
    """Return how a merge's members become one. Raises `InvalidRequest` as `recipe_of`."""
    weights = [member.weight for member in message.members]
    return recipe_of(message.strategy, weights, message.density, message.majority_sign)


def write_step(event: StepEvent) -> pb.StepReply:
    """Return the message of one step."""
    return pb.StepReply(
        step=event.step,
        rows=[_write_row(row) for row in event.rows],
        residency=[_write_residency(change) for change in event.residency],
        capacity=write_capacity(event.capacity),
        admitted=event.admitted,
    )


def write_capacity(capacity: Capacity) -> pb.Capacity:
    """Return the message of what a shard can still take."""
    return pb.Capacity(
        rows_total=capacity.rows_total,
        rows_free=capacity.rows_free,
        pages_total=capacity.pages_total,
        pages_free=capacity.pages_free,
        page_tokens=PAGE_TOKENS,
        lanes_total=capacity.lanes_total,
        lanes_free=capacity.lanes_free,
        lanes_in_use=capacity.lanes_in_use,
        pages_cached=capacity.pages_cached,
        pending_tokens=capacity.pending_tokens,
        step_ms=capacity.step_ms,
        token_ms=capacity.token_ms,
        graphs_declared=capacity.graphs_declared,
        graphs_compiled=capacity.graphs_compiled,
    )


def write_facts(summary: AdapterSummary) -> pb.Adapter:
    """Return the message of what is true of an adapter wherever it is."""
    return pb.Adapter(
        digest=summary.digest,
        reference=summary.reference,
        rank=summary.rank,
        lanes=lanes_for(summary.rank),
        bytes=summary.bytes,
        targets=summary.targets,
        modules=summary.modules,
    )


def write_times(times: LoadTimes) -> pb.LoadTimes:
    """Return the message of where a load's time went."""
    return pb.LoadTimes(
        open_ms=times.open_ms,
        read_ms=times.read_ms,
        cast_ms=times.cast_ms,
        write_ms=times.write_ms,
        wait_ms=times.wait_ms,
    )


def _write_row(row: RowEvent) -> pb.Row:
    tokens = [
        pb.Token(
            id=token.id,
            logprob=token.logprob,
            top=[pb.TopLogprob(id=i, logprob=value) for i, value in token.top],
        )
        for token in row.tokens
    ]
    return pb.Row(
        request_id=row.request_id,
        tokens=tokens,
        finish_reason=_FINISH[row.finish],
        error=None if row.error is None else row.error.to_proto(),
        cold_ms=row.cold_ms,
        cached_tokens=row.cached_tokens,
    )


def _write_residency(change: Residency) -> pb.Residency:
    return pb.Residency(digest=change.digest, tier=_TIER[change.tier], lanes=change.lanes)
