"""Refuses what a shard's device cannot apply, before a tensor is read: never half an adapter."""

from collections.abc import Iterable

from loralane_server.adapters.formats.base_shape import Abilities
from loralane_server.adapters.formats.tables import Tables
from loralane_server.adapters.formats.targets import Target, incompatible, names_of
from loralane_server.device.seam import ENDS
from loralane_server.errors import AdapterIncompatible


def check_abilities(abilities: Abilities, targets: Iterable[Target], tables: Tables) -> None:
    """Raise `AdapterIncompatible` for what the device does not apply, naming kind and tensors.

    Copies of the base's own tables count as nothing; that they are copies is seen when it is read.
    """
    for target in targets:
        at_end = target.layer == ENDS
        if at_end and not abilities.ends:
            what = f"LoRA on {target.module}" if target.rank else f"a bias of {target.module}"
            raise unable(abilities, what, names_of(target.refs))
        if not at_end and not target.is_plain and not abilities.vectors:
            raise _unable_vector(abilities, target)
    if tables.replaced and not abilities.ends:
        table = tables.replaced[0]
        rows = "a whole" if table.ids is None else "trained rows of"
        raise unable(abilities, f"{rows} {table.module}", [table.ref.name])


def unable(abilities: Abilities, what: str, names: Iterable[str]) -> AdapterIncompatible:
    """Return the error for what the device does not apply, and says which does."""
    return incompatible(
        f"the adapter has {what}, which --device {abilities.device} does not serve; a shard with "
        "--device cpu does",
        names,
    )


def _unable_vector(abilities: Abilities, target: Target) -> AdapterIncompatible:
    kinds = (
        ("magnitudes (DoRA)", target.magnitude),
        ("a bias of lora_B (lora_bias)", target.lora_bias),
        ("a bias of its own", target.bias),
    )
    what, rows = next((what, rows) for what, rows in kinds if rows is not None)
    return unable(abilities, f"{what} on {target.module}", [rows.ref.name])
