"""From tensors of the embedding and the head to tables: what replaces rows of them, checked.

On a tied base PEFT's trained tokens change both ends; whole tables and LoRA change only the end
that they are saved for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from loralane_server.adapters.formats.base_shape import EMBED, HEAD, BaseShape
from loralane_server.adapters.formats.headers import TensorRef
from loralane_server.adapters.formats.spec import AdapterSpec
from loralane_server.adapters.formats.targets import Parts, check_dtypes, incompatible, names_of
from loralane_server.errors import AdapterIncompatible, AdapterTooLarge

#: What an adapter's tables may take, in the shard's dtype.
MAX_TABLE_BYTES: Final = 64 << 20
_WIDTHS: Final = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows that replace those of `embed_tokens` or `lm_head`."""

    module: str
    #: [n, hidden]
    ref: TensorRef
    #: Which rows they replace, each once; None = all, in order.
    ids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Tables:
    """What an adapter does to the tables beside LoRA."""

    #: At most one for each module.
    replaced: tuple[Table, ...] = ()
    #: By module: the base's own weight, saved beside what was trained. PEFT loads it over the base;
    #: as a rule it is equal to the base's, which only its bytes can tell.
    copies: tuple[Table, ...] = ()
    #: Both ends are one table in the base.
    tied: bool = False

    def __bool__(self) -> bool:
        return bool(self.replaced or self.copies)


def build_tables(found: Mapping[str, Parts], spec: AdapterSpec, base: BaseShape) -> Tables:
    """Return the tables of an adapter; `found` holds the tensors of `embed_tokens` and `lm_head`.

    Raises:
        AdapterIncompatible: a vocabulary of another size, a table changed in two ways, or a tensor
            and the config that disagree.
        AdapterTooLarge: above `MAX_TABLE_BYTES`.
    """
    replaced: list[Table] = []
    copies: list[Table] = []
    for module in (EMBED, HEAD):
        parts = found.get(module, {})
        check_dtypes(parts.values())
        _check_one_way(module, parts)
        if "tokens" in parts:
            replaced.append(_tokens(module, parts["tokens"], spec, base))
        if module in spec.tables:
            replaced.append(_whole(module, parts.get("table"), base))
        copy = parts.get("base") or (parts.get("table") if module not in spec.tables else None)
        if copy is not None:
            copies.append(_whole(module, copy, base))
    _check_tokens_saved(found, spec)
    if base.tied_head:
        _check_tying(found, spec)
        replaced += _tied_tokens(found, replaced)
    _check_budget(replaced, base)
    return Tables(tuple(replaced), tuple(copies), base.tied_head)


def table_bytes(table: Table, base: BaseShape) -> int:
    """Return what the table takes in the shard's dtype."""
    rows = base.vocab if table.ids is None else len(table.ids)
    return rows * base.hidden * _WIDTHS[base.dtype]


def too_large(size: int, names: list[str]) -> AdapterTooLarge:
    """Return the error for tables above the budget."""
    return AdapterTooLarge(
        f"the adapter replaces {size} bytes of embedding and head; at most {MAX_TABLE_BYTES} "
        f"({MAX_TABLE_BYTES >> 20} MiB) an adapter are served",
        tensors=names,
    )


def _check_one_way(module: str, parts: Parts) -> None:
    ways = [part for part in ("A", "tokens", "table") if part in parts]
    if len(ways) > 1 or ("base" in parts and "table" in parts):
        what = f"{module} is changed in more than one way"
        raise incompatible(what, names_of(parts.values()))


def _whole(module: str, ref: TensorRef | None, base: BaseShape) -> Table:
    if ref is None:
        raise AdapterIncompatible(
            f"the config's modules_to_save names {module}, but the file holds no {module}.weight"
        )
    if ref.shape != (base.vocab, base.hidden):
        raise incompatible(
            f"modules_to_save: {module} of this base is {[base.vocab, base.hidden]}, the adapter's "
            f"is {list(ref.shape)}; a vocabulary of another size is not served",
            (ref.name,),
        )
    return Table(module, ref, None)


def _tokens(module: str, ref: TensorRef, spec: AdapterSpec, base: BaseShape) -> Table:
    ids = dict(spec.tokens).get(module)
    if ids is None:
        what = f"the config's trainable_token_indices do not say which rows of {module} these are"
        raise incompatible(what, (ref.name,))
    if ref.shape != (len(ids), base.hidden):
        raise incompatible(
            f"trainable_token_indices: {len(ids)} rows of {module} are {[len(ids), base.hidden]}, "
            f"found {list(ref.shape)}",
            (ref.name,),
        )
    if ids and max(ids) >= base.vocab:
        raise incompatible(
            f"trainable_token_indices: token {max(ids)} is not in this base's vocabulary of "
            f"{base.vocab}",
            (ref.name,),
        )
    return Table(module, ref, ids)


def _check_tokens_saved(found: Mapping[str, Parts], spec: AdapterSpec) -> None:
    wanted = dict(spec.tokens)
    shared = wanted.get(EMBED) == wanted.get(HEAD) and "tokens" in found.get(EMBED, {})
    for module, ids in spec.tokens:
        if ids and "tokens" not in found.get(module, {}) and not (shared and module == HEAD):
            raise AdapterIncompatible(
                f"the config's trainable_token_indices name {module}, but the file holds no "
                f"{module}.token_adapter.trainable_tokens_delta"
            )


def _check_tying(found: Mapping[str, Parts], spec: AdapterSpec) -> None:
    """`ensure_weight_tying`: PEFT saves both ends, and cannot load one without the other."""
    embed, head = found.get(EMBED, {}), found.get(HEAD, {})
    for part in ("A", "table"):
        if spec.tied and (part in embed) != (part in head):
            raise incompatible(
                f"ensure_weight_tying: {EMBED} and {HEAD} change together, only one is there",
                names_of((*embed.values(), *head.values())),
            )


def _tied_tokens(found: Mapping[str, Parts], replaced: list[Table]) -> list[Table]:
    """The head's rows where the embedding's were trained; two sets of ids are not tied."""
    tokens = {table.module: table for table in replaced if table.ids is not None}
    embed, head = tokens.get(EMBED), tokens.get(HEAD)
    if embed is None or (head is not None and head.ids != embed.ids):
        return []
    others = found.get(HEAD, {})
    if others:
        what = f"trained tokens change the tied {HEAD} too, which is changed in another way"
        raise incompatible(what, names_of(others.values()))
    return [Table(HEAD, embed.ref, embed.ids)]


def _check_budget(replaced: list[Table], base: BaseShape) -> None:
    size = sum(table_bytes(table, base) for table in replaced)
    if size > MAX_TABLE_BYTES:
        raise too_large(size, names_of(table.ref for table in replaced))
