from pathlib import Path

from tests.tpu.handmade import COMPILED, GRAPH
from tpu.records import read_compiled, read_exported, write_compiled, write_exported


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_exported(tmp_path, GRAPH, b"bytecode")
    write_compiled(tmp_path, COMPILED)

    assert list(read_exported(tmp_path)) == [GRAPH]
    assert (tmp_path / f"{GRAPH.name}.mlirbc").read_bytes() == b"bytecode"
    assert read_compiled(tmp_path / f"{GRAPH.name}.v6e-1x1.json") == COMPILED
