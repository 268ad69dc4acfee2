"""The chips that graphs are compiled for, and what each has."""

from dataclasses import dataclass
from typing import Final

GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Target:
    """One or more chips of one kind that run a graph together."""

    #: As libtpu names the kind: "v5e".
    kind: str
    #: As libtpu names the arrangement: "2x2".
    topology: str
    #: Bytes of HBM that a program may use on one chip. Found by compiling ever larger ones: v5e
    #: takes 15.5 GiB and refuses 15.75; v6e takes 31.0 GiB and says that it has 31.24.
    hbm_limit: int

    @property
    def name(self) -> str:
        """For tables and files: v6e-2x2."""
        return f"{self.kind}-{self.topology}"

    @property
    def chips(self) -> int:
        """How many chips."""
        count = 1
        for side in self.topology.split("x"):
            count *= int(side)
        return count


V5E: Final = Target("v5e", "1x1", int(15.75 * GIB))
V6E: Final = Target("v6e", "1x1", int(31.24 * GIB))
V6E_4: Final = Target("v6e", "2x2", int(31.24 * GIB))

TARGETS: Final = {target.name: target for target in (V5E, V6E, V6E_4)}
