"""From token ids to text, as they come: complete characters only, and nothing of a stop string.

The joined pieces of a `Detokenizer` equal the decoding of all its ids at once, whatever the ids
are. `StopStrings` then holds back what could still become a stop string.
"""

from typing import Final, Protocol

_REPLACEMENT: Final = "\ufffd"
#: An unfinished character is at most three bytes, so at most three tokens; one more is slack.
_TAIL: Final = 4
_LONGEST_WINDOW: Final = 12


class Vocabulary(Protocol):
    """What a `Detokenizer` needs to know of a tokenizer."""

    def is_silent(self, token: int) -> bool:
        """Whether the token leaves no text: it is special, or the tokenizer has no such id."""
        ...

    def is_byte(self, token: int) -> bool:
        """Whether the token stands for one byte of a run that is decoded as a whole."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of these ids; special tokens leave none."""
        ...


class Detokenizer:
    """One answer's ids to its text, at a constant cost per token.

    Only the last few ids (the window) are decoded again for each new one: what a token adds is
    the window's text with it minus the text without it. A trailing U+FFFD may be the beginning of
    a character and waits; a run of byte tokens waits for its end, because one bad byte turns all
    of the run into U+FFFD.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._window: list[int] = []
        #: Characters of the window's text that were already returned.
        self._shown = 0

    def push(self, token: int) -> str:
        """Return the text that this token completes, often ""."""
        if self._vocabulary.is_silent(token):
            return ""
        self._window.append(token)
        if self._vocabulary.is_byte(token):
            return ""
        text = self._vocabulary.decode(self._window)
        if text.endswith(_REPLACEMENT):
            piece = text[self._shown : -1]
            self._shown = max(self._shown, len(text) - 1)
            if len(self._window) > _LONGEST_WINDOW:
                self._restart(_TAIL, held=1)
            return piece
        piece = text[self._shown :]
        self._restart(1, held=0)
        return piece

    def flush(self) -> str:
        """Return what was held back; the answer is complete."""
        piece = self._vocabulary.decode(self._window)[self._shown :]
        self._window, self._shown = [], 0
        return piece

    def _restart(self, tokens: int, *, held: int) -> None:
        """Keep only the window's last tokens, all but `held` characters of them shown."""
        self._window = self._window[-tokens:]
        self._shown = max(0, len(self._vocabulary.decode(self._window)) - held)


class StopStrings:
    """Ends a text before the stop string that is complete first (the longest, if several are).

    Where the text is cut into pieces makes no difference to the result.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        #: Whether a stop string was found; nothing may be pushed after that.
        self.found = False

    def push(self, piece: str) -> str:
        """Return the text that can no longer become part of a stop string."""
        if not self._stops:
            return piece
        text = self._held + piece
        hits = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            self.found = True
            self._held = ""
            return text[: min(hits)[1]]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back; it did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` begin `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
