"""What the router exports to Prometheus, on a registry of its own."""

from loralane_proto import shard_pb2 as pb
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from loralane_router.usage import AdapterUsage

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
        self.waiting = Gauge("loralane_requests_waiting", "Requests in queues", registry=r)
        self.running = Gauge("loralane_requests_running", "Requests on the shard", registry=r)
        self.rows_free = Gauge("loralane_rows_free", "Free rows of the shard", registry=r)
        self.rows_total = Gauge("loralane_rows", "Rows of the shard", registry=r)
        self.pages_free = Gauge("loralane_pages_free", "Free KV pages of the shard", registry=r)
        self.pages_total = Gauge("loralane_pages", "KV pages of the shard", registry=r)
        self.lanes_free = Gauge("loralane_lanes_free", "Lanes owned by no adapter", registry=r)
        self.lanes_in_use = Gauge(
            "loralane_lanes_in_use",
            "Lanes of adapters that rows use or that are pinned",
            registry=r,
        )
        self.lanes_total = Gauge("loralane_lanes", "Lanes of the pool", registry=r)
        self.steps = Counter("loralane_steps", "Steps of the shard, as heard of", registry=r)
        self.prompt_tokens = Counter("loralane_prompt_tokens", "Prompt tokens admitted", registry=r)
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
        self.shard_up = Gauge("loralane_shard_up", "1 while the shard answers", registry=r)
        #: What each adapter was used for; `exposition` writes it.
        self.usage = AdapterUsage()

    def report(self, capacity: pb.Capacity, waiting: int, running: int) -> None:
        """Set the gauges of one moment."""
        self.waiting.set(waiting)
        self.running.set(running)
        self.rows_free.set(capacity.rows_free)
        self.rows_total.set(capacity.rows_total)
        self.pages_free.set(capacity.pages_free)
        self.pages_total.set(capacity.pages_total)
        self.lanes_free.set(capacity.lanes_free)
        self.lanes_in_use.set(capacity.lanes_in_use)
        self.lanes_total.set(capacity.lanes_total)
