"""How long one layer of an adapter takes into its lanes on XLA; does the pool stay in place?

    PJRT_DEVICE=CPU python -m bench.xla_lane_write [--writes 200]

A write is what `Device.write_lanes` does for one layer, from tensors as the store hands them out
to lanes that the next step may read; it ends when the device is idle. The pool is that of --lanes
lanes in float32. Each of several adapters is written in turn, so no write finds its source or its
lanes in a small cache. Beside it:

    cold    the same after 30 MB were copied elsewhere: a large cache does not hold them either
    plain   a copy of the same bytes from one block of memory to another
    read    what a loading thread does to a layer before: cast, turn and check
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from loralane_server.adapters.pool import LANE_PAGE, lanes_for
from loralane_server.adapters.reading.factors import Half, serve_together
from loralane_server.backends import ABILITIES
from loralane_server.device.seam import TargetTensors
from loralane_server.device.threads import use_threads
from loralane_server.device.xla.graphs import Graphs
from loralane_server.device.xla.host_writer import HostWriter
from loralane_server.device.xla.lanes import XlaLanes
from loralane_server.device.xla.mesh import Mesh
from loralane_server.device.xla.writers import GraphWriter, LaneWriter

from bench.xla_shapes import LLAMA_1B, SQUARE, Shapes

LAYERS: Final = 4
ADAPTERS: Final = 8
_COLD_BYTES: Final = 30 << 20

#: A and B of a layer's linears, as a file holds them.
Stored = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--writes", type=int, default=200)
    parser.add_argument("--lanes", type=int, default=512)
    parser.add_argument("--graphs", action="store_true", help="as on a TPU: slow on a CPU")
    args = parser.parse_args(argv)
    use_threads(1)
    print(
        "| layer | adapter | MB a layer | ms, median | ms, least | cold ms | plain ms | read ms "
        "| in place | RSS grew |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, shapes in (("7 linears of 2048 x 2048", SQUARE), ("Llama-3.2-1B", LLAMA_1B)):
        _measure(name, shapes, args.lanes, args.writes, graphs=args.graphs)


@torch.inference_mode()  # as the engine's thread
def _measure(name: str, shapes: Shapes, lanes: int, writes: int, *, graphs: bool) -> None:
    device = torch_xla.device()
    pool = XlaLanes(LAYERS, shapes, (min(128, lanes), lanes), torch.float32, device, Mesh())
    writer = GraphWriter(pool, torch.float32, device) if graphs else HostWriter(pool)
    writer.compile(Graphs())
    for what, rank, modules in (
        ("rank 16, q_proj only", 16, ["q_proj"]),
        ("rank 16, q, k, v, o", 16, ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("rank 8, all", 8, list(shapes)),
        ("rank 16, all", 16, list(shapes)),
        ("rank 64, all", 64, list(shapes)),
    ):
        stored = [_stored(shapes, rank, modules) for _ in range(ADAPTERS)]
        row = _timed(pool, writer, stored, rank, lanes, writes)
        print(f"| {name} | {what} | {row} |", flush=True)


def _timed(
    pool: XlaLanes,
    writer: LaneWriter,
    stored: Sequence[Stored],
    rank: int,
    lanes: int,
    writes: int,
) -> str:
    pages = lanes_for(rank) // LANE_PAGE
    read = []
    adapters = []
    for each in stored:
        began = time.perf_counter()
        adapters.append(_served(each))
        read.append(time.perf_counter() - began)
    before, rss = _pointers(pool, lanes), _rss_mib()

    def write(turn: int) -> None:
        first = turn * pages % (lanes // LANE_PAGE - pages)
        writer.write(turn % LAYERS, range(first, first + pages), adapters[turn % ADAPTERS])
        xm.wait_device_ops()

    whole = [_ms(write, turn) for turn in range(writes)]
    in_place = "yes" if _pointers(pool, lanes) == before else "NO"
    grew = _rss_mib() - rss
    size = sum(target.nbytes for target in adapters[0].values())
    cold, plain = _beside(write, size, writes)
    return (
        f"{size / 1e6:.2f} | {median(whole):.3f} | {min(whole):.3f} | {cold:.3f} | {plain:.3f} | "
        f"{median(read) * 1e3:.3f} | {in_place} | {grew:.1f} MiB"
    )


def _beside(write: Callable[[int], None], size: int, writes: int) -> tuple[float, float]:
    """Return what a write takes that finds nothing in a cache, and a copy of its bytes, in ms."""
    elsewhere = torch.ones(2, _COLD_BYTES, dtype=torch.uint8)
    blocks = torch.ones(2, ADAPTERS, size, dtype=torch.uint8)

    def copy(turn: int) -> None:
        blocks[0, turn % ADAPTERS].copy_(blocks[1, turn % ADAPTERS])

    cold = []
    for turn in range(writes):
        elsewhere[0].copy_(elsewhere[1])
        cold.append(_ms(write, turn))
    return median(cold), median(_ms(copy, turn) for turn in range(writes))


def _ms(act: Callable[[int], None], turn: int) -> float:
    began = time.perf_counter()
    act(turn)
    return (time.perf_counter() - began) * 1e3


def _stored(shapes: Shapes, rank: int, modules: Sequence[str]) -> Stored:
    return {
        module: (torch.randn(rank, shapes[module][1]), torch.randn(shapes[module][0], rank).T)
        for module in modules
    }


def _served(stored: Stored) -> dict[str, TargetTensors]:
    """Return them as the store hands them out."""
    by_columns = ABILITIES["xla"].a_by_columns
    halves = []
    for module, (a, b) in stored.items():
        halves += [Half(a, module, by_columns=by_columns), Half(b, module, scale=2.0)]
    copies = serve_together(halves, torch.float32)
    pairs = zip(copies[::2], copies[1::2], strict=True)
    return {module: TargetTensors(a, b) for module, (a, b) in zip(stored, pairs, strict=True)}


def _pointers(pool: XlaLanes, lanes: int) -> list[int]:
    xm.wait_device_ops()
    return [torch_xla._XLAC._unsafe_buffer_pointer(cell.tensor) for cell in pool.cells(lanes)]


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


if __name__ == "__main__":
    main()
