"""The base's own weights by linear, for adapters that are defined relative to them.

The device packs weights into layouts of its own, so they are read again from the checkpoint's
files, and only what is asked for.
"""

import threading
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loralane_server.adapters.formats.base_shape import EMBED, FUSED, HEAD, module_name
from loralane_server.device.seam import ENDS
from loralane_server.errors import ModelUnsupported, SourceUnavailable
from loralane_server.model.spec import ModelSpec
from loralane_server.model.weights import weight_files

_TABLES: Final = frozenset({EMBED, HEAD})


class BaseWeights:
    """Weights and biases of single linears, from any thread.

    float32, rounded to `dtype` first: as the shard computes with them. The checkpoint is opened at
    the first question and stays open, mapped; its pages are the kernel's to drop.
    """

    def __init__(self, folder: Path, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._folder = folder
        self._spec = spec
        self._dtype = dtype
        self._lock = threading.Lock()
        #: Guarded by the lock: the file that holds a tensor; empty = not opened yet.
        self._file_of: dict[str, safe_open] = {}

    def weight(self, layer: int, module: str, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of a linear's weight [out, in], or of a table [vocab, hidden].

        `layer` is `ENDS` for `embed_tokens` and `lm_head`.

        Raises:
            SourceUnavailable: the checkpoint cannot be read any more.
        """
        name, first = self._find(layer, module, "weight")
        return self._read(name, first + begin, first + end)

    def bias(self, layer: int, module: str) -> Tensor | None:
        """A linear's bias [out], or None where it has none; raises as `weight`."""
        name, first = self._find(layer, module, "bias")
        if name not in self._files():
            return None
        return self._read(name, first, first + self._rows(module))

    def _rows(self, module: str) -> int:
        return self._spec.vocab if module in _TABLES else self._spec.linears()[module][0]

    def _find(self, layer: int, module: str, kind: str) -> tuple[str, int]:
        """The tensor that holds it, and the first of its rows there."""
        if layer == ENDS and module == HEAD and self._spec.tied_head:
            module = EMBED
        own = f"{module_name(layer, module)}.{kind}"
        files = self._files()
        for fused, parts in FUSED.items():
            if module in parts and own not in files:
                before = parts[: parts.index(module)]
                return f"{module_name(layer, fused)}.{kind}", sum(map(self._rows, before))
        return own, 0

    def _read(self, name: str, begin: int, end: int) -> Tensor:
        try:
            rows: Tensor = self._files()[name].get_slice(name)[begin:end]
        except KeyError as exc:
            raise SourceUnavailable(f"the base's weights hold no {name}") from exc
        except (SafetensorError, OSError) as exc:
            raise SourceUnavailable(f"the base's {name} cannot be read") from exc
        return rows.to(self._dtype).to(torch.float32)

    def _files(self) -> dict[str, safe_open]:
        with self._lock:
            if not self._file_of:
                self._file_of = _opened(self._folder)
            return self._file_of


def _opened(folder: Path) -> dict[str, safe_open]:
    file_of: dict[str, safe_open] = {}
    try:
        for path in weight_files(folder):
            file = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 - not a mapping, only has keys()
                file_of[name] = file
    except (SafetensorError, OSError, ModelUnsupported) as exc:
        raise SourceUnavailable(f"the base's weights in {folder.name} cannot be read") from exc
    return file_of
