"""Shapes of JSON as case files write them: `a.b[*].{x,y}`, "array of 1", "str|null"."""

import re
from typing import Any, Final

from tests.cases.tensors import NotUnderstood

_TYPES: Final[dict[str, type | tuple[type, ...]]] = {
    "string": str,
    "str": str,
    "int": int,
    "number": (int, float),
    "array": list,
    "object": dict,
    "null": type(None),
    "bool": bool,
}
_PART: Final = re.compile(r"\{([^}]*)\}|\[(\*|\d+)\]|\.?([^.\[{]+)|\.")


def missing(value: Any, path: str) -> list[str]:
    """Return the parts of `path` that a value lacks; `{x,y}` asks for both, `[*]` for all items."""
    return _missing(value, _parts(path), path)


def _parts(path: str) -> list[tuple[str, str]]:
    """Split into ("keys", "x,y"), ("item", "*" or a number) and ("key", name)."""
    found = []
    for match in _PART.finditer(path):
        for kind, text in zip(("keys", "item", "key"), match.groups(), strict=True):
            if text is not None:
                found.append((kind, text))
    return found


def _missing(value: Any, parts: list[tuple[str, str]], path: str) -> list[str]:
    if not parts:
        return []
    (kind, text), rest = parts[0], parts[1:]
    if kind == "keys":
        keys = [key.strip() for key in text.split(",")]
        return [f"{path}: {key}" for key in keys if not _has(value, key)]
    if kind == "item":
        items = _items(value, text)
        if not items:
            return [f"{path}: no items"]
        return [lack for item in items for lack in _missing(item, rest, path)]
    return _missing(value[text], rest, path) if _has(value, text) else [path]


def _has(value: Any, key: str) -> bool:
    return isinstance(value, dict) and key in value


def _items(value: Any, which: str) -> list[Any]:
    if not isinstance(value, list):
        return []
    return value if which == "*" else value[int(which) : int(which) + 1]


def pick(value: Any, path: str) -> list[Any]:
    """Return what a path leads to, [] where it leads nowhere; `$` is the value itself."""
    found = [value]
    for kind, text in _parts(path.removeprefix("$")):
        if kind == "item":
            found = [item for one in found for item in _items(one, text)]
        else:
            found = [one[text] for one in found if _has(one, text)]
    return found


def mismatch(value: Any, shape: Any) -> str | None:
    """Return how a value differs from a shape: nested objects, type names, or literal values."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"no object: {str(value)[:80]}"
        wrong = {key: mismatch(value.get(key), inner) for key, inner in shape.items()}
        return next((f"{key}: {what}" for key, what in wrong.items() if what), None)
    if not isinstance(shape, str):
        return None if value == shape else f"{value!r}, not {shape!r}"
    return None if _fits(value, shape) else f"{str(value)[:80]!r} is not {shape!r}"


def _fits(value: Any, shape: str) -> bool:
    counted = re.fullmatch(r"array of (\d+)", shape)
    if counted:
        return isinstance(value, list) and len(value) == int(counted[1])
    if "," in shape:
        return all(_has(value, key) for key in shape.split(","))
    if shape == "object or 1-array":
        return isinstance(value, dict) or (isinstance(value, list) and len(value) == 1)
    options = shape.split("|")
    known = [_TYPES[option] for option in options if option in _TYPES]
    if any(isinstance(value, kind) and not _is_odd(value, kind) for kind in known):
        return True
    if len(options) == 1 and not known and " " in shape:
        raise NotUnderstood(f"shape {shape!r}")
    return value in options


def _is_odd(value: Any, kind: Any) -> bool:
    return isinstance(value, bool) and kind is int
