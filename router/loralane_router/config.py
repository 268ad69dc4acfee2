"""The router's settings: one frozen object, made once by the command line and passed on."""

from dataclasses import dataclass, field
from typing import Final, Literal

from loralane_router.queueing.weights import Weights

_PORTS: Final = range(65536)
_DNS: Final = "dns:"
_UNIX: Final = "unix:"


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How one router process runs. Raises ValueError for settings that cannot work."""

    #: `HOST:PORT`, `unix:PATH`, or `dns:NAME:PORT` for all addresses that a name has; all of these
    #: serve the same model.
    shards: tuple[str, ...]
    host: str = "127.0.0.1"
    #: REST; 0 = any free port.
    port: int = 8000
    #: `Inference` and `grpc.health.v1`; None = not served, 0 = any free port.
    grpc_port: int | None = None
    log_format: Literal["text", "json"] = "text"
    #: Most requests that wait while the shard has no free row; the next one is answered 429.
    max_queue: int = 1024
    #: Prompt tokens of requests that wait, from which on the next one is answered 429; None = no
    #: bound. About: the seconds that anybody may wait times the prompt tokens served in a second.
    max_queue_tokens: int | None = None
    #: What clients call the base model beside its own id; None = nothing else.
    served_model_name: str | None = None
    #: What adapters and API keys are due beside each other.
    weights: Weights = field(default_factory=Weights)

    def __post_init__(self) -> None:
        if not self.shards:
            raise ValueError("name a shard with --shard HOST:PORT")
        if len(set(self.shards)) < len(self.shards):
            raise ValueError(f"a shard is named twice: {', '.join(self.shards)}")
        for address in self.shards:
            _check_address(address)
        for name, number in (("port", self.port), ("grpc_port", self.grpc_port)):
            if number is not None and number not in _PORTS:
                raise ValueError(f"{name} must be between 0 and 65535, not {number}")
        if self.log_format not in ("text", "json"):
            raise ValueError(f"log_format must be text or json, not {self.log_format!r}")
        if self.max_queue < 0:
            raise ValueError(f"max_queue must be at least 0, not {self.max_queue}")
        if self.max_queue_tokens is not None and self.max_queue_tokens < 1:
            raise ValueError(f"max_queue_tokens must be at least 1, not {self.max_queue_tokens}")
        if self.served_model_name == "":
            raise ValueError("served_model_name must not be empty; leave it out instead")


def dns_name(address: str) -> tuple[str, int] | None:
    """Return (name, port) of `dns:NAME:PORT`, None for an address of one shard."""
    if not address.startswith(_DNS):
        return None
    name, _, port = address.removeprefix(_DNS).rpartition(":")
    return name, int(port)


def _check_address(address: str) -> None:
    is_dns = address.startswith(_DNS)
    host, _, port = address.removeprefix(_DNS).rpartition(":")
    # A slash is in paths and in URLs, such as http://HOST:PORT.
    is_place = bool(host) and "/" not in host and port.isdecimal() and int(port) in _PORTS
    is_path = address.startswith(_UNIX) and address != _UNIX
    if is_dns and not is_place:
        raise ValueError(f"shards that a name has are named dns:NAME:PORT, not {address!r}")
    if not (is_place or is_path):
        raise ValueError(f"a shard's address is HOST:PORT or unix:PATH, not {address!r}")
