"""Rows of the embedding and the head, read when an adapter is loaded.

PEFT saves the base's own weight beside LoRA on a table and loads it over the base. Nearly always
the two are equal; that is looked up here, in blocks, and then nothing is replaced. Where they
differ, the base's table is the adapter's, and what LoRA adds is merged into it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loralane_server.adapters.formats.base_shape import EMBED, HEAD
from loralane_server.adapters.formats.tables import MAX_TABLE_BYTES, Table, Tables, too_large
from loralane_server.adapters.formats.targets import incompatible, names_of
from loralane_server.adapters.reading.factors import Factors, served
from loralane_server.adapters.reading.load_files import LoadFiles
from loralane_server.adapters.reading.ranges import read_blocks, read_tensors
from loralane_server.adapters.sources.files import Reads
from loralane_server.device.seam import ENDS, TableRows
from loralane_server.model.base_weights import BaseWeights


@dataclass(frozen=True, slots=True)
class TableFiles:
    """Reads the tables of one adapter for a shard that computes in `dtype`."""

    files: LoadFiles
    reads: Reads
    dtype: torch.dtype
    #: None = every copy of the base's weight counts as another.
    base: BaseWeights | None
    #: What copies that differ from the base may take.
    budget: int = MAX_TABLE_BYTES

    def read(
        self, tables: Tables, factors: Mapping[str, Factors]
    ) -> tuple[dict[str, TableRows], dict[str, Factors]]:
        """Return the replaced rows by module, and what of the LoRA is not merged into them.

        Raises:
            AdapterCorrupt: as `read_tensors`, or not finite.
            AdapterIncompatible: the base's weight is replaced in a way that is not implemented.
            AdapterTooLarge: a copy that differs from the base is above the budget.
        """
        rows = self._replaced(tables)
        left = dict(factors)
        for module, base_rows in self._own_bases(tables).items():
            replaced = rows.get(module)
            if replaced is None:
                merged = _merged(module, base_rows, left.pop(module, None))
            elif replaced.ids is None:
                continue
            else:
                merged = base_rows.index_copy(0, replaced.ids, replaced.rows.to(torch.float32))
            rows[module] = TableRows(None, served(merged, self.dtype, module))
        return rows, left

    def _replaced(self, tables: Tables) -> dict[str, TableRows]:
        refs = [table.ref for table in tables.replaced if table.ids != ()]
        stored = read_tensors(refs, self.files, self.reads)
        # One copy of rows that both ends share.
        rows = {name: served(tensor, self.dtype, name) for name, tensor in stored.items()}
        return {
            table.module: TableRows(_ids(table), rows[table.ref.name])
            for table in tables.replaced
            if table.ref.name in rows
        }

    def _own_bases(self, tables: Tables) -> dict[str, Tensor]:
        """By module, the tables of a base that is not this one, float32 [vocab, hidden]."""
        others = [copy for copy in tables.copies if not self._is_the_base(copy)]
        if not others:
            return {}
        refs = [copy.ref for copy in others]
        size = sum(copy.ref.shape[0] * copy.ref.shape[1] * self.dtype.itemsize for copy in others)
        if size > self.budget:
            raise too_large(size, names_of(refs))
        stored = read_tensors(refs, self.files, self.reads)
        found = {copy.module: stored[copy.ref.name].to(torch.float32) for copy in others}
        if not tables.tied:
            return found
        shared = next(iter(found.values()))
        if len(others) < len(tables.copies) or not all(map(shared.equal, found.values())):
            what = "embedding and head are one table in this base, and two in the adapter"
            raise incompatible(what, names_of(copy.ref for copy in tables.copies))
        return {EMBED: shared, HEAD: shared}

    def _is_the_base(self, copy: Table) -> bool:
        """Whether the shard would compute the same with the copy: equal in its dtype."""
        if self.base is None:
            return False
        for first, block in read_blocks(copy.ref, self.files, self.reads):
            own = self.base.weight(ENDS, copy.module, first, first + len(block))
            if not torch.equal(block.to(self.dtype), own.to(self.dtype)):
                return False
        return True


def _ids(table: Table) -> Tensor | None:
    return None if table.ids is None else torch.tensor(table.ids, dtype=torch.int64)


def _merged(module: str, rows: Tensor, lora: Factors | None) -> Tensor:
    if lora is None:
        return rows
    if not lora.is_plain:
        what = f"{module} has DoRA or a bias on a base that is not this one"
        raise incompatible(what, (module,))
    plain = lora.in_float32()
    halves = (plain.a, plain.b) if module == EMBED else (plain.b, plain.a)
    return torch.addmm(rows, halves[0].T, halves[1], alpha=plain.scale)
