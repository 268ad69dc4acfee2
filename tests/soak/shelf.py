"""Adapters on a disk that change under the server, and what their names may answer meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from tests.cases.materialise import CONFIG, WEIGHTS
from tests.soak.fingerprints import Fingerprint, Reference, Version


@dataclass
class Slot:
    """One name below the adapter root. Its files are one of its versions, all of one config."""

    name: str
    versions: Sequence[Version]
    #: How often its weights were replaced.
    replaced: int = 0
    #: How often an unloading of it began, and how many are under way.
    unloaded: int = 0
    unloading: int = 0

    def fingerprints(self, since: int) -> list[Fingerprint]:
        """What a request may have seen that was sent after replacement number `since`."""
        seen = range(since, self.replaced + 1)
        return [self.versions[n % len(self.versions)].fingerprint for n in seen]


@dataclass(frozen=True)
class Shelf:
    """A folder of slots."""

    root: Path
    slots: Sequence[Slot] = field(repr=False)

    def replace(self, slot: Slot) -> None:
        """Put the next version's weights in the place of the present ones, at one instant."""
        following = slot.versions[(slot.replaced + 1) % len(slot.versions)]
        path = self.root / slot.name / WEIGHTS
        new = path.with_suffix(".new")
        new.write_bytes(following.weights)
        new.replace(path)
        slot.replaced += 1


def fill(root: Path, reference: Reference, adapters: int, changing: int, versions: int) -> Shelf:
    """Write `adapters` adapters below a root; the first `changing` of them have more versions."""
    slots = []
    for n in range(adapters):
        known = list(islice(reference.versions(n), versions if n < changing else 1))
        slots.append(Slot(f"adapter-{n:03}", known))
        folder = root / slots[-1].name
        folder.mkdir(parents=True)
        (folder / CONFIG).write_bytes(known[0].config)
        (folder / WEIGHTS).write_bytes(known[0].weights)
    return Shelf(root, slots)
