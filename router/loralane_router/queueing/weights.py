"""Weights of adapters and API keys: how much of the service each is due."""

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_FIELDS: Final = ("adapters", "keys")
#: Beyond these, sums of tokens would lose digits.
_LEAST, _MOST = 1e-3, 1e6


class WeightsError(ValueError):
    """A file of weights cannot be used; the message names the entry, and no key."""


def _salt() -> bytes:
    return secrets.token_bytes(16)


@dataclass(frozen=True, slots=True, repr=False)
class Weights:
    """Who has a weight other than 1. A key is known by a salted hash, which this process alone has.

    A flow of weight 2 is due twice the tokens of a flow of weight 1 while both wait.
    """

    #: By the name that requests use; "" = the base.
    adapters: Mapping[str, float] = field(default_factory=dict)
    #: By the flow of an API key.
    keys: Mapping[str, float] = field(default_factory=dict)
    salt: bytes = field(default_factory=_salt)

    def __repr__(self) -> str:
        return f"Weights({len(self.adapters)} adapters, {len(self.keys)} keys)"

    @classmethod
    def load(cls, path: str) -> "Weights":
        """Read `{"adapters": {name: weight}, "keys": {key: weight}}`; either may be missing.

        Raises WeightsError if it cannot be read or an entry is no weight.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
            document = json.loads(text, object_pairs_hook=_unique)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as exc:
            # Neither the text nor what a decoder quotes of it: it holds keys.
            reason = exc.strerror if isinstance(exc, OSError) else "it is not JSON in UTF-8"
            raise WeightsError(f"weights file {path}: {reason}") from None
        except _RepeatedError as exc:
            raise WeightsError(f"weights file {path}: an object names an entry twice") from exc
        return cls.parse(document)

    @classmethod
    def parse(cls, document: object) -> "Weights":
        """Check what a file of weights says. Raises WeightsError."""
        if not isinstance(document, dict):
            raise WeightsError('weights must be an object with "adapters" and "keys"')
        if document.keys() - set(_FIELDS):  # not named: it may be a key that is one level too high
            raise WeightsError('weights has a field other than "adapters" and "keys"')
        adapters, keys = (_entries(document, name) for name in _FIELDS)
        checked = {name: _weight(value, f"adapter {name!r}") for name, value in adapters.items()}
        salt = _salt()
        hashed = {}
        for place, (key, value) in enumerate(keys.items(), 1):
            if not key:
                raise WeightsError(f"key number {place} is empty")
            hashed[_flow_of_key(key, salt)] = _weight(value, f"key number {place}")
        return cls(checked, hashed, salt)

    def key_flow(self, key: str | None) -> str | None:
        """Return the flow of an API key that has a weight; None for every other."""
        if not key or not self.keys:
            return None
        flow = _flow_of_key(key, self.salt)
        return flow if flow in self.keys else None


class _RepeatedError(ValueError):
    """One object has two entries of the same name."""


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _RepeatedError
    return found


def _flow_of_key(key: str, salt: bytes) -> str:
    return "key:" + hashlib.blake2b(key.encode(), key=salt, digest_size=16).hexdigest()


def _entries(document: dict[str, object], name: str) -> dict[str, object]:
    entries = document.get(name, {})
    if not isinstance(entries, dict):
        raise WeightsError(f"weights: {name!r} must be an object of names and weights")
    return entries


def _weight(value: object, of_whom: str) -> float:
    # What is no number is not shown: a text may be a key that changed places with its weight.
    found = f"a {type(value).__name__}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if _LEAST <= value <= _MOST:
            return float(value)
        found = str(value)
    limits = f"a number from {_LEAST} to {_MOST}"
    raise WeightsError(f"the weight of {of_whom} must be {limits}, not {found}")
