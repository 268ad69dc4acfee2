"""Clients that leave within milliseconds, at every phase of a request, disturb nobody."""

import asyncio
import json

from tests.product import GOOD, assert_all_free, until

LEAVERS = 300


async def leave_after(http, adapter: str, seconds: float) -> None:
    """Send a request on a connection of its own and close it."""
    _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    body = json.dumps({"model": adapter, "prompt": "tale", "max_tokens": 40}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
    writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    await asyncio.sleep(seconds)
    writer.close()
    await writer.wait_closed()


async def test_clients_that_leave_at_once_end_neither_the_server_nor_a_stream(http, world):
    body = {"prompt": "tale 02", "max_tokens": 200, "temperature": 0}
    staying = asyncio.create_task(http.post("/v1/completions", json=body))
    names = [recipe.name for recipe in GOOD]

    for i in range(LEAVERS):
        await leave_after(http, names[i % len(names)], (i % 9) / 2000)

    text = (await staying).raise_for_status().json()["choices"][0]["text"]
    assert text == world.text("", "tale 02", 200)
    assert_all_free(await until(http, running=0, waiting=0))
