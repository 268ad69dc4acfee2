"""One line of a case file, and the adapters that it is about."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.cases.materialise import Adapter, default_adapter, read_adapter
from tests.cases.tensors import NotUnderstood

_SETUP = frozenset(
    "base adapters server hub hub_cache cwd_dirs outside offline cache_fs scripted_output "
    "scripted_output_hex scripted_output_ids faults max_positions generation_config chat_template "
    "note".split()
)
_DEFAULT = re.compile(r"a(\d+)")
_CASE = frozenset("id title source_url see_also kind setup request expected hold_out note".split())


@dataclass(frozen=True)
class Case:
    """One case as it stands in the file."""

    id: str
    kind: str
    setup: Mapping[str, Any]
    request: tuple[dict[str, Any], ...]
    expected: Any
    note: str

    @cached_property
    def adapters(self) -> dict[str, Adapter]:
        """The adapters of the setup. Raises NotUnderstood."""
        found = {}
        for name, entry in self.setup.get("adapters", {}).items():
            default = _DEFAULT.fullmatch(entry) if isinstance(entry, str) else None
            if default is None and not isinstance(entry, Mapping):
                raise NotUnderstood(f"adapter {entry!r}")
            found[name] = default_adapter(int(default[1])) if default else read_adapter(entry)
        return found

    @property
    def max_rank(self) -> int:
        """The largest rank among its adapters."""
        ranks = [a.config.get("r", 8) for a in self.adapters.values()]
        return max([8, *(r for r in ranks if isinstance(r, int))])

    def named(self, name: str) -> Adapter:
        """Return what the case calls `name`, e.g. an adapter of its own, or `a1`."""
        if name in self.adapters:
            return self.adapters[name]
        if isinstance(self.setup.get(name), Mapping):
            return read_adapter(self.setup[name])
        default = _DEFAULT.fullmatch(name)
        if default is None:
            raise NotUnderstood(f"adapter {name!r}")
        return default_adapter(int(default[1]))

    def check(self) -> None:
        """Raise NotUnderstood for a part of the setup that no code here reads."""
        own = {k for k, v in self.setup.items() if isinstance(v, dict) and "tensors" in v}
        if unknown := self.setup.keys() - _SETUP - own:
            raise NotUnderstood(f"setup {sorted(unknown)}")


def read_cases(path: Path) -> list[Case]:
    """Return all cases of a file. Raises NotUnderstood for a field of no meaning here."""
    return [_case(json.loads(line)) for line in path.read_text().splitlines() if line.strip()]


def _case(line: Mapping[str, Any]) -> Case:
    if unknown := line.keys() - _CASE:
        raise NotUnderstood(f"case field {sorted(unknown)}")
    request = line["request"]
    return Case(
        id=line["id"],
        kind=line["kind"],
        setup=line["setup"],
        request=tuple(request if isinstance(request, list) else [request]),
        expected=line["expected"],
        note=line.get("note") or "",
    )
