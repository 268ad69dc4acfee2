"""The base model's tokenizer, from the files that the shard sends: prompts to ids, ids to text."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from loralane_proto import shard_pb2 as pb
from tokenizers import Tokenizer

from loralane_router.errors import RequestError, invalid

#: Longer texts are encoded in a thread, so that other requests' tokens do not wait.
_INLINE_CHARACTERS: Final = 4096


class Codec:
    """Encodes and decodes for one model. Raises RequestError where its files are unusable."""

    def __init__(self, files: Mapping[str, bytes], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = _load(files)
        self.special_ids = frozenset(
            id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._byte_ids = _byte_fallback_ids(self._tokenizer)
        #: Texts of single ids; at most one per id of the vocabulary.
        self._texts: dict[int, str] = {}

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text, with BOS and the like if `special`.

        Raises RequestError for text that is not Unicode (lone surrogates).
        """
        _check_unicode(text)
        if len(text) <= _INLINE_CHARACTERS:
            return self._encode(text, special)
        return await asyncio.to_thread(self._encode, text, special)

    def _encode(self, text: str, special: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def spans(self, text: str) -> list[tuple[int, str, int, int]]:
        """Return (id, text, start, stop) of every token of a prompt; offsets in characters."""
        _check_unicode(text)
        encoding = self._tokenizer.encode(text)
        return [
            (id, text[start:stop] or self.text(id), start, stop)
            for id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
        ]

    def check_ids(self, ids: Sequence[int]) -> list[int]:
        """Return a client's ids unchanged. Raises RequestError naming one out of range."""
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            last = self._vocab_size - 1
            wrong = next(id for id in ids if not 0 <= id <= last)
            raise invalid(f"token id {wrong} is not in the model's range 0 to {last}", "prompt")
        return list(ids)

    def text(self, token: int) -> str:
        """Return the text of one token by itself, special or not."""
        text = self._texts.get(token)
        if text is None:
            text = str(self._tokenizer.decode([token], skip_special_tokens=False))
            if token < self._vocab_size:
                self._texts[token] = text
        return text

    def decode(self, ids: list[int]) -> str:
        """Return the text of these ids; special tokens leave none."""
        if len(ids) == 1 and ids[0] not in self.special_ids:
            return self.text(ids[0])
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def is_silent(self, token: int) -> bool:
        """Whether the token leaves no text: it is special, or the tokenizer has no such id."""
        return token in self.special_ids or self._tokenizer.id_to_token(token) is None

    def is_byte(self, token: int) -> bool:
        """Whether the token stands for one byte (SentencePiece's byte fallback)."""
        return token in self._byte_ids


def json_file(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return a JSON object among a tokenizer's files, {} where there is no such file."""
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except ValueError as exc:
        raise _unusable(f"{name} is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise _unusable(f"{name} is not a JSON object")
    return value


def _load(files: Mapping[str, bytes]) -> Tokenizer:
    if "tokenizer.json" not in files:
        raise _unusable("there is no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    except Exception as exc:  # the only class that tokenizers raises
        raise _unusable(f"tokenizer.json cannot be read: {exc}") from exc
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _byte_fallback_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of `<0x00>` to `<0xFF>` where the decoder reads them as bytes."""
    letter = tokenizer.token_to_id("<0x41>")
    if letter is None or tokenizer.decode([letter]) != "A":
        return frozenset()
    ids = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(id for id in ids if id is not None)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise invalid(
            f"the prompt is not Unicode text: a lone surrogate at character {exc.start}", "prompt"
        ) from exc


def _unusable(what: str) -> RequestError:
    return RequestError(pb.ERROR_KIND_UNAVAILABLE, f"the model's tokenizer is not usable: {what}")
