"""Regenerate the protobuf code beside the .proto files; with --check, fail if that changes one.

Runs in the environment of the `proto` dependency group (`make proto`).
"""

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
PACKAGE = "loralane_proto"


def generate(out: Path) -> None:
    """Write the modules and their typed stubs below `out`."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / PACKAGE).glob("*.proto"))
    tools = Path(sys.executable).parent
    status = protoc.main(
        [
            "protoc",
            f"-I{ROOT}",
            f"--plugin=protoc-gen-mypy={tools / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={tools / 'protoc-gen-mypy_grpc'}",
            *(f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")),
            *sources,
        ]
    )
    if status:
        sys.exit(status)


def stale() -> list[str]:
    """Return the generated files that differ from what the generator makes of the .proto files."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = {p.name: p.read_bytes() for p in (Path(scratch) / PACKAGE).iterdir()}
    committed = {p.name: p.read_bytes() for p in (ROOT / PACKAGE).glob("*_pb2*.py*")}
    return sorted(name for name in fresh | committed if fresh.get(name) != committed.get(name))


def main() -> None:
    """Run the command line."""
    if sys.argv[1:] != ["--check"]:
        generate(ROOT)
    elif files := stale():
        sys.exit(f"generated code is stale, run `make proto`: {', '.join(files)}")


if __name__ == "__main__":
    main()
