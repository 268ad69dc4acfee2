"""What came back for one step, read without any of the server's code."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass
class Reply:
    """One answer over the wire, whole or as far as it came."""

    op: str
    path: str
    id: str | None = None
    #: Index of the top-level step that it belongs to.
    position: int = 0
    #: The adapter as the request names it; None = base.
    adapter: str | None = None
    #: Its name among the case's adapters, or the value that a loop gave it.
    label: str | None = None
    #: Computes `prompt`, which takes long for the prompts that no server should take.
    encode: Callable[[], tuple[int, ...] | None] = lambda: None
    max_tokens: int = 0
    sent: Any = None
    is_async: bool = False
    disconnected: bool = False
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    #: (seconds since the request, line) of a stream.
    lines: list[tuple[float, str]] = field(default_factory=list)
    seconds: float = 0.0
    #: Why there is no whole answer.
    failure: str | None = None
    hub_requests: int = 0

    @property
    def name(self) -> str:
        """How reports call it."""
        return self.id or self.label or f"step {self.position}"

    @cached_property
    def prompt(self) -> tuple[int, ...] | None:
        """Token ids of the prompt; None where the request holds no single plain prompt."""
        return self.encode()

    @property
    def asks_by_empty_name(self) -> bool:
        """Whether an adapter is named, but by an empty name: documented to mean the base."""
        body = self.sent if isinstance(self.sent, dict) else {}
        return (body.get("parameters") or {}).get("adapter_id") == ""

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @cached_property
    def data(self) -> list[str]:
        """The data of all events of a stream."""
        return [line[5:].strip() for _, line in self.lines if line.startswith("data:")]

    @cached_property
    def events(self) -> list[Any]:
        """The JSON of all events, `[DONE]` left out. Raises ValueError."""
        return [json.loads(data) for data in self.data if data != "[DONE]"]

    @cached_property
    def json(self) -> Any:
        """The body; None where it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def message(self) -> str:
        """What an error says: all of its text."""
        return self.body.decode(errors="replace")

    @cached_property
    def first_s(self) -> float:
        """Seconds until the first event of a stream, or until the answer."""
        times = [at for at, line in self.lines if line.startswith("data:")]
        return times[0] if times else self.seconds

    @cached_property
    def native(self) -> dict[str, Any] | None:
        """LoRAX's answer: an object, or the one object of an array; of a stream, its last event."""
        value = self.events[-1] if self.is_stream and self.events else self.json
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        return value if isinstance(value, dict) and "generated_text" in value else None

    @cached_property
    def tokens(self) -> list[dict[str, Any]]:
        """LoRAX's tokens, of a stream or of an answer with details."""
        if self.is_stream:
            return [event["token"] for event in self.events if "token" in event]
        details = (self.native or {}).get("details") or {}
        return list(details.get("tokens", ()))

    @cached_property
    def choices(self) -> dict[int, str]:
        """The text of every choice of OpenAI's answers, streams joined."""
        parts = self.events if self.is_stream else [self.json or {}]
        texts: dict[int, str] = {}
        for choice in (c for part in parts for c in part.get("choices", ())):
            message = choice.get("message") or choice.get("delta") or choice
            text = message.get("text") or message.get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
        return texts

    @cached_property
    def finish_reasons(self) -> list[str]:
        """Why each choice ended, in the order of the answer."""
        if self.native is not None:
            reason = (self.native.get("details") or {}).get("finish_reason")
            return [reason] if reason else []
        parts = self.events if self.is_stream else [self.json or {}]
        every = (c.get("finish_reason") for part in parts for c in part.get("choices", ()))
        return [reason for reason in every if reason]

    @property
    def text(self) -> str | None:
        """The text that was generated; None where nothing was."""
        if self.native is not None:
            return str(self.native["generated_text"])
        return self.choices.get(0) if self.choices else None

    @property
    def usage(self) -> dict[str, int]:
        """Token counts of either dialect, under OpenAI's names."""
        if self.native is not None:
            details = self.native.get("details") or {}
            names = {"prompt_tokens": "prompt_tokens", "generated_tokens": "completion_tokens"}
            return {names[key]: count for key, count in details.items() if key in names}
        parts = self.events if self.is_stream else [self.json or {}]
        return next((p["usage"] for p in reversed(parts) if p.get("usage")), {})


def told(reply: Reply) -> str:
    """Return status and beginning of an answer, for reports."""
    return f"{reply.status} {reply.failure or ''} {reply.message[:120]!r}"
