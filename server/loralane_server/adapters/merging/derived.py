"""What a merge of adapters is, whether it can be, and what it is called.

A merge is an adapter of its own. Its digest says what it is made of and how, so queues, lanes,
caches and metrics know nothing of merging; a member whose files are replaced makes another merge.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from loralane_server.adapters.formats.base_shape import module_name
from loralane_server.adapters.formats.index import AdapterIndex
from loralane_server.adapters.formats.spec import MAX_RANK
from loralane_server.adapters.formats.targets import Target
from loralane_server.adapters.merging.merging import Recipe
from loralane_server.adapters.store.entries import AdapterSummary
from loralane_server.errors import AdapterIncompatible, AdapterTooLarge, InvalidRequest

#: A longer name says only how many members there are.
_MOST_NAME_CHARS: Final = 240


@dataclass(frozen=True, slots=True)
class Merge:
    """Which adapters are merged, and how."""

    recipe: Recipe
    #: Their digests, one for each weight.
    members: tuple[str, ...]

    @property
    def digest(self) -> str:
        """The merge's identity: of its recipe and its members', in order."""
        recipe = self.recipe
        how = (recipe.strategy, recipe.density.hex(), recipe.majority_sign)
        weights = (weight.hex() for weight in recipe.weights)
        pairs = (item for pair in zip(self.members, weights, strict=True) for item in pair)
        return _sha256("loralane merge 1", *how, *pairs).hex()

    def seed(self, layer: int, module: str, half: str) -> int:
        """Return the seed of what DARE draws of all members' A's, or B's, of one target.

        A function of the members alone: every shard draws the same, for any weights and density.
        """
        drawn = _sha256("loralane dare 1", *self.members, str(layer), module, half)
        return int.from_bytes(drawn[:8], "little")


def summary_of_merge(
    merge: Merge, indexes: Sequence[AdapterIndex], max_rank: int
) -> AdapterSummary:
    """Describe a merge; its bytes are what is read to make it.

    `max_rank` is the largest rank that fits the shard's lanes.

    Raises:
        AdapterIncompatible: a member is not plain LoRA, or ranks differ where they may not.
        AdapterTooLarge: more lanes than the shard has.
        InvalidRequest: so low a density that nothing would be left of any member.
    """
    for index in indexes:
        if not index.is_plain:
            raise AdapterIncompatible(f"{index.reference} cannot be merged: {_beyond_lora(index)}")
    _check_density(merge.recipe, indexes)
    ranks: defaultdict[tuple[int, str], list[tuple[int, str]]] = defaultdict(list)
    for index in indexes:
        for place, target in index.targets.items():
            ranks[place].append((target.rank, index.reference))
    rank = max(_rank(merge.recipe, place, found) for place, found in sorted(ranks.items()))
    most = min(max_rank, MAX_RANK)
    if rank > most:
        raise AdapterTooLarge(
            f"merged, the adapters are of rank {rank}, which does not fit the shard: "
            f"at most {most} does; merge fewer, or raise --lanes (up to rank {MAX_RANK})"
        )
    return AdapterSummary(
        digest=merge.digest,
        reference=_name(merge, [index.reference for index in indexes]),
        kind="merge",
        rank=rank,
        bytes=sum(index.bytes for index in indexes),
        targets=len(ranks),
        modules=tuple(sorted({module for _, module in ranks})),
    )


def _check_density(recipe: Recipe, indexes: Sequence[AdapterIndex]) -> None:
    """A merge of which nothing is left would answer with the base."""
    targets = (target for index in indexes for target in index.targets.values())
    most = max((target.rank * min(target.columns, _rows(target)) for target in targets), default=0)
    if int(recipe.density * most) == 0:
        raise InvalidRequest(f"a density of {recipe.density:g} keeps no value of any target")


def _rows(target: Target) -> int:
    return target.b.end - target.b.begin if target.b else 0


def _rank(recipe: Recipe, place: tuple[int, str], found: Sequence[tuple[int, str]]) -> int:
    if recipe.strategy == "cat":
        return sum(rank for rank, _ in found)
    (rank, first), *others = found
    for other, reference in others:
        if other != rank:
            raise AdapterIncompatible(
                f"{recipe.strategy} merges adapters of one rank, but at {module_name(*place)} "
                f"{first} is of rank {rank} and {reference} of rank {other}; "
                "the strategy cat adds adapters of any ranks"
            )
    return rank


def _beyond_lora(index: AdapterIndex) -> str:
    if index.tables.replaced:
        return "it replaces rows of the embedding or the head"
    target = next(target for target in index.targets.values() if not target.is_plain)
    what = "DoRA's magnitudes" if target.magnitude else "biases"
    return f"it has {what}, and only LoRA's A and B can be merged"


def _name(merge: Merge, references: Sequence[str]) -> str:
    """Return a readable name, without commas: vLLM's gauges join names with these."""
    recipe = merge.recipe
    pairs = zip(references, recipe.weights, strict=True)
    parts = ["+".join(f"{reference}*{weight!r}" for reference, weight in pairs)]
    if recipe.prunes:
        parts.append(f"density={recipe.density!r}")
    if recipe.majority_sign != "total":
        parts.append(f"majority_sign={recipe.majority_sign}")
    name = f"merge:{recipe.strategy}({';'.join(parts)})"
    if len(name) <= _MOST_NAME_CHARS:
        return name
    return f"merge:{recipe.strategy}({len(references)} adapters;{merge.digest[:16]})"


def _sha256(*parts: str) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part.encode()).to_bytes(8, "little"))
        digest.update(part.encode())
    return digest.digest()
