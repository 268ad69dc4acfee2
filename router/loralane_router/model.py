"""The base model as a router needs it: what it is, its tokenizer and its chat template."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from loralane_proto import shard_pb2 as pb

from loralane_router.errors import RequestError
from loralane_router.fleet.shards import unavailable
from loralane_router.requests import Message, TextRequest
from loralane_router.text.templates import ChatTemplate
from loralane_router.text.tokens import Codec


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The base model that the shards serve."""

    model_id: str
    architecture: str
    dtype: str
    device: str
    #: Prompt and generated tokens together.
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    version: str

    @property
    def identity(self) -> Mapping[str, object]:
        """What two shards must have in common so that a request can go to either."""
        return {
            "model": self.model_id,
            "dtype": self.dtype,
            "vocabulary": self.vocab_size,
            "max_model_len": self.max_model_len,
            "end tokens": sorted(self.eos_token_ids),
        }


class OtherModel(RequestError):
    """A shard serves another model than the router. It is refused, its requests are not."""


class Model:
    """What shards serve. Making one parses the tokenizer; raises RequestError if it cannot."""

    def __init__(self, reply: pb.InfoReply, files: Mapping[str, bytes]) -> None:
        self.info = _info_of(reply)
        self.codec = Codec(files, reply.vocab_size)
        self._template = ChatTemplate(files)

    async def prompt_ids(self, request: TextRequest) -> list[int]:
        """Return a request's prompt as token ids, cut to its last `truncate` if it says so.

        A rendered chat contains its special tokens already, so none are added to it. Raises
        RequestError for ids out of range, text that is not Unicode, or what the template refuses.
        """
        prompt = request.prompt
        if isinstance(prompt, str):
            ids = await self.codec.encode(prompt, special=True)
        elif prompt and isinstance(prompt[0], Message):
            turns = [turn for turn in prompt if isinstance(turn, Message)]
            ids = await self.codec.encode(self._template.render(turns), special=False)
        else:
            ids = self.codec.check_ids(cast(tuple[int, ...], prompt))
        truncate = request.parameters.truncate
        return ids if truncate is None else ids[-truncate:]


class CommonModel:
    """The one model of a router: what the first of its connected shards serves.

    Others serve the same or do not join. Once all have left, one of those that have served it may
    come back with another; a shard that never did may not take over while any of them is known, or
    clients that ask for the base would be answered by another model. Owned by the fleet, on the
    router's event loop.
    """

    def __init__(self) -> None:
        self._model: Model | None = None
        #: Addresses of connected shards.
        self._members: set[str] = set()
        #: Addresses of shards that have served this model and have not been let go.
        self._known: set[str] = set()

    @property
    def model(self) -> Model:
        """The model as last seen. Raises RequestError (503) before the first shard joined."""
        if self._model is None:
            raise unavailable("the shard was not reached yet; try again when the router is ready")
        return self._model

    async def join(
        self,
        address: str,
        reply: pb.InfoReply,
        files: Callable[[], Awaitable[Mapping[str, bytes]]],
    ) -> None:
        """Let a shard serve from here on, until `leave`; `files` gets its tokenizer's.

        Raises OtherModel, or RequestError where the tokenizer cannot be had or is none.
        """
        if self._may_say(address):
            made = await asyncio.to_thread(Model, reply, await files())
            if self._may_say(address):  # nobody else came first meanwhile
                self._model = made
                self._known.clear()
        ours, theirs = self.model.info.identity, _info_of(reply).identity
        differ = [name for name in ours if ours[name] != theirs[name]]
        if differ:
            found = ", ".join(f"{name} {theirs[name]!r} is not {ours[name]!r}" for name in differ)
            raise OtherModel(
                pb.ERROR_KIND_UNAVAILABLE,
                f"it serves another model than this router and is not used: {found}",
            )
        self._members.add(address)
        self._known.add(address)

    def leave(self, address: str) -> None:
        """Take over that a shard is no longer connected."""
        self._members.discard(address)

    def let_go(self, address: str) -> None:
        """Take over that a shard is gone for good."""
        self.leave(address)
        self._known.discard(address)

    def check(self, serving: Iterable[str]) -> None:
        """Assert that the shards that serve have joined, and serve a model that is known."""
        assert self._members.issuperset(serving)
        assert self._known.issuperset(self._members)
        assert self._model is not None or not self._members

    def _may_say(self, address: str) -> bool:
        """Whether this shard says what the model is."""
        return not self._members and (not self._known or address in self._known)


def _info_of(reply: pb.InfoReply) -> ModelInfo:
    return ModelInfo(
        model_id=reply.model_id,
        architecture=reply.architecture,
        dtype=reply.dtype,
        device=reply.device,
        max_model_len=reply.max_model_len,
        vocab_size=reply.vocab_size,
        eos_token_ids=tuple(reply.eos_token_ids),
        version=reply.version,
    )
