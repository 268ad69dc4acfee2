"""What one client may cost the gateway."""

from dataclasses import dataclass
from typing import Final

#: Choices of one prompt (`n`).
MAX_N: Final = 16
#: Prompts times choices of one request.
MAX_CHOICES: Final = 128
#: Entries of `logit_bias`.
MAX_BIASES: Final = 1024
#: Stop strings of one request, and the characters of each.
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024
#: Turns of a chat.
MAX_MESSAGES: Final = 4096
#: Alternatives of each token.
MAX_TOP_LOGPROBS: Final = 20
#: Characters of an adapter's name or reference.
MAX_NAME_CHARS: Final = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on a request's body and on silence."""

    #: A longer body is answered 413.
    body_bytes: int = 8 * 1024 * 1024
    #: A body that takes longer to arrive is answered 408.
    body_s: float = 30.0
    #: A stream says something at least this often, and commits to status 200 after as long.
    quiet_s: float = 15.0
