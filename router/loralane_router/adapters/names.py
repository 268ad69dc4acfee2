"""Names that hold on every shard of a router: those of the base model, and aliases.

What a name leads to is for each shard to say (`registry`): the same folder on two machines may be
two different adapters.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from loralane_proto import shard_pb2 as pb

from loralane_router.errors import invalid

_MOST_NAME_CHARACTERS: Final = 256


class Names:
    """Base names and aliases. Owned by the fleet, on the router's event loop."""

    def __init__(self, served_model_name: str | None) -> None:
        self._served_model_name = served_model_name
        self._base: frozenset[str] = frozenset({""})
        #: By shard, what it was given with --adapter; replaced on every connection.
        self._configured: dict[str, Mapping[str, str]] = {}
        #: Given through `load`; these go before the configured ones.
        self._loaded: dict[str, str] = {}
        #: Grows with every change.
        self.changes = 0

    def connect(self, address: str, info: pb.InfoReply) -> list[str]:
        """Take over a shard's aliases and the names of its base model.

        Return the aliases that stand for something else on a shard that came before.
        """
        names = {"", info.model_id, info.model_id.rstrip("/").rpartition("/")[2]}
        self._base = frozenset(names | {self._served_model_name or ""})
        own = {alias.name: alias.reference for alias in info.aliases}
        self._configured[address] = own
        self.changes += 1
        return [name for name in own if own[name] != self._stands_for(name)]

    def disconnect(self, address: str) -> None:
        """Forget the aliases of a shard that does not come back."""
        self._configured.pop(address, None)
        self.changes += 1

    def is_base(self, name: str) -> bool:
        """Whether a name means the base model. An alias goes before a base name."""
        return name in self._base and self.aliased(name) is None

    def aliased(self, name: str) -> str | None:
        """Return what an alias stands for, None if the name is no alias."""
        if (loaded := self._loaded.get(name)) is not None:
            return loaded
        return self._stands_for(name)

    def aliases(self) -> set[str]:
        """Return every alias."""
        return {*self._loaded, *(name for own in self._configured.values() for name in own)}

    def sent(self, name: str) -> str:
        """Return what a shard is asked for. It knows the configured aliases by itself.

        So those are the operator's: they may lead anywhere, with the shard's own login.
        """
        return self._loaded.get(name, name)

    def means_the_same(self, name: str, address: str) -> bool:
        """Whether a name may be asked of a shard: not an alias that it lacks, or has for another.

        So an alias means one thing at any time, also while shards are restarted with a new one.
        """
        sent = self.sent(name)
        return self._stands_for(sent) == self._configured.get(address, {}).get(sent)

    def check_alias(self, name: str) -> None:
        """Raise RequestError (400) for a name that no adapter may have."""
        if name in self._base:
            raise invalid(f"{name!r} means the base model; choose another name", "name")
        if len(name) > _MOST_NAME_CHARACTERS or not name.isprintable():
            raise invalid(
                f"a name has at most {_MOST_NAME_CHARACTERS} printable characters", "name"
            )

    def add(self, name: str, reference: str) -> None:
        """Call a reference, or what another alias stands for, by a name from now on."""
        if name != reference:
            self._loaded[name] = self.sent(reference)
            self.changes += 1

    def forget(self, sents: Iterable[str]) -> None:
        """Drop the aliases that `add` gave to references that lead nowhere any more."""
        gone = set(sents)
        self._loaded = {name: sent for name, sent in self._loaded.items() if sent not in gone}
        self.changes += 1

    def take_back(self, name: str) -> bool:
        """Drop one alias that `add` gave; return whether there was one."""
        had = self._loaded.pop(name, None) is not None
        self.changes += had
        return had

    def _stands_for(self, alias: str) -> str | None:
        """Return what a configured alias means: to the shard that was there first."""
        return next((own[alias] for own in self._configured.values() if alias in own), None)
