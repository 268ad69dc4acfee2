"""Threads that read adapters give way; the thread that computes steps does not."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from loralane_server.device.threads import stand_back


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness for each thread")
def test_who_stands_back_computes_alone_and_gives_way_alone() -> None:
    before = niceness()
    with ThreadPoolExecutor(1, initializer=stand_back) as readers:
        of_reader = readers.submit(niceness).result()
        threads = readers.submit(torch.get_num_threads).result()

    assert of_reader > before
    assert threads == 1
    assert niceness() == before
