"""How many threads compute, set by each thread for its own operations."""

import torch


def use_threads(count: int) -> None:
    """Let torch use `count` threads for what the calling thread computes from now on.

    Only the engine's thread should have more than one: OpenMP stops waiting threads from spinning
    as soon as all teams together have more threads than the machine has cores, and every step of a
    decoder has hundreds of short waits. Asking first makes this thread's setting its own: torch
    initialises a thread late, from what any thread set last.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)
