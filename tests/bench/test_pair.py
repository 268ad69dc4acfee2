"""What the router says of its shards, as the failover reads it."""

from math import inf

import httpx

from bench.pair import Metrics

PAGE = """# HELP loralane_shard_up 1 while the shard answers
loralane_shard_up{shard="127.0.0.1:1"} 1.0
loralane_shard_up{shard="127.0.0.1:11"} 0.0
loralane_replays_total{outcome="moved"} 7.0
loralane_replays_total{outcome="ended"} 1.0
loralane_replays_created{outcome="moved"} 1.7e+09
"""


def metrics(page: str) -> Metrics:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=page))
    return Metrics(httpx.AsyncClient(base_url="http://router", transport=transport))


async def test_a_shard_is_up_only_where_the_router_says_so_of_just_that_address():
    assert await metrics(PAGE).up("127.0.0.1:1")
    assert not await metrics(PAGE).up("127.0.0.1:11")
    assert not await metrics(PAGE).up("127.0.0.1")


async def test_a_shard_that_never_comes_is_waited_for_no_longer_than_asked():
    assert await metrics(PAGE).wait_up("127.0.0.1:1", within_s=60) < inf
    assert await metrics(PAGE).wait_up("127.0.0.1:11", within_s=0.05) == inf


async def test_requests_that_lost_their_shard_are_told_by_what_became_of_them():
    assert await metrics(PAGE).replays() == {'outcome="moved"': 7.0, 'outcome="ended"': 1.0}
    assert await metrics("").replays() == {}
