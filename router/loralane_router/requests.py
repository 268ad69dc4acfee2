"""What the surfaces hand to the router and get back: plain frozen records, no protobuf, no HTTP.

Every surface (OpenAI, native, gRPC) builds a `TextRequest`, gives it to `Router.open` and reads
`Delta`s from the `Generation` that it gets.
"""

from dataclasses import dataclass, field
from typing import Literal

#: Why a row ended. `eos` and `stop` are both "stop" to OpenAI; LoRAX tells them apart.
FinishReason = Literal["length", "eos", "stop"]
#: What giving up on an adapter means: an error, or the base's answer (which says so).
AdapterWaitPolicy = Literal["fail", "base"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Parameters:
    """How to continue a prompt; validated by the surface that read it."""

    #: None = as many as fit behind the prompt.
    max_tokens: int | None = None
    #: 0 = greedy.
    temperature: float = 0.0
    #: 0 = off.
    top_k: int = 0
    #: 1 = off.
    top_p: float = 1.0
    #: None = the router draws one.
    seed: int | None = None
    #: (token id, what is added to its logit), each id once.
    logit_bias: tuple[tuple[int, float], ...] = ()
    #: The text ends before the first of these; they may span tokens.
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    #: Whether each token carries its log-probability.
    logprobs: bool = False
    #: How many alternatives each token carries, at most 20.
    top_logprobs: int = 0
    #: Keep only so many of the prompt's last tokens; None = refuse a prompt that is too long.
    truncate: int | None = None


@dataclass(frozen=True, slots=True)
class Merge:
    """Several adapters as one; what strategies there are and take, the shard says."""

    #: (reference or alias as the user wrote it, weight)
    members: tuple[tuple[str, float], ...]
    strategy: str = "linear"
    #: Share of values that are kept; 0 = not given.
    density: float = 0.0
    majority_sign: str = "total"


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One prompt for one adapter, or for several as one."""

    #: A reference or alias as the user wrote it; "" or the base's id = base.
    adapter: str
    #: Text, token ids, or the turns of a chat (which the template renders).
    prompt: str | tuple[int, ...] | tuple[Message, ...]
    parameters: Parameters
    #: The caller's hub token for this adapter; kept out of every repr and log.
    token: str | None = field(default=None, repr=False)
    #: Instead of an adapter, which then is "".
    merge: Merge | None = None
    #: The caller's API key, whose weight may count; kept out of every repr and log.
    key: str | None = field(default=None, repr=False)
    #: Lower goes first; others do not wait for ever.
    priority: int = 0
    #: Seconds after which a request whose adapter is not ready gives up; None = it waits.
    max_wait_for_adapter_s: float | None = None
    adapter_wait_policy: AdapterWaitPolicy = "fail"


def bearer_key(authorization: str) -> str | None:
    """Return the key that an `authorization` header carries, None if it carries none."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


@dataclass(frozen=True, slots=True)
class OutToken:
    """One generated token."""

    id: int
    #: The text of this token alone; may be "\ufffd" inside a character.
    text: str
    #: 0.0 unless asked for.
    logprob: float
    special: bool
    #: (id, text, log-probability), most probable first.
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one request.

    The texts of all deltas of a request, joined, are its answer: no half character, no stop string,
    no text of special tokens. Text may lag behind `tokens` while it could still become either.
    """

    text: str
    tokens: tuple[OutToken, ...]
    #: Set on the last delta, and only there.
    finish_reason: FinishReason | None = None
