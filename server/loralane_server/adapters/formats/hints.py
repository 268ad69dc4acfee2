"""What looks odd about an adapter and does not change how it is served: worth a line in the log.

Names of base models and lists of targets are only hints (the tensors decide), so nothing here
refuses. But whoever wonders about an adapter's answers should find them told.
"""

import json
from typing import Any

from loralane_server.adapters.formats.base_shape import parts_of
from loralane_server.adapters.formats.index import AdapterIndex


def oddities(config: bytes, index: AdapterIndex, base_name: str) -> list[str]:
    """Return one sentence for each thing; `config` is an adapter_config.json that was accepted.

    `base_name` is the served model's id or folder; "" = unknown.
    """
    fields: dict[str, Any] = json.loads(config)
    found = [_other_base(fields, base_name), _other_targets(fields, index)]
    return [sentence for sentence in found if sentence]


def _other_base(fields: dict[str, Any], base_name: str) -> str:
    trained_on = fields.get("base_model_name_or_path")
    if not isinstance(trained_on, str) or not trained_on or not base_name:
        return ""
    if _last(trained_on) == _last(base_name):
        return ""
    return f"was trained on {_show(trained_on)}, is served on {_show(base_name)}; its shapes fit"


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def _other_targets(fields: dict[str, Any], index: AdapterIndex) -> str:
    """Lists only: an expression of a client is never run."""
    listed = fields.get("target_modules")
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        return ""
    names = {part for name in listed for part in parts_of(name.rpartition(".")[2])}
    found = {module for (_, module), target in index.targets.items() if target.a is not None}
    more = sorted(found - names)
    if not more or "all-linear" in names:
        return ""
    return f"has tensors for {', '.join(more)}, which target_modules does not name; they are used"


def _show(name: str) -> str:
    return ascii(name[:120])
