"""The shard's settings: one frozen record, made once from the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """Everything that a shard can be told. Raises `ValueError` naming the flag that is wrong."""

    #: Hub id or folder in Hugging Face format; None = the embedded demo.
    model: str | None = None
    #: Where the gRPC server listens; port 0 = a free one.
    listen: str = "127.0.0.1:8101"
    #: (name, reference) given with --adapter.
    adapters: tuple[tuple[str, str], ...] = ()
    adapter_roots: tuple[Path, ...] = ()
    device: Literal["auto", "cpu"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    #: None = what the model was made for, if its KV pages fit.
    max_model_len: int | None = None
    max_rows: int = 32
    #: Lanes of the pool; 0 = no adapters.
    lanes: int = 512
    #: Bytes of KV pages.
    kv_memory: int = 2 << 30
    #: Bytes of adapters kept in host memory.
    host_cache: int = 1 << 30
    #: Tokens computed in a step at most; a longer prompt takes several.
    step_tokens: int = 512
    #: Threads of the device; None = one for each core.
    threads: int | None = None
    log_format: Literal["text", "json"] = "text"

    def __post_init__(self) -> None:
        for flag in ("max_rows", "kv_memory", "step_tokens"):
            if getattr(self, flag) < 1:
                raise ValueError(f"--{flag.replace('_', '-')} must be at least 1")
        for flag in ("lanes", "host_cache"):
            if getattr(self, flag) < 0:
                raise ValueError(f"--{flag.replace('_', '-')} must not be negative")
        missing = [str(root) for root in self.adapter_roots if not root.is_dir()]
        if missing:
            raise ValueError(f"--adapter-root {missing[0]}: there is no such folder")
        for flag in ("max_model_len", "threads"):
            value = getattr(self, flag)
            if value is not None and value < 1:
                raise ValueError(f"--{flag.replace('_', '-')} must be at least 1")
