"""The shard's settings: one frozen record, made once from the command line."""

import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from loralane_server.adapters.sources.references import S3_SCHEME, AdapterRoot, S3Root


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """Everything that a shard can be told. Raises `ValueError` naming the flag that is wrong."""

    #: Hub id or folder in Hugging Face format; None = the embedded demo.
    model: str | None = None
    #: Where the gRPC server listens: HOST:PORT (0 = a free one) or unix:PATH.
    listen: str = "127.0.0.1:8101"
    #: (name, reference) given with --adapter.
    adapters: tuple[tuple[str, str], ...] = ()
    #: Folders and prefixes of S3 buckets, in the order in which relative names are looked for.
    adapter_roots: tuple[AdapterRoot, ...] = ()
    #: Where downloads from S3 are kept; None = ~/.cache/loralane.
    adapter_cache: Path | None = None
    #: auto = xla where there is a TPU to use, else cpu.
    device: Literal["auto", "cpu", "xla"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    #: Devices that share one model; more than one only with XLA.
    tensor_parallel: int = 1
    #: None = what the model was made for, if its KV pages fit.
    max_model_len: int | None = None
    max_rows: int = 32
    #: Lanes of the pool; 0 = no adapters.
    lanes: int = 512
    #: Seconds without use after which an adapter is forgotten, unless it has its own; 0 = never.
    adapter_ttl: float = 0.0
    #: Aliases or references of adapters that are resident before the shard is ready.
    preload: tuple[str, ...] = ()
    #: The same, and never evicted.
    pin: tuple[str, ...] = ()
    #: Bytes of KV pages.
    kv_memory: int = 2 << 30
    #: Bytes of adapters kept in host memory.
    host_cache: int = 1 << 30
    #: Tokens computed in a step at most, streams first; a longer prompt takes several.
    step_tokens: int = 512
    #: Whether prompts that begin alike are computed once.
    prefix_cache: Literal["on", "off"] = "on"
    #: Threads of the device; None = one for each core.
    threads: int | None = None
    log_format: Literal["text", "json"] = "text"

    def __post_init__(self) -> None:
        self._check_numbers()
        for root in self.adapter_roots:
            if not isinstance(root, S3Root) and not root.is_dir():
                raise ValueError(f"--adapter-root {root}: there is no such folder")
        if self.uses_s3 and find_spec("boto3") is None:
            raise ValueError("adapters from s3:// need boto3: pip install 'loralane[s3]'")

    def _check_numbers(self) -> None:
        counts = ("max_rows", "kv_memory", "step_tokens", "max_model_len", "threads")
        for flag in (*counts, "tensor_parallel"):
            value = getattr(self, flag)
            if value is not None and value < 1:
                raise ValueError(f"--{flag.replace('_', '-')} must be at least 1")
        for flag in ("lanes", "host_cache"):
            if getattr(self, flag) < 0:
                raise ValueError(f"--{flag.replace('_', '-')} must not be negative")
        if not 0 <= self.adapter_ttl < math.inf:
            raise ValueError("--adapter-ttl must be a number of seconds, 0 = never")

    @property
    def uses_s3(self) -> bool:
        """Whether an adapter may come from S3."""
        aliased = any(reference.startswith(S3_SCHEME) for _, reference in self.adapters)
        return aliased or any(isinstance(root, S3Root) for root in self.adapter_roots)
