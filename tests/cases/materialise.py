"""Adapters of a case file, as the files that a trainer would have left."""

import json
import os
import pickle
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tests.cases.tensors import SHAPES, NotUnderstood, Tensors, expand, safetensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_KNOWN: Final = frozenset(
    "config config_text tensors files shards index index_extra subdir weights_name "
    "symlink_dir".split()
)
_TEMPLATE: Final = "base_model.model.model.layers.{layer}.{block}.{module}.lora_{ab}.weight"
_SIZE_SIGNS: Final = {"-1": -1, "+1": 1}


@dataclass(frozen=True)
class Adapter:
    """One adapter of a case: its files, and what the oracle needs of them."""

    config: Mapping[str, Any]
    tensors: Tensors
    files: Mapping[str, bytes]
    subfolder: str = ""
    #: File name -> where its symbolic link leads; "" = the adapter's folder itself.
    links: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write all files below a folder, which is replaced file by file."""
        if "" in self.links:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.symlink_to(self.links[""])
            return
        place = folder / self.subfolder
        place.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (place / name).write_bytes(content)
        for name, target in self.links.items():
            (place / name).unlink(missing_ok=True)
            (place / name).symlink_to(target)

    def below(self, tmp: str) -> "Adapter":
        """Return the same with `$TMP` replaced wherever it stands."""
        files = {name: raw.replace(b"$TMP", tmp.encode()) for name, raw in self.files.items()}
        links = {name: target.replace("$TMP", tmp) for name, target in self.links.items()}
        return replace(self, files=files, links=links)


def default_adapter(seed: int) -> Adapter:
    """What case files call `a<seed>`: rank 4, alpha 8, on q and v of both layers."""
    return _plain_adapter(("q_proj", "v_proj"), rank=4, alpha=8, seed=seed, dtype="F32")


def large_adapter(size: int) -> Adapter:
    """A well-formed adapter of at least `size` bytes. Raises NotUnderstood above 4 MiB."""
    adapter = _plain_adapter(tuple(SHAPES), rank=256, alpha=256, seed=1, dtype="F64")
    if len(adapter.files[WEIGHTS]) < size:
        raise NotUnderstood(f"adapter of {size} bytes")
    return adapter


def _plain_adapter(
    modules: Sequence[str], *, rank: int, alpha: int, seed: int, dtype: str
) -> Adapter:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-llama",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(modules),
        "bias": "none",
        "inference_mode": True,
    }
    macro = {
        "modules": modules,
        "layers": [0, 1],
        "r": rank,
        "seed": seed,
        "dtype": dtype,
        "key_template": _TEMPLATE,
    }
    return read_adapter({"config": config, "tensors": [{"lora": macro}]})


def read_adapter(entry: Mapping[str, Any]) -> Adapter:
    """Turn one entry of `setup.adapters` into files. Raises NotUnderstood."""
    if unknown := entry.keys() - _KNOWN:
        raise NotUnderstood(f"adapter field {sorted(unknown)}")
    files: dict[str, bytes] = {}
    if "config_text" in entry:
        files[CONFIG] = entry["config_text"].encode()
    elif "config" in entry:
        files[CONFIG] = json.dumps(entry["config"]).encode()
    tensors = expand(entry.get("tensors", ()))
    weights = entry.get("weights_name", WEIGHTS)
    if "tensors" in entry:
        files[weights] = safetensors(tensors)
    if "index" in entry:
        tensors |= _shards(entry, files)
    links = {"": entry["symlink_dir"]} if "symlink_dir" in entry else {}
    for name, content in entry.get("files", {}).items():
        if "symlink" in content:
            links[name] = content["symlink"]
        else:
            files[name] = _content(content, files.get(weights, b""))
    return Adapter(_config(files), tensors, files, entry.get("subdir", ""), links)


def _config(files: Mapping[str, bytes]) -> Mapping[str, Any]:
    """The config as a lenient reader sees it; {} where it is none."""
    try:
        config = json.loads(files.get(CONFIG, b"{}").removeprefix(b"\xef\xbb\xbf"))
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


def _shards(entry: Mapping[str, Any], files: dict[str, bytes]) -> Tensors:
    every: Tensors = {}
    weight_map: dict[str, str] = {}
    for name, entries in entry.get("shards", {}).items():
        tensors = expand(entries)
        files[name] = safetensors(tensors)
        weight_map |= dict.fromkeys(tensors, name)
        every |= tensors
    weight_map |= entry.get("index_extra", {})
    files[entry["index"]] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return every


class _Marker:
    """Runs a harmless command when it is unpickled, which nobody may do."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self._command,)


def _content(content: Mapping[str, Any], weights: bytes) -> bytes:
    if "text" in content:
        text = content["text"]
        return text.encode() if isinstance(text, str) else json.dumps(text).encode()
    if "pickle_marker" in content:
        # Protocol 0 has no lengths, so that `$TMP` can be replaced in its bytes.
        return pickle.dumps(_Marker(content["pickle_marker"]), protocol=0)
    if "truncate_to" in content:
        return _resized(weights, content["truncate_to"])
    if "raw" in content:
        return _raw(content["raw"])
    raise NotUnderstood(f"file content {sorted(content)}")


def _resized(weights: bytes, size: int | str) -> bytes:
    if isinstance(size, int):
        return weights[:size]
    if size.endswith("%"):
        return weights[: len(weights) * int(size[:-1]) // 100]
    change = _SIZE_SIGNS.get(size[:1] + "1", 0) * int(size.lstrip("+-"))
    if change == 0:
        raise NotUnderstood(f"truncate_to {size!r}")
    return weights[:change] if change < 0 else weights + bytes(change)


def _raw(raw: Mapping[str, Any]) -> bytes:
    """8 bytes of length, a header, zeros."""
    known = {"header", "header_hex", "header_text", "header_text_repeat", "header_len"}
    if unknown := raw.keys() - known - {"body_zeros"}:
        raise NotUnderstood(f"raw file with {sorted(unknown)}")
    if "header" in raw:
        header = json.dumps(raw["header"]).encode()
    elif "header_hex" in raw:
        header = bytes.fromhex(raw["header_hex"])
    elif "header_text_repeat" in raw:
        text, times = raw["header_text_repeat"]
        header = (text * times).encode()
    else:
        header = raw["header_text"].encode()
    length = struct.pack("<Q", raw.get("header_len", len(header)))
    return length + header + bytes(raw.get("body_zeros", 0))
