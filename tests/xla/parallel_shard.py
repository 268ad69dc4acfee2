"""A shard over several virtual devices, in a process of its own: SPMD is for a whole process.

    python -m tests.xla.parallel_shard DEVICES FOLDER

FOLDER holds `model/`, `adapters/` and `prompts.json`: [[adapter or "", [token, ...]], ...]. Prints
the tokens of each, how many graphs were compiled after warm-up, and how what was fetched lay.
"""

import json
import sys
from pathlib import Path

import torch
import torch_xla
from loralane_server.config import ShardConfig
from loralane_server.rows import Admission

from tests.server.conftest import digest_of, running
from tests.xla.compilations import Compilations

TOKENS, ROWS = 24, 4


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
        fetched = note_fetches()
        before = Compilations.so_far()
        admissions = [
            Admission(i, digest_of(listener.shard, name) if name else "", tuple(prompt), TOKENS)
            for i, (name, prompt) in enumerate(prompts)
        ]
        tokens = []
        for at in range(0, len(admissions), ROWS):
            tokens += listener.generate(*admissions[at : at + ROWS])
        compiled = Compilations.so_far().graphs - before.graphs
    print(json.dumps({"tokens": tokens, "compiled": compiled, "fetched": sorted(fetched)}))  # noqa: T201


def note_fetches() -> set[str]:
    """Note how every tensor lies on the devices that is fetched from now on.

    torch_xla compiles at each fetch of one that is cut, and no counter tells: that of such fetches
    counts those that are the same on every device, too, which cost nothing.
    """
    found: set[str] = set()
    spec = torch_xla._XLAC._get_xla_sharding_spec
    one, several = torch.Tensor.cpu, torch_xla._XLAC._xla_get_cpu_tensors

    def noting_one(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "xla":
            found.add(spec(tensor))
        return one(tensor)

    def noting_several(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        found.update(map(spec, tensors))
        return several(tensors)  # type: ignore[no-any-return]

    torch.Tensor.cpu = noting_one  # type: ignore[assignment,method-assign]
    torch_xla._XLAC._xla_get_cpu_tensors = noting_several
    return found


if __name__ == "__main__":
    main()
