"""Fields of `adapter_config.json`, read one at a time: of the right type and bounded, or refused.

Each reader takes the field's name, so that what it raises says which field is wrong.
"""

import json
import reprlib
from collections.abc import Callable
from typing import Any, Final, TypeVar

from loralane_server.errors import AdapterCorrupt, AdapterIncompatible, AdapterTooLarge

CONFIG_FILE: Final = "adapter_config.json"
MAX_CONFIG_BYTES: Final = 1 << 20
#: Above this a config is not believed: no base model is that wide.
_MAX_CONFIG_RANK: Final = 1 << 16
#: Of trained tokens: what keeps looking at them in the milliseconds.
MAX_TOKEN_IDS: Final = 1 << 16

#: Looks at the beginning of a long value only.
_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 100

_T = TypeVar("_T")


def read_object(raw: bytes) -> dict[str, Any]:
    """Read the whole file.

    Raises:
        AdapterCorrupt: too large, no UTF-8, no JSON object, or a number that is not finite.
    """
    if len(raw) > MAX_CONFIG_BYTES:
        raise AdapterCorrupt(f"{CONFIG_FILE} is larger than {MAX_CONFIG_BYTES} bytes")
    if raw.startswith(b"\xef\xbb\xbf"):
        raise AdapterCorrupt(f"{CONFIG_FILE} starts with a byte order mark; save it without")
    try:
        config = json.loads(raw.decode("utf-8"))
        if not isinstance(config, dict):
            raise AdapterCorrupt(f"{CONFIG_FILE} is not a JSON object")
        broken = [name for name, value in config.items() if not _all_finite(value)]
    except (ValueError, RecursionError) as exc:
        raise AdapterCorrupt(f"{CONFIG_FILE} is not valid JSON in UTF-8") from exc
    if broken:
        raise AdapterCorrupt(f"{CONFIG_FILE}: {show(broken[0])} is not a finite number")
    return dict(config)


def boolean(name: str, value: object) -> bool:
    """Read true or false; null = false. Raises `AdapterCorrupt`."""
    if not isinstance(value, bool) and value is not None:
        raise AdapterCorrupt(f"{CONFIG_FILE}: {name} must be true or false, is {show(value)}")
    return bool(value)


def rank(name: str, value: object) -> int:
    """Read a rank. Raises `AdapterCorrupt`, or `AdapterIncompatible` where none can be meant."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise AdapterCorrupt(f"{CONFIG_FILE}: {name} must be a whole number, is {show(value)}")
    if not 1 <= value <= _MAX_CONFIG_RANK:
        raise AdapterIncompatible(
            f"{CONFIG_FILE}: rank {name} must be at least 1, at most {_MAX_CONFIG_RANK}"
        )
    return value


def alpha(name: str, value: object) -> float:
    """Read an alpha. Raises `AdapterCorrupt`, or `AdapterIncompatible` where it is zero."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AdapterCorrupt(f"{CONFIG_FILE}: {name} must be a number, is {show(value)}")
    if value == 0:
        raise AdapterIncompatible(
            f"{CONFIG_FILE}: {name} is 0, so the adapter changes nothing; name the base instead"
        )
    try:
        return float(value)
    except OverflowError as exc:
        raise AdapterCorrupt(f"{CONFIG_FILE}: {name} is not a finite number") from exc


def table(
    name: str, value: object, read: Callable[[str, object], _T]
) -> tuple[tuple[str, _T], ...]:
    """Read an object whose values are all alike, in file order; null = empty."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise AdapterCorrupt(f"{CONFIG_FILE}: {name} must be an object, is {show(value)}")
    return tuple((key, read(f"{name} {show(key)}", item)) for key, item in value.items())


def names(name: str, value: object) -> tuple[str, ...]:
    """Read a list of names; null = empty, one name may stand alone. Raises `AdapterCorrupt`."""
    listed = [value] if isinstance(value, str) else [] if is_nothing(value) else value
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        raise AdapterCorrupt(f"{CONFIG_FILE}: {name} must be a list of names, is {show(value)}")
    return tuple(item for item in listed if item)


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """Read a list of token ids, each once.

    Raises `AdapterCorrupt`, or `AdapterTooLarge` where there are more than `MAX_TOKEN_IDS`.
    """
    if isinstance(value, list) and len(value) > MAX_TOKEN_IDS:
        raise AdapterTooLarge(f"{CONFIG_FILE}: {name} holds more than {MAX_TOKEN_IDS} token ids")
    is_ids = (
        isinstance(value, list) and set(map(type, value)) <= {int} and min(value, default=0) >= 0
    )
    if not isinstance(value, list) or not is_ids:
        raise AdapterCorrupt(f"{CONFIG_FILE}: {name} must be a list of token ids")
    if len(set(value)) != len(value):
        raise AdapterCorrupt(f"{CONFIG_FILE}: {name} holds a token id twice")
    return tuple(value)


def is_nothing(value: object) -> bool:
    """Whether the value stands for a field that is not set."""
    return value is None or value is False or value in ("", [], {})


def show(value: object) -> str:
    """Return a stranger's value for an error message: short, printable, encodable."""
    text = _SHORT.repr(value).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 80 else f"{text[:77]}..."


def _all_finite(value: object) -> bool:
    try:
        json.dumps(value, allow_nan=False)  # no walk of ours is as fast over a megabyte
    except ValueError:
        return False
    return True
