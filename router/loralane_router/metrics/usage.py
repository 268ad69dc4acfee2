"""What each adapter was used for, counted for a bounded number of adapters.

The most recently asked for have a row of their own; who falls out of them is folded into "other".
So the sum over all rows never goes down, and the rows are no more than the bound whatever clients
ask for. A digest that comes back starts a new row at zero, which Prometheus takes as a restart.
"""

from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Final

#: What the row of all the others is called; its digest is "".
OTHER: Final = "other"


@dataclass(slots=True)
class Usage:
    """Sums over requests."""

    requests: int = 0
    #: Of requests that had a first token.
    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_tokens: int = 0
    first_token_s: float = 0.0
    #: Requests that waited on the shard for the adapter, and how long in all.
    cold_starts: int = 0
    cold_s: float = 0.0

    def add(self, other: "Usage") -> None:
        """Add another's sums to these."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One adapter's sums under the name that it had when its row began."""

    adapter: str
    digest: str
    usage: Usage


class AdapterUsage:
    """The rows. Touched only on the router's event loop."""

    def __init__(self, most: int = 50) -> None:
        self._most = most
        #: By digest, the least recently asked for first.
        self._rows: OrderedDict[str, UsageRow] = OrderedDict()
        self._other = UsageRow(OTHER, "", Usage())

    def begin(self, digest: str, name: str) -> None:
        """Count a request that was accepted; "" = base, which is no adapter."""
        if not digest:
            return
        if digest not in self._rows:
            self._rows[digest] = UsageRow(name, digest, Usage())
            if len(self._rows) > self._most:
                _, folded = self._rows.popitem(last=False)
                self._other.usage.add(folded.usage)
        self._rows.move_to_end(digest)
        self._rows[digest].usage.requests += 1

    def first_token(self, digest: str, prompt_tokens: int, seconds: float) -> None:
        """Count what a first token ends: a prompt, and the wait since acceptance."""
        usage = self._of(digest)
        usage.prompt_tokens += prompt_tokens
        usage.first_tokens += 1
        usage.first_token_s += seconds

    def tokens(self, digest: str, count: int) -> None:
        """Count generated tokens."""
        self._of(digest).generated_tokens += count

    def cold(self, digest: str, seconds: float) -> None:
        """Count a request that waited for the adapter to be loaded."""
        usage = self._of(digest)
        usage.cold_starts += 1
        usage.cold_s += seconds

    def rows(self) -> list[UsageRow]:
        """Return all rows, the others' last."""
        return [*self._rows.values(), self._other]

    def _of(self, digest: str) -> Usage:
        """Return the sums that a running request counts in; the base's are thrown away."""
        if not digest:
            return Usage()
        return self._rows.get(digest, self._other).usage
