"""`merged_adapters`, as LoRAX's clients send it: several adapters as one."""

import msgspec

from loralane_router.errors import invalid
from loralane_router.gateway import fields
from loralane_router.requests import Merge


class MergedAdapters(msgspec.Struct):
    """The field's value; null means not given. Which numbers and names work, the shard says."""

    ids: list[str]
    weights: list[float] | None = None
    merge_strategy: str | None = None
    density: float | None = None
    majority_sign_method: str | None = None


def merge_of(given: MergedAdapters | None, adapter: str) -> Merge | None:
    """Return what the request merges; `adapter` is the one that it names beside.

    What is left out has LoRAX's defaults: every weight 1, linear, signs by total. A density has
    none: LoRAX's own, 0, keeps nothing and would answer with the base. Raises RequestError.
    """
    if given is None:
        return None
    if adapter:
        raise invalid("adapter_id and merged_adapters exclude each other", "merged_adapters")
    weights = [1.0] * len(given.ids) if given.weights is None else given.weights
    if len(weights) != len(given.ids):
        raise invalid(
            f"merged_adapters has {len(given.ids)} ids and {len(weights)} weights; "
            "give one weight for each id",
            "merged_adapters.weights",
        )
    names = [fields.name("merged_adapters.ids", name) for name in given.ids]
    return Merge(
        members=tuple(zip(names, weights, strict=True)),
        strategy="linear" if given.merge_strategy is None else given.merge_strategy,
        density=given.density or 0.0,
        majority_sign="total" if given.majority_sign_method is None else given.majority_sign_method,
    )
