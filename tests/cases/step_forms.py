"""What steps may say, and what they do with nested steps and with files."""

import copy
import shutil
from pathlib import Path
from typing import Any, Final

Step = dict[str, Any]

#: What each step may say beside `op` and `id`; those that are sent as they are check themselves.
KEYS: Final[dict[str, frozenset[str]]] = {
    "http": frozenset(
        "method path json raw_body raw_hex headers disconnect_after_events "
        "disconnect_after_s".split()
    ),
    "http_slowloris": frozenset({"path", "hold_s"}),
    "load": frozenset({"adapter", "name", "api_token", "pin"}),
    "unload": frozenset({"adapter"}),
    "parallel": frozenset({"times", "do", "steps", "for_each_adapter"}),
    "async": frozenset({"do", "steps"}),
    "background": frozenset({"do", "steps", "for_s", "concurrency"}),
    "repeat": frozenset({"times", "do", "steps"}),
    "for_each": frozenset({"values", "do", "steps"}),
    "for_each_adapter": frozenset({"do", "steps"}),
    "sleep": frozenset({"s"}),
    "wait": frozenset({"until", "timeout_s"}),
    "rm": frozenset({"path"}),
    "copy": frozenset({"from", "to"}),
    "mark": frozenset({"metric"}),
}


def remove(path: Path) -> None:
    """Delete a file or a folder with all that is in it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def overwrite(source: Path, target: Path) -> None:
    """Replace a folder's files by another's of the same names, each at once."""
    for file in source.iterdir():
        fresh = target / f".{file.name}.new"
        shutil.copyfile(file, fresh)
        fresh.replace(target / file.name)


def inner(step: Step) -> list[Step]:
    """Return the steps inside a step."""
    given: Any = step.get("do", step.get("steps"))
    steps = given if isinstance(given, list) else [given]
    return [copy.copy(one) for one in steps]


def replaced(value: Any, old: str, new: str) -> Any:
    """Return a JSON value with a text replaced wherever it stands."""
    if isinstance(value, dict):
        return {key: replaced(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [replaced(item, old, new) for item in value]
    return value.replace(old, new) if isinstance(value, str) else value
