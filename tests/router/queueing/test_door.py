"""The bound on what waits, in front of a shard that steps when it is told to."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from loralane_router.errors import RequestError
from loralane_router.requests import Parameters, TextRequest
from loralane_router.router import Router
from loralane_router.text.generation import Generation

from tests.router.conftest import FakeShard
from tests.router.gateway.test_leaving import until

ADAPTERS = {"flood": {"increment": 2}, "quiet": {"increment": 3}, "shy": {"increment": 4}}
#: What each answers to "a" first.
FIRST = {"flood": "c", "quiet": "d", "shy": "e", "": "b"}
PLACES = 6


def ask(adapter: str, prompt: str = "a", tokens: int = 1) -> TextRequest:
    return TextRequest(adapter, prompt, Parameters(max_tokens=tokens))


async def text_of(generation: Generation) -> str:
    return "".join([delta.text async for delta in generation])


async def running(router: Router, shard: FakeShard) -> Generation:
    generation = await router.open(ask(""))
    await shard.until(lambda s: bool(s.rows))
    return generation


async def test_where_tokens_are_bounded_as_many_yield_as_have_the_tokens(start_shard, start_router):
    """Prompts have one token more than letters. They wait: 21 of the flood, 18 + 12, 6 + 14."""
    shard = await start_shard(ADAPTERS, rows_total=1, manual=True)
    router = await start_router(shard, max_queue_tokens=20)
    first = await running(router, shard)
    flood = [await router.open(ask("flood", "ab")) for _ in range(7)]

    quiet = await router.open(ask("quiet", "abcdefghijk"))
    after_quiet = sum(not generation.finished for generation in flood)
    shy = await router.open(ask("shy", "a"))
    after_shy = [not generation.finished for generation in flood]
    shard.step(20)
    await asyncio.gather(*map(text_of, [first, quiet, shy, *flood[:2]]))

    assert (after_quiet, after_shy) == (6, [True] * 2 + [False] * 5)
    with pytest.raises(RequestError, match="21 prompt tokens"):
        await text_of(flood[6])
    router.check()


async def test_who_was_begun_does_not_yield(start_shard, start_router):
    shards = [await start_shard(ADAPTERS, rows_total=rows, manual=True) for rows in (2, 1)]
    router = await start_router(*shards, max_queue=1)
    flood = [await router.open(ask("flood", tokens=9)) for _ in range(3)]
    for shard in shards:
        await shard.until(lambda s: len(s.rows) == s.rows_total)
        shard.step()
    for generation in flood:
        await anext(aiter(generation))

    await shards[0].stop()
    await router.fleet.until(lambda fleet: len(fleet.ready_links) == 1)
    await until(lambda: router.fleet.waiting == 2)
    with pytest.raises(RequestError) as caught:
        await router.open(ask("quiet"))
    shards[1].step(60)
    texts = await asyncio.gather(*map(text_of, flood))

    assert caught.value.status.http == 429
    assert texts == ["egikmoqs"] * 3
    router.check()


async def test_who_can_start_at_once_is_let_in_whoever_asks(start_shard, start_router):
    shard = await start_shard(ADAPTERS, rows_total=4)
    router = await start_router(shard, max_queue=0)
    for name in ("quiet", "flood"):
        await text_of(await router.open(ask(name)))

    burst = [router.open(ask(name)) for name in ("quiet", "flood", "flood", "flood")]
    texts = await asyncio.gather(*map(text_of, await asyncio.gather(*burst)))

    assert texts == ["d", "c", "c", "c"]
    router.check()


async def test_aliases_that_were_not_used_yet_do_not_share_one_share(start_shard, start_router):
    aliases = {f"my-{name}": name for name in ADAPTERS}
    shard = await start_shard(ADAPTERS, aliases=aliases, rows_total=1)
    router = await start_router(shard, max_queue=6)

    burst = [router.open(ask(name)) for name in ["", *aliases, *aliases]]
    texts = await asyncio.gather(*map(text_of, await asyncio.gather(*burst)))

    assert texts == ["b", "c", "d", "e", "c", "d", "e"]
    router.check()


async def test_invented_names_have_one_share_of_a_full_queue_together(start_shard, start_router):
    """With four that wait, three more may be opened: the fourth of them would be half of eight."""
    shard = await start_shard(ADAPTERS, rows_total=1, manual=True)
    router = await start_router(shard, max_queue=4)
    first = await running(router, shard)
    flood = [await router.open(ask("flood")) for _ in range(4)]

    names = [f"no/such-{number}" for number in range(20)]
    found = await asyncio.gather(*(router.open(ask(n)) for n in names), return_exceptions=True)
    shard.step(20)
    await asyncio.gather(*map(text_of, [first, *flood]))

    statuses = Counter(error.status.http for error in found)
    assert statuses == {404: 3, 429: 17}
    assert sum(name in names for name, _ in shard.resolved) == 3


@dataclass
class Sent:
    """One request of a random run."""

    adapter: str
    generation: Generation
    left: bool = False


class RandomRun:
    """A flood and others, who come and go while the shard steps now and then."""

    def __init__(self, router: Router, shard: FakeShard, seed: int) -> None:
        self.router, self.shard = router, shard
        self.rng = random.Random(seed)
        self.sent: list[Sent] = []
        self.refused: Counter[str] = Counter()

    async def open(self) -> None:
        name = self.rng.choice(["flood"] * 8 + ["quiet", "shy", "", "no/such"])
        asked = self.router.open(ask(name, tokens=self.rng.randint(1, 3)))
        (opened,) = await asyncio.gather(asked, return_exceptions=True)
        if isinstance(opened, Generation):
            self.sent.append(Sent(name, opened))
            return
        assert isinstance(opened, RequestError)
        assert opened.status.http == 429 or (name, opened.status.http) == ("no/such", 404)
        self.refused[name] += 1

    async def several(self) -> None:
        await asyncio.gather(*(self.open() for _ in range(self.rng.randint(2, 6))))

    async def leave(self) -> None:
        if here := [one for one in self.sent if not one.generation.finished]:
            one = self.rng.choice(here)
            one.left = True
            await one.generation.aclose()

    async def step(self) -> None:
        self.shard.step(self.rng.randint(1, 3))
        for _ in range(self.rng.randint(0, 30)):
            await asyncio.sleep(0)

    def check(self) -> None:
        self.router.check()
        assert self.router.fleet.waiting <= PLACES + self.shard.rows_total

    async def end(self) -> Counter[str]:
        """Let everybody end; return how many were refused after they had been accepted."""
        yielded: Counter[str] = Counter()
        self.shard.step(10_000)
        ends = (text_of(one.generation) for one in self.sent)
        for one, end in zip(
            self.sent, await asyncio.gather(*ends, return_exceptions=True), strict=True
        ):
            if one.left:
                assert end == ""
            elif isinstance(end, str):
                assert end[0] == FIRST[one.adapter]
            else:
                assert isinstance(end, RequestError)
                assert end.status.http == 429
                yielded[one.adapter] += 1
        return yielded


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_happens_everybody_accepted_ends_once(start_shard, start_router, seed):
    shard = await start_shard(ADAPTERS, rows_total=2, manual=True)
    router = await start_router(shard, max_queue=PLACES)
    run = RandomRun(router, shard, seed)

    for _ in range(80):
        await run.rng.choice([run.open, run.several, run.several, run.leave, run.step])()
        run.check()
    yielded = await asyncio.wait_for(run.end(), 20)

    assert yielded.total() <= sum(not one.left for one in run.sent)
    assert run.refused["flood"] > 0
    assert (router.fleet.waiting, router.fleet.crowd.coming) == (0, 0)
    assert not router.fleet.crowd.may_yield
    router.check()
