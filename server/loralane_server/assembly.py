"""Puts a shard together: from its settings to a running engine with everything it owns."""

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Final

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from loralane_server.adapters.formats.base_shape import BaseShape
from loralane_server.adapters.pool import LANE_PAGE, AdapterPool
from loralane_server.adapters.sources.s3_source import S3Settings
from loralane_server.adapters.store.store import AdapterStore
from loralane_server.backends import (
    ABILITIES,
    DTYPES,
    Plan,
    choose_device,
    choose_dtype,
    open_backend,
    page_numbers,
)
from loralane_server.config import ShardConfig
from loralane_server.device.threads import use_threads
from loralane_server.engine import Engine
from loralane_server.errors import ModelUnsupported
from loralane_server.kv.pages import PAGE_TOKENS, PageTable, pages_for
from loralane_server.limits import Limits
from loralane_server.model.base_weights import BaseWeights
from loralane_server.model.spec import ModelSpec, read_model_spec
from loralane_server.model.weights import has_bias
from loralane_server.scheduling.planner import ATTENTION_COST
from loralane_server.service import ShardFacts

log = logging.getLogger(__name__)

DEMO: Final = Path(__file__).parent / "demo"
_MODEL_FILES: Final = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class Model:
    """A base model's folder and what is in it."""

    model_id: str
    folder: Path
    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class Shard:
    """A running engine and what the service says about it."""

    engine: Engine
    store: AdapterStore
    facts: ShardFacts


def find_model(model: str | None) -> Model:
    """Return the base model: the embedded demo, a folder, or a hub id (downloaded with progress).

    Raises `ModelUnsupported` if there is none, or if it cannot be served exactly.
    """
    if model is None:
        return Model("loralane-demo", DEMO / "model", read_model_spec(DEMO / "model"))
    folder = Path(model).expanduser()
    if folder.is_dir():
        spec = read_model_spec(folder)
        if not (folder / "tokenizer.json").is_file():
            raise ModelUnsupported(f"{folder} holds no tokenizer.json; save the tokenizer with it")
        return Model(folder.resolve().name, folder, spec)
    if model.startswith(("/", ".", "~")):
        raise ModelUnsupported(f"there is no folder {model}")
    try:
        found = Path(snapshot_download(model, allow_patterns=list(_MODEL_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError) as exc:
        raise ModelUnsupported(
            f"{model} is neither a folder nor a model on the hub: {exc}"
        ) from exc
    return Model(model, found, read_model_spec(found))


def aliases_of(config: ShardConfig) -> dict[str, str]:
    """Return the aliases: those given, and the demo's adapters when the demo is served."""
    given = dict(config.adapters)
    if config.model is not None:
        return given
    demo = {path.name: str(path) for path in sorted((DEMO / "adapters").iterdir())}
    return demo | given


def base_shape(spec: ModelSpec, dtype: str) -> BaseShape:
    """Return what adapters are checked against."""
    linears = spec.linears()
    return BaseShape(
        layers=spec.layers,
        modules=tuple((name, out, in_) for name, (out, in_) in linears.items()),
        dtype=dtype,
        vocab=spec.vocab,
        hidden=spec.hidden,
        tied_head=spec.tied_head,
        biased=frozenset(name for name in linears if has_bias(spec, name)),
    )


def open_store(config: ShardConfig, model: Model) -> AdapterStore:
    """Return the adapter store of a base model."""
    dtype = choose_dtype(config, model.spec)
    base = replace(base_shape(model.spec, dtype), abilities=ABILITIES[choose_device(config)])
    return AdapterStore(
        base,
        dtype=DTYPES[dtype],
        aliases=aliases_of(config),
        roots=config.adapter_roots,
        s3=S3Settings(config.adapter_cache),
        host_cache_bytes=config.host_cache,
        base_name=model.model_id,
        max_rank=config.lanes // LANE_PAGE * LANE_PAGE,
        base_weights=BaseWeights(model.folder, model.spec, DTYPES[dtype]),
    )


def assemble(config: ShardConfig) -> Shard:
    """Load the model and start its engine. Raises `ModelUnsupported`."""
    model = find_model(config.model)
    spec = model.spec
    use_threads(1)  # this thread only reads and packs weights
    dtype = choose_dtype(config, spec)
    max_len, pages = plan_memory(config, spec, DTYPES[dtype])
    log.info(
        "%s (%s) in %s, up to %d tokens a row", model.model_id, spec.architecture, dtype, max_len
    )
    backend = open_backend(Plan(model.folder, spec, DTYPES[dtype], max_len, pages, config))
    store = open_store(config, model)
    engine = Engine(
        backend.runner,
        backend.lanes,
        store,
        pool=AdapterPool(config.lanes),
        pages=PageTable(pages),
        limits=Limits(
            config.max_rows,
            max_len,
            spec.vocab,
            config.step_tokens,
            doubling=doubling(backend.name, spec),
        ),
        # XLA has threads of its own, and torch's would spin over every transfer of some size.
        threads=1 if backend.name == "xla" else config.threads or os.cpu_count() or 1,
        prefix_cache=config.prefix_cache == "on",
        adapter_ttl=config.adapter_ttl,
    )
    engine.start()
    facts = ShardFacts(
        model_id=model.model_id,
        architecture=spec.architecture,
        dtype=dtype,
        device=backend.name,
        vocab_size=spec.vocab,
        max_model_len=max_len,
        eos_token_ids=spec.eos_token_ids,
        version=version("loralane"),
        aliases=tuple(aliases_of(config).items()),
        tokenizer_files=tuple(_read_files(model.folder, _TOKENIZER_FILES)),
    )
    return Shard(engine, store, facts)


def doubling(device: str, spec: ModelSpec) -> int | None:
    """Return the depth at which a token costs twice as much; see `Limits`.

    On XLA chunks are padded to a bucket: smaller ones would cost no less.
    """
    return None if device == "xla" else max(1, spec.balance // ATTENTION_COST)


def plan_memory(config: ShardConfig, spec: ModelSpec, dtype: torch.dtype) -> tuple[int, int]:
    """Return the longest sequence and the number of KV pages.

    Without --max-model-len the length is what the model was made for, cut to what the KV memory
    holds. Raises `ModelUnsupported` when a length that was asked for does not fit.
    """
    page_bytes = spec.layers * page_numbers(config, spec) * dtype.itemsize
    pages = config.kv_memory // page_bytes
    wanted = config.max_model_len or spec.max_positions
    if wanted > spec.max_positions:
        raise ModelUnsupported(
            f"--max-model-len {wanted}: the model was made for at most {spec.max_positions} tokens"
        )
    fits = pages * PAGE_TOKENS
    if fits < wanted and (config.max_model_len or fits == 0):
        need = pages_for(wanted) * page_bytes
        raise ModelUnsupported(
            f"--kv-memory {config.kv_memory} holds {fits} tokens; one row of {wanted} tokens needs "
            f"{need} bytes: raise --kv-memory or lower --max-model-len"
        )
    length = min(wanted, fits)
    return length, min(pages, config.max_rows * pages_for(length))


def _read_files(folder: Path, names: Iterable[str]) -> Iterable[tuple[str, bytes]]:
    for name in names:
        path = folder / name
        if path.is_file():
            yield name, path.read_bytes()
