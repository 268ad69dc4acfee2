"""A shard over several virtual devices, in a process of its own: SPMD is for a whole process.

    python -m tests.xla.parallel_shard DEVICES FOLDER

FOLDER holds `model/`, `adapters/` and `prompts.json`: [[adapter or "", [token, ...]], ...]. Prints
the tokens of each, and whether anything was compiled after warm-up.
"""

import json
import sys
from pathlib import Path

from loralane_server.config import ShardConfig
from loralane_server.rows import Admission

from tests.server.conftest import digest_of, running
from tests.xla.compilations import Compilations

TOKENS, ROWS = 24, 8


def main() -> None:
    devices, folder = int(sys.argv[1]), Path(sys.argv[2])
    prompts = json.loads((folder / "prompts.json").read_text())
    config = ShardConfig(
        model=str(folder / "model"),
        adapter_roots=(folder / "adapters",),
        device="xla",
        dtype="float32",
        tensor_parallel=devices,
        max_rows=ROWS,
        lanes=256,
        step_tokens=48,
        max_model_len=128,
    )
    with running(config) as listener:
        before = Compilations.so_far()
        admissions = [
            Admission(i, digest_of(listener.shard, name) if name else "", tuple(prompt), TOKENS)
            for i, (name, prompt) in enumerate(prompts)
        ]
        tokens = [
            one
            for at in range(0, len(admissions), ROWS)
            for one in listener.generate(*admissions[at : at + ROWS])
        ]
        compiled = Compilations.so_far() != before
    print(json.dumps({"tokens": tokens, "compiled": compiled}))


if __name__ == "__main__":
    main()
