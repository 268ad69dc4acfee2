"""How much of what the training text holds; the two phases of the base model differ in it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mixture:
    """Shares of the harder kinds of text.

    unknown: weight of questions outside the world, beside the weights in `world.py`;
    big_sums: share of those that are sums beyond the tables; sum_from: smallest numbers in them;
    capitals: share of prompts typed in capitals; documents: share of plain documents.
    """

    unknown: int
    big_sums: float
    sum_from: tuple[int, int]
    capitals: float
    documents: float


LEARN = Mixture(unknown=13, big_sums=0.12, sum_from=(21, 13), capitals=0.02, documents=0.10)
FINISH = Mixture(unknown=26, big_sums=0.30, sum_from=(13, 0), capitals=0.06, documents=0.04)
