"""How many threads compute, and which give way: set by each thread for itself."""

import contextlib
import os
import sys
import threading
from typing import Final

import torch

#: A thread of this niceness gets about a tenth of a core for which another thread competes.
_NICENESS: Final = 10


def use_threads(count: int) -> None:
    """Let torch use `count` threads for what the calling thread computes from now on.

    Only the engine's thread should have more than one: OpenMP stops waiting threads from spinning
    as soon as all teams together have more threads than the machine has cores, and every step of a
    decoder has hundreds of short waits. Asking first makes this thread's setting its own: torch
    initialises a thread late, from what any thread set last.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


def stand_back() -> None:
    """Let the calling thread compute alone, and give way to the engine's from now on.

    For threads that read and cast adapters while rows run: an idle core is theirs, a busy one goes
    to the step. Without it each of them would take an equal share, and slow every row down. Only
    Linux has a niceness for each thread; elsewhere, or where that is not allowed, all are equal.
    """
    use_threads(1)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
