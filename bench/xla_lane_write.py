"""How long one layer of an adapter takes into its lanes on XLA; does the pool stay in place?

    PJRT_DEVICE=CPU python -m bench.xla_lane_write [--writes 60]

A write is what `Device.write_lanes` does for one layer: stage on the host, transfer, update the
pool, and wait until that is done. The pool is that of --lanes lanes in float32.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from loralane_server.adapters.pool import LANE_PAGE, lanes_for
from loralane_server.device.seam import TargetTensors
from loralane_server.device.threads import use_threads
from loralane_server.device.xla.graphs import Graphs
from loralane_server.device.xla.lanes import XlaLanes
from loralane_server.device.xla.mesh import Mesh
from loralane_server.device.xla.writers import LaneWriter

from bench.xla_shapes import LLAMA_1B, SQUARE, Shapes

LAYERS: Final = 4


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--writes", type=int, default=60)
    parser.add_argument("--lanes", type=int, default=512)
    args = parser.parse_args(argv)
    use_threads(1)
    print(
        "| layer | adapter | MB a layer | ms, median | ms, least | host ms | in place | RSS grew |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, shapes in (("7 linears of 2048 x 2048", SQUARE), ("Llama-3.2-1B", LLAMA_1B)):
        _measure(name, shapes, args.lanes, args.writes)


def _measure(name: str, shapes: Shapes, lanes: int, writes: int) -> None:
    device = torch_xla.device()
    pool = XlaLanes(LAYERS, shapes, (min(128, lanes), lanes), torch.float32, device, Mesh())
    writer = LaneWriter(pool, torch.float32, device, slices=False)
    writer.compile(Graphs())
    for what, rank, modules in (
        ("rank 16, q_proj only", 16, ["q_proj"]),
        ("rank 16, q, k, v, o", 16, ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("rank 8, all", 8, list(shapes)),
        ("rank 16, all", 16, list(shapes)),
        ("rank 64, all", 64, list(shapes)),
    ):
        targets = _adapter(shapes, rank, modules)
        row = _timed(pool, writer, targets, rank, lanes, writes)
        print(f"| {name} | {what} | {row} |", flush=True)


def _timed(
    pool: XlaLanes,
    writer: LaneWriter,
    targets: Mapping[str, TargetTensors],
    rank: int,
    lanes: int,
    writes: int,
) -> str:
    pages = lanes_for(rank) // LANE_PAGE
    before, rss = _pointers(pool, lanes), _rss_mib()
    host: list[float] = []
    whole: list[float] = []
    for turn in range(writes):
        first = turn * pages % (lanes // LANE_PAGE - pages)
        began = time.perf_counter()
        writer.write(turn % LAYERS, range(first, first + pages), targets)
        host.append(time.perf_counter() - began)
        xm.wait_device_ops()
        whole.append(time.perf_counter() - began)
    in_place = "yes" if _pointers(pool, lanes) == before else "NO"
    size = sum(target.nbytes for target in targets.values()) / 1e6
    middle = writes // 2
    return (
        f"{size:.2f} | {sorted(whole)[middle] * 1e3:.3f} | {min(whole) * 1e3:.3f} | "
        f"{sorted(host)[middle] * 1e3:.3f} | {in_place} | {_rss_mib() - rss:.1f} MiB"
    )


def _adapter(shapes: Shapes, rank: int, modules: Sequence[str]) -> dict[str, TargetTensors]:
    return {
        module: TargetTensors(
            torch.randn(rank, shapes[module][1]), torch.randn(rank, shapes[module][0])
        )
        for module in modules
    }


def _pointers(pool: XlaLanes, lanes: int) -> list[int]:
    xm.wait_device_ops()
    return [torch_xla._XLAC._unsafe_buffer_pointer(cell.tensor) for cell in pool.cells(lanes)]


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


if __name__ == "__main__":
    main()
