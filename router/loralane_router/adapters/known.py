"""The adapters that a router knows, by digest, and which of them are in which tier."""

from collections import Counter
from collections.abc import Iterator, Mapping

from loralane_router.adapters.facts import AdapterFacts


class KnownAdapters:
    """Facts by digest, in the order in which they became known. Lives on the router's loop."""

    def __init__(self) -> None:
        self._facts: dict[str, AdapterFacts] = {}
        self._tally: Counter[str] = Counter()
        #: Digests of those in memory, by tier, the latest change last.
        self._held: dict[str, dict[str, None]] = {"device": {}, "host": {}}

    def __len__(self) -> int:
        return len(self._facts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def __contains__(self, digest: object) -> bool:
        return digest in self._facts

    def __getitem__(self, digest: str) -> AdapterFacts:
        return self._facts[digest]

    def get(self, digest: str) -> AdapterFacts | None:
        """Return what is known of an adapter, None if nothing is."""
        return self._facts.get(digest)

    def put(self, facts: AdapterFacts) -> bool:
        """Take over what is true of an adapter now; return whether it was not known."""
        known = self._facts.get(facts.digest)
        if known is not None:
            self._tally[known.tier] -= 1
        self._facts[facts.digest] = facts
        self._tally[facts.tier] += 1
        if known is None or known.tier != facts.tier:
            self._let_go(facts.digest)
            if facts.tier in self._held:
                self._held[facts.tier][facts.digest] = None
        return known is None

    def drop(self, digest: str) -> bool:
        """Forget an adapter; return whether it was known."""
        facts = self._facts.pop(digest, None)
        if facts is None:
            return False
        self._tally[facts.tier] -= 1
        self._let_go(digest)
        return True

    @property
    def tiers(self) -> Mapping[str, int]:
        """How many adapters are in each tier."""
        return self._tally

    def held(self, tier: str) -> Iterator[AdapterFacts]:
        """Yield those in the device or host tier, the latest change first."""
        return (self._facts[digest] for digest in reversed(self._held[tier]))

    def check(self) -> None:
        """Assert what must hold between calls."""
        assert all(digest == facts.digest for digest, facts in self._facts.items())
        assert +self._tally == Counter(facts.tier for facts in self._facts.values())
        for tier, held in self._held.items():
            assert held.keys() == {d for d, facts in self._facts.items() if facts.tier == tier}

    def _let_go(self, digest: str) -> None:
        for held in self._held.values():
            held.pop(digest, None)
