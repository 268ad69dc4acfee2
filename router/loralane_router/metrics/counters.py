"""What the router counts for Prometheus, on a registry of its own. Gauges: `exposition`."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from loralane_router.metrics.usage import AdapterUsage

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """All metrics of one router. No label takes a value that a client can invent."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "loralane_requests", "Requests answered", ["surface", "status"], registry=r
        )
        self.steps = Counter("loralane_steps", "Steps of the shard, as heard of", registry=r)
        self.prompt_tokens = Counter("loralane_prompt_tokens", "Prompt tokens admitted", registry=r)
        self.prefix_cached_tokens = Counter(
            "loralane_prefix_cached_tokens",
            "Prompt tokens that shards had in their prefix caches",
            registry=r,
        )
        self.adapter_waits_ended = Counter(
            "loralane_adapter_waits_ended",
            "Requests whose adapter was not ready within max_wait_for_adapter_ms",
            ["policy"],
            registry=r,
        )
        self.generated_tokens = Counter("loralane_generated_tokens", "Tokens generated", registry=r)
        self.time_to_first_token = Histogram(
            "loralane_time_to_first_token_seconds",
            "From acceptance to the first token",
            buckets=_SECONDS,
            registry=r,
        )
        self.inter_token = Histogram(
            "loralane_inter_token_seconds",
            "Between the tokens of one request",
            buckets=_STEP_SECONDS,
            registry=r,
        )
        self.queue = Histogram(
            "loralane_queue_seconds",
            "From acceptance to admission",
            buckets=_SECONDS,
            registry=r,
        )
        self.adapter_cold = Histogram(
            "loralane_adapter_cold_seconds",
            "How long a row waited on the shard for its adapter, where it waited",
            buckets=_SECONDS,
            registry=r,
        )
        self.adapter_moves = Counter(
            "loralane_adapter_moves",
            "Adapters that came to a tier: to the device = loaded, elsewhere = evicted or unloaded",
            ["tier"],
            registry=r,
        )
        self.replays = Counter(
            "loralane_replays",
            "Requests whose shard went away, by what became of them",
            ["outcome"],
            registry=r,
        )
        #: What each adapter was used for; `exposition` writes it.
        self.usage = AdapterUsage()
