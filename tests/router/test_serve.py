"""The router process, with children that are small programs."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys

import httpx
import psutil
import pytest
from loralane_router.config import RouterConfig
from loralane_router.serve import CannotStart, bind, invitation, run
from loralane_router.shard_process import ShardEnded, ShardProcess


def child(code: str) -> list[str]:
    return [sys.executable, "-c", "import sys, time\n" + code]


async def test_a_shard_is_ready_when_it_says_so_and_other_lines_pass_through(capfd):
    code = "print('loading'); print('ready 127.0.0.1:1', flush=True); time.sleep(60)"
    shard = await ShardProcess.start(child(code))

    await shard.wait_ready()
    await shard.stop(5)

    assert "loading" in capfd.readouterr().err


async def test_a_shard_that_ends_by_itself_is_an_error_with_its_status():
    shard = await ShardProcess.start(child("sys.exit(3)"))

    with pytest.raises(ShardEnded, match="status 3"):
        await shard.wait_ended()

    await shard.stop(5)


async def test_a_shard_that_does_not_listen_is_killed():
    code = "import signal; signal.signal(15, signal.SIG_IGN); print('ready x', flush=True)\n"
    shard = await ShardProcess.start(child(code + "time.sleep(60)"))
    await shard.wait_ready()

    await shard.stop(0.05)

    with pytest.raises(ShardEnded, match=f"status {-signal.SIGKILL}"):
        await shard.wait_ended()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
def test_a_router_that_is_killed_takes_its_shard_with_it():
    code = """
import asyncio, os, signal, sys
from loralane_router.shard_process import ShardProcess

async def main():
    code = "import os, time; print('ready', os.getpid(), flush=True); time.sleep(60)"
    shard = await ShardProcess.start([sys.executable, "-c", code])
    await shard.wait_ready()
    print(shard._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)

    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(timeout=10)


async def test_serve_ends_with_1_when_its_shard_ends(caplog):
    config = RouterConfig(shards=("127.0.0.1:1",), port=0)

    status = await run(config, child("sys.exit(3)"))

    assert status == 1
    assert "status 3" in caplog.text


async def test_http_tells_loading_from_dead_and_a_signal_ends_everything_with_0():
    config = RouterConfig(shards=("127.0.0.1:1",), port=free_port())
    url = f"http://127.0.0.1:{config.port}"
    serving = asyncio.create_task(run(config, child("time.sleep(60)")))

    transport = httpx.AsyncHTTPTransport(retries=8)
    async with httpx.AsyncClient(base_url=url, transport=transport) as client:
        live = await client.get("/health/live")
        ready = await client.get("/health/ready")
        models = await client.get("/v1/models")
        refused = await client.post("/v1/completions", json={"prompt": "a"})
    os.kill(os.getpid(), signal.SIGTERM)
    status = await serving

    assert (live.status_code, ready.status_code) == (200, 503)
    assert (models.status_code, refused.status_code) == (503, 503)
    assert refused.headers["retry-after"]
    assert refused.json()["error"]["code"] == "unavailable"
    assert status == 0


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
    ],
)
def test_the_invitation_is_one_line_with_a_command_that_works(host, url):
    line = invitation(host, 8000, "org/base", ["demo"])

    assert "\n" not in line
    assert f"curl {url}/v1/completions" in line
    assert '"model": "demo"' in line


def test_a_port_that_is_taken_is_named_with_the_flag_to_change():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()

        with pytest.raises(CannotStart, match=r"try another --port$"):
            bind("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize("host", ["203.0.113.7", "no host"])
def test_an_address_that_is_not_ours_is_named_with_the_flag_to_change(host):
    with pytest.raises(CannotStart, match=r"try another --host$"):
        bind(host, 0)


def free_port() -> int:
    listener = bind("127.0.0.1", 0)
    port: int = listener.getsockname()[1]
    listener.close()
    return port


async def test_tokens_leave_at_once_on_every_connection():
    listener = bind("127.0.0.1", 0)
    options: asyncio.Queue[int] = asyncio.Queue()

    async def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        options.put_nowait(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    server = await asyncio.start_server(connected, sock=listener)
    _, writer = await asyncio.open_connection(*listener.getsockname())

    assert await options.get() != 0

    writer.close()
    server.close()
    await server.wait_closed()
