"""The router's settings: one frozen object, made once by the command line and passed on."""

from dataclasses import dataclass
from typing import Final, Literal

_PORTS: Final = range(65536)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How one router process runs. Raises ValueError for settings that cannot work."""

    #: `HOST:PORT` of the shards behind this router; exactly one for now.
    shards: tuple[str, ...]
    host: str = "127.0.0.1"
    #: REST; 0 = any free port.
    port: int = 8000
    #: `Inference` and `grpc.health.v1`; None = not served, 0 = any free port.
    grpc_port: int | None = None
    log_format: Literal["text", "json"] = "text"
    #: Most requests that wait while the shard has no free row; the next one is answered 429.
    max_queue: int = 1024
    #: What clients call the base model beside its own id; None = nothing else.
    served_model_name: str | None = None

    def __post_init__(self) -> None:
        if len(self.shards) != 1:
            raise ValueError(f"name exactly one shard with --shard HOST:PORT, not {self.shards!r}")
        for address in self.shards:
            host, _, port = address.rpartition(":")
            is_port = port.isdecimal() and int(port) in _PORTS
            if not host or not (is_port or host == "unix"):
                raise ValueError(f"a shard's address is HOST:PORT or unix:PATH, not {address!r}")
        for field, number in (("port", self.port), ("grpc_port", self.grpc_port)):
            if number is not None and number not in _PORTS:
                raise ValueError(f"{field} must be between 0 and 65535, not {number}")
        if self.log_format not in ("text", "json"):
            raise ValueError(f"log_format must be text or json, not {self.log_format!r}")
        if self.max_queue < 0:
            raise ValueError(f"max_queue must be at least 0, not {self.max_queue}")
        if self.served_model_name == "":
            raise ValueError("served_model_name must not be empty; leave it out instead")
