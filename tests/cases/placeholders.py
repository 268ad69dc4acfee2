"""`$BASE`, `$TOKENS(9)` and the like in a case's values."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from tests.cases.tensors import NotUnderstood

_PLACE: Final = re.compile(r"\$([A-Z_]+)(?:\((.*?)\))?")
#: The text to repeat may hold any sign, so its end is the number's.
_REPEAT: Final = re.compile(r"\$REPEAT\((.*?),(\d+)\)", re.DOTALL)
_WHOLE: Final = re.compile(r"\$(LIST|LIST_MSG)\((?:(.*?),)?(\d+)\)", re.DOTALL)

#: What a name means, given what stands in its parentheses.
Meanings = Mapping[str, Callable[[str], str]]


def tokens(count: int) -> str:
    """Return a text of `count` tokens: BOS, which the tokenizer adds, and one a byte."""
    return "a" * max(1, count - 1)


def long(count: int) -> str:
    """The same with a text that does not repeat itself soon."""
    text = "the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. "
    return (text * (count // len(text) + 1))[: max(1, count - 1)]


def fill(value: Any, meanings: Meanings) -> Any:
    """Return a JSON value with all placeholders replaced. Raises NotUnderstood."""
    if isinstance(value, dict):
        return {key: fill(item, meanings) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, meanings) for item in value]
    if isinstance(value, str) and "$" in value:
        return _filled(value, meanings)
    return value


def _filled(text: str, meanings: Meanings) -> Any:
    whole = _WHOLE.fullmatch(text)
    if whole is not None:
        item: object = whole[2]
        if whole[1] == "LIST_MSG":
            item = {"role": "user", "content": "a"}
        return [item] * int(whole[3])
    repeated = _REPEAT.search(text)
    if repeated is not None:
        before, after = text[: repeated.start()], text[repeated.end() :]
        middle = repeated[1] * int(repeated[2])
        return f"{_named(before, meanings)}{middle}{_named(after, meanings)}"
    return _named(text, meanings)


def _named(text: str, meanings: Meanings) -> str:
    def replace(found: re.Match[str]) -> str:
        if found[1] == "TOKENS":
            return tokens(int(found[2]))
        if found[1] == "LONG":
            return long(int(found[2]))
        if found[1] not in meanings:
            raise NotUnderstood(f"placeholder {found[0]!r}")
        return meanings[found[1]](found[2] or "")

    return _PLACE.sub(replace, text)
