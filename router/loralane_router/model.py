"""The base model as a router needs it: what it is, its tokenizer and its chat template."""

from collections.abc import Mapping
from dataclasses import dataclass

from loralane_proto import shard_pb2 as pb

from loralane_router.requests import Message, TextRequest
from loralane_router.templates import ChatTemplate
from loralane_router.tokens import Codec


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The base model that the shard serves."""

    model_id: str
    architecture: str
    dtype: str
    device: str
    #: Prompt and generated tokens together.
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    version: str


class Model:
    """One connection's model. Making one parses the tokenizer; raises RequestError if it cannot."""

    def __init__(self, reply: pb.InfoReply, files: Mapping[str, bytes]) -> None:
        self.info = ModelInfo(
            model_id=reply.model_id,
            architecture=reply.architecture,
            dtype=reply.dtype,
            device=reply.device,
            max_model_len=reply.max_model_len,
            vocab_size=reply.vocab_size,
            eos_token_ids=tuple(reply.eos_token_ids),
            version=reply.version,
        )
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
            ids = self.codec.check_ids([id for id in prompt if isinstance(id, int)])
        truncate = request.parameters.truncate
        return ids if truncate is None else ids[-truncate:]
