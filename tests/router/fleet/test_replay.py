"""A shard goes away in the middle: its requests go on on another, and nobody sees a seam.

`WordShard` chooses each token by everything before it, so a prompt that is replayed wrongly, a
token too many or too few, another adapter or another seed all change what follows.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import pytest
from loralane_proto import shard_pb2 as pb
from loralane_router.config import RouterConfig
from loralane_router.errors import RequestError
from loralane_router.fleet.replay import Replays
from loralane_router.queueing.entry import MOST_LOSSES
from loralane_router.requests import Delta, Parameters, TextRequest
from loralane_router.router import Router
from loralane_router.text.generation import Generation

from tests.router.conftest import FakeAdapter, FakeRow, FakeShard

ADAPTERS = {"": 0, "two": 2, "three": 3}
#: The first id of the prompt of whoever ends every shard that it comes to.
POISON = 7

Rule = Callable[[Sequence[int], int, int], int]


def letter(ids: Sequence[int], increment: int, seed: int) -> int:
    """The token behind `ids`: a letter that depends on each of them and on their number."""
    mixed = 1 + increment + 7 * (seed % 1009)
    for id in ids:
        mixed = (mixed * 31 + id) % 65521
    return ord("a") + mixed % 26


def word(prompt: Sequence[int], count: int, adapter: str = "", seed: int = 0) -> str:
    """What a request must answer."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(letter(ids, ADAPTERS[adapter], seed))
    return "".join(map(chr, ids[len(prompt) :]))


@dataclass
class WordShard(FakeShard):
    rule: Rule = letter
    #: Whether `Run` ends by itself at its next message.
    leaves: bool = False
    #: Resolving waits for it.
    may_resolve: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.may_resolve.set()
        #: Prompt and answer of every row, by request id.
        self.ids: dict[int, list[int]] = {}
        #: What ended it, if a request did.
        self.dying: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        await super().stop()
        self.rows.clear()

    async def ResolveAdapter(self, request, context):
        await self.may_resolve.wait()
        return await super().ResolveAdapter(request, context)

    async def Run(self, request_iterator, context):
        async with aclosing(super().Run(request_iterator, context)) as replies:
            async for reply in replies:
                if self.leaves:
                    self.rows.clear()
                    return
                yield reply

    def _admit(self, admission: pb.Admission) -> None:
        super()._admit(admission)
        self.ids[admission.request_id] = list(admission.prompt)
        if admission.prompt[0] == POISON:
            self.dying = asyncio.create_task(self.stop())

    def _next_token(self, row: FakeRow, reply: pb.Row, increment: int) -> None:
        if row.admission.prompt[0] == POISON:
            return
        ids = self.ids[row.admission.request_id]
        adapter = increment if row.admission.digest else 0
        row.last = self.rule(ids, adapter, row.admission.sampling.seed)
        super()._next_token(row, reply, 0)
        ids.append(row.last)
        if row.admission.want_logprobs:
            reply.tokens[0].logprob = -0.5 * len(ids)
        if not row.made - 1:
            reply.cached_tokens = len(row.admission.prompt) - 1


@dataclass
class World:
    """Shards and a router in front of them; `ask` gives the same prompt to whoever asks."""

    shards: list[WordShard]
    router: Router

    async def holder(self, generation: Generation) -> WordShard:
        """Return the shard on which a request runs, once it does."""
        waits = [asyncio.create_task(_holds(shard, generation)) for shard in self.shards]
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return done.pop().result()

    def other(self, shard: WordShard) -> WordShard:
        return next(one for one in self.shards if one is not shard)

    def waited_for_at(self, generation: Generation) -> list[WordShard]:
        """Return the shard in whose queue a request is; none while it moves or runs."""
        at = [
            link.address
            for link in self.router.fleet.links
            if generation.request_id in link.dispatcher._roster.queues
        ]
        return [shard for shard in self.shards if f"127.0.0.1:{shard.port}" in at]

    def replays(self, outcome: str) -> float:
        labels = {"outcome": outcome}
        return self.router.metrics.registry.get_sample_value("loralane_replays_total", labels) or 0

    def count(self, name: str) -> float | None:
        return self.router.metrics.registry.get_sample_value(f"loralane_{name}", {})


async def _holds(shard: WordShard, generation: Generation) -> WordShard:
    await shard.until(lambda s: generation.request_id in s.rows)
    return shard


StartWorld = Callable[..., Awaitable[World]]


@pytest.fixture
async def start_world() -> AsyncIterator[StartWorld]:
    """Start so many `WordShard`s with the given fields and a router in front of all."""
    worlds: list[World] = []

    async def start(count: int, **fields) -> World:
        shards = []
        for _ in range(count):
            adapters = {name: FakeAdapter(i) for name, i in ADAPTERS.items() if name}
            shards.append(WordShard(adapters=adapters, **{"max_model_len": 200, **fields}))
            await shards[-1].start()
        addresses = tuple(f"127.0.0.1:{shard.port}" for shard in shards)
        world = World(shards, Router(RouterConfig(shards=addresses)))
        worlds.append(world)
        await world.router.start()
        await all_ready(world)
        return world

    yield start
    for world in worlds:
        world.router.check()
        await world.router.close()
        world.router.check()
        for shard in world.shards:
            await shard.stop()
            assert shard.violations == []


async def all_ready(world: World) -> None:
    await ready_are(world, *world.shards)


async def ready_are(world: World, *shards: WordShard) -> None:
    """Return when the router finds that just these shards answer."""
    ready = {f"127.0.0.1:{shard.port}" for shard in shards}
    await until(lambda: {link.address for link in world.router.fleet.ready_links} == ready)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # leaves the processor to whoever connects


def ask(adapter: str = "", prompt: Sequence[int] = (1, 2, 3), **parameters) -> TextRequest:
    settings = {"max_tokens": 20, "seed": 0, **parameters}
    return TextRequest(adapter, tuple(prompt), Parameters(**settings), "secret")


async def deltas_of(generation: Generation, count: int) -> list[Delta]:
    return [await anext(aiter(generation)) for _ in range(count)]


async def rest_of(generation: Generation) -> str:
    return "".join([delta.text async for delta in generation])


async def failure_of(generation: Generation) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await rest_of(generation)
    assert [delta async for delta in generation] == [], "one error, and nothing behind it"
    return caught.value


@pytest.mark.parametrize("adapter", ADAPTERS)
async def test_a_stream_goes_on_on_another_shard_where_it_was_cut(start_world, adapter):
    world = await start_world(2, manual=True)
    generation = await world.router.open(ask(adapter, seed=5))
    first = await world.holder(generation)
    first.step(3)
    begun = await deltas_of(generation, 3)

    await first.stop()
    second = await world.holder(generation)
    second.step(17)
    rest = [delta async for delta in generation]

    assert second is not first
    text = "".join(delta.text for delta in [*begun, *rest])
    assert text == word((1, 2, 3), 20, adapter, 5)
    assert [len(delta.tokens) for delta in rest] == [1] * 17
    assert rest[-1].finish_reason == "length"
    (again,) = second.admissions
    assert bytes(again.prompt[3:]).decode() == text[:3]
    assert (again.max_tokens, again.sampling.seed) == (17, 5)
    assert world.replays("moved") == 1


async def test_a_request_may_be_cut_again_and_again_while_it_gets_on(start_world):
    world = await start_world(2, manual=True, pages_total=99)
    generation = await world.router.open(ask(max_tokens=5 * 16 + 1))
    begun: list[Delta] = []

    for _ in range(5):
        shard = await world.holder(generation)
        shard.step(16)
        begun += await deltas_of(generation, 16)
        await shard.stop()
        last = await world.holder(generation)
        await shard.start()
        await all_ready(world)
    last.step()

    text = "".join(delta.text for delta in begun) + await rest_of(generation)
    assert text == word((1, 2, 3), 81)


async def test_what_a_client_is_told_and_what_is_counted_is_of_one_request(start_world):
    world = await start_world(2, manual=True)
    generation = await world.router.open(ask("two"))
    first = await world.holder(generation)
    first.step(2)
    begun = await deltas_of(generation, 2)
    told = told_of(generation)
    shares = world.router.fleet.shares
    flow = shares.flow_of(None, "two", "digest-of-two")
    paid = shares.counter(flow)

    world.other(first).adapters["two"].cold_steps = 1
    await first.stop()
    second = await world.holder(generation)
    paid_again = shares.counter(flow)
    second.step(19)
    await rest_of(generation)

    assert len(begun) == 2
    assert paid_again == paid > 0
    assert told_of(generation) == told == (3, 2, 20, generation.queue_s, 0.0)
    assert world.count("prompt_tokens_total") == 3
    assert world.count("generated_tokens_total") == 20
    assert world.count("time_to_first_token_seconds_count") == 1
    assert world.count("queue_seconds_count") == 1
    assert world.count("adapter_cold_seconds_count") == 0
    (usage, _) = world.router.metrics.usage.rows()
    assert (usage.usage.requests, usage.usage.prompt_tokens) == (1, 3)
    assert (usage.usage.generated_tokens, usage.usage.cold_starts) == (20, 0)


def told_of(generation: Generation) -> tuple[int, int, int, float, float]:
    return (
        generation.prompt_tokens,
        generation.cached_tokens,
        generation.max_tokens,
        generation.queue_s,
        generation.cold_ms,
    )


@pytest.mark.parametrize("cut", [4, 5, 6, 7])
async def test_a_stop_string_may_lie_across_the_cut(start_world, cut):
    expected = word((1, 2, 3), 20)
    world = await start_world(2, manual=True)
    generation = await world.router.open(ask(stop=(expected[4:8],)))
    first = await world.holder(generation)
    first.step(cut)
    await until(lambda: len(generation._deltas) == cut)

    await first.stop()
    second = await world.holder(generation)
    second.step(20)
    rest = [delta async for delta in generation]

    assert "".join(delta.text for delta in rest) == expected[:4]
    assert rest[-1].finish_reason == "stop"
    await second.until(lambda s: not s.rows)


async def test_a_character_of_several_bytes_may_lie_across_the_cut(start_world):
    script = "aé日本👍".encode()

    def next_byte(ids: Sequence[int], increment: int, seed: int) -> int:
        return script[(len(ids) - 1) % len(script)]

    for cut in range(1, len(script)):
        world = await start_world(2, manual=True, rule=next_byte)
        generation = await world.router.open(ask(prompt=(1,), max_tokens=len(script)))
        first = await world.holder(generation)
        first.step(cut)
        begun = await deltas_of(generation, cut)
        await first.stop()
        (await world.holder(generation)).step(len(script))
        rest = await rest_of(generation)

        assert "".join(delta.text for delta in begun) + rest == script.decode()


async def test_log_probabilities_are_those_of_the_positions(start_world):
    world = await start_world(2, manual=True)
    generation = await world.router.open(ask(logprobs=True, top_logprobs=1, max_tokens=8))
    first = await world.holder(generation)
    first.step(3)
    deltas = await deltas_of(generation, 3)

    await first.stop()
    (await world.holder(generation)).step(5)
    deltas += [delta async for delta in generation]

    tokens = [token for delta in deltas for token in delta.tokens]
    assert [token.logprob for token in tokens] == [-0.5 * (4 + n) for n in range(8)]
    assert [token.top[0][0] for token in tokens] == [token.id for token in tokens]


async def test_an_end_token_ends_a_stream_that_was_moved(start_world):
    def ends_at_ten(ids: Sequence[int], increment: int, seed: int) -> int:
        return letter(ids, increment, seed) if len(ids) < 10 else 257

    world = await start_world(2, manual=True, rule=ends_at_ten)
    generation = await world.router.open(ask())
    first = await world.holder(generation)
    first.step(2)
    await deltas_of(generation, 2)

    await first.stop()
    (await world.holder(generation)).step(9)
    rest = [delta async for delta in generation]

    assert [len(delta.tokens) for delta in rest] == [1] * 6
    assert rest[-1].finish_reason == "eos"


async def test_those_who_wait_move_too_and_keep_their_order(start_world):
    world = await start_world(2, manual=True, rows_total=1)
    first, second = world.shards
    await second.stop()
    await ready_are(world, first)
    waiting = [await world.router.open(ask(prompt=(9, n), max_tokens=1)) for n in range(1, 6)]
    await world.holder(waiting[0])
    await second.start()
    await ready_are(world, first, second)

    await first.stop()
    second.step(9)
    texts = await asyncio.gather(*map(rest_of, waiting))

    assert texts == [word((9, n), 1) for n in range(1, 6)]
    admitted = [admission.request_id for admission in second.admissions]
    assert admitted == [generation.request_id for generation in waiting]


async def test_a_shard_that_leaves_in_order_gives_its_rows_to_another(start_world):
    world = await start_world(2, manual=True)
    generation = await world.router.open(ask("three"))
    first = await world.holder(generation)
    first.step(3)
    await deltas_of(generation, 3)

    first.leaves = True
    first.step()
    second = await world.holder(generation)
    second.step(17)

    assert await rest_of(generation) == word((1, 2, 3), 20, "three")[3:]


async def test_with_no_shard_left_every_request_ends_with_one_503(start_world):
    world = await start_world(2, manual=True, rows_total=1)
    generations = [await world.router.open(ask(name)) for name in ("", "two", "", "three")]
    first = await world.holder(generations[0])
    await world.other(first).stop()
    await ready_are(world, first)

    await first.stop()
    errors = await asyncio.gather(*map(failure_of, generations))

    assert [error.status.http for error in errors] == [503] * 4
    assert all(error.retry_after_s for error in errors)
    with pytest.raises(RequestError) as caught:
        await world.router.open(ask())
    assert caught.value.status.http == 503


async def test_who_leaves_between_two_shards_is_given_to_none(start_world):
    world = await start_world(2, manual=True)
    generation = await world.router.open(ask("two"))
    first = await world.holder(generation)
    second = world.other(first)
    second.may_resolve.clear()
    await first.stop()
    await ready_are(world, second)

    await generation.aclose()
    await generation.aclose()
    second.may_resolve.set()
    other = await world.router.open(ask("two"))
    await world.holder(other)
    second.step(20)

    assert await rest_of(other) == word((1, 2, 3), 20, "two")
    assert [admission.request_id for admission in second.admissions] == [other.request_id]
    assert (world.replays("cancelled"), world.replays("moved")) == (1, 0)


async def test_closing_the_router_ends_who_is_between_two_shards(start_world):
    world = await start_world(2, manual=True)
    generation = await world.router.open(ask("two"))
    first = await world.holder(generation)
    world.other(first).may_resolve.clear()
    await first.stop()
    await ready_are(world, world.other(first))

    await world.router.close()

    assert (await failure_of(generation)).status.http == 503


async def test_nothing_is_moved_any_more_once_the_router_is_closed(start_world):
    world = await start_world(2, manual=True)
    generation = await world.router.open(ask())
    await world.holder(generation)
    links = world.router.fleet.links
    entries = [entry for link in links for entry in link.dispatcher._roster]
    replays = Replays(world.router.fleet, world.router.metrics)

    replays.close()
    replays.take_over(entries, RequestError(pb.ERROR_KIND_INTERNAL, "broken"))

    assert (await failure_of(generation)).status.http == 503
    assert len(replays) == 0


async def test_a_shard_that_dies_while_it_resolves_for_a_move_is_not_waited_for(start_world):
    world = await start_world(3, manual=True)
    generation = await world.router.open(ask("two"))
    first = await world.holder(generation)
    others = [shard for shard in world.shards if shard is not first]
    for shard in others:
        shard.may_resolve.clear()
    await first.stop()
    await ready_are(world, *others)

    await others[0].stop()
    others[1].may_resolve.set()
    await world.holder(generation)
    others[1].step(20)

    assert await rest_of(generation) == word((1, 2, 3), 20, "two")


async def test_a_request_that_ends_every_shard_is_given_up_and_the_fleet_lives(start_world):
    world = await start_world(MOST_LOSSES + 2)

    poison = await world.router.open(ask(prompt=(POISON,)))
    error = await failure_of(poison)
    text = await rest_of(await world.router.open(ask()))

    assert error.status.http == 500
    assert "3 shards in a row" in error.message
    assert sum(bool(shard.dying) for shard in world.shards) == MOST_LOSSES
    assert text == word((1, 2, 3), 20)


async def test_who_only_waited_on_shards_that_went_away_is_not_blamed(start_world):
    world = await start_world(MOST_LOSSES + 2, manual=True, rows_total=1)
    running = [await world.router.open(ask(prompt=(9, n))) for n in range(len(world.shards))]
    for generation in running:
        await world.holder(generation)
    waiting = await world.router.open(ask(max_tokens=1))

    alive = list(world.shards)
    for _ in range(MOST_LOSSES):
        await until(lambda: world.waited_for_at(waiting))
        (shard,) = world.waited_for_at(waiting)
        await shard.stop()
        alive.remove(shard)
        await ready_are(world, *alive)
    await until(lambda: world.waited_for_at(waiting))
    (shard,) = world.waited_for_at(waiting)
    for generation in running:
        await generation.aclose()
    await shard.until(lambda s: bool(s.cancels))
    shard.step(len(running) + 2)

    assert await rest_of(waiting) == word((1, 2, 3), 1)


@pytest.mark.parametrize("tokens", [0, 2])
async def test_an_adapter_that_is_another_one_elsewhere_goes_on_only_from_the_start(
    start_world, tokens
):
    world = await start_world(2, manual=True)
    generation = await world.router.open(ask("two", max_tokens=4))
    first = await world.holder(generation)
    first.step(tokens)
    begun = await deltas_of(generation, tokens)
    second = world.other(first)
    second.adapters["two"] = replace(second.adapters["two"], increment=3, digest="other")

    await first.stop()
    second.step(4)

    if tokens:
        error = await failure_of(generation)
        assert error.status.http == 503
        assert "another one" in error.message
        assert "".join(delta.text for delta in begun) == word((1, 2, 3), 2, "two")
        assert second.admissions == []
    else:
        assert await rest_of(generation) == word((1, 2, 3), 4, "three")
        assert generation.adapter_digest == "other"


async def test_an_adapter_that_the_caller_may_not_have_elsewhere_ends_it_with_the_reason(
    start_world,
):
    world = await start_world(2, manual=True)
    generation = await world.router.open(ask("two"))
    first = await world.holder(generation)
    first.step(2)
    await deltas_of(generation, 2)
    world.other(first).adapters["two"].token = "another caller's"

    await first.stop()

    assert (await failure_of(generation)).status.http == 403
    assert world.other(first).resolved[-1] == ("two", "secret")


async def test_a_shard_that_refuses_a_moved_request_is_asked_again(start_world):
    world = await start_world(2, manual=True)
    generation = await world.router.open(ask(max_tokens=4))
    first = await world.holder(generation)
    first.step(2)
    begun = await deltas_of(generation, 2)
    second = world.other(first)
    second.refusals = 2

    await first.stop()
    for count in (1, 2, 3):
        await second.until(lambda s, n=count: len(s.admissions) == n)
        second.step()
    second.step()

    text = "".join(delta.text for delta in begun) + await rest_of(generation)
    assert text == word((1, 2, 3), 4)


async def test_an_adapter_that_was_unloaded_after_a_move_is_resolved_there_once_more(start_world):
    world = await start_world(2, manual=True, rows_total=1)
    other, generation = [await world.router.open(ask(n, max_tokens=4)) for n in ("", "two")]
    first = await world.holder(generation)
    first.step(2)
    begun = await deltas_of(generation, 2)
    second = await world.holder(other)
    await first.stop()
    await second.until(lambda s: s.resolved)
    await ready_are(world, second)
    await until(lambda: world.replays("moved") == 1)
    second.unloaded.add("digest-of-two")

    second.step(9)

    text = "".join(delta.text for delta in begun) + await rest_of(generation)
    assert text == word((1, 2, 3), 4, "two")
    assert len(second.resolved) == 2


def all_requests(chance: random.Random) -> list[TextRequest]:
    return [
        ask(
            chance.choice([*ADAPTERS]),
            [chance.randrange(10, 250) for _ in range(chance.randint(1, 9))],
            max_tokens=chance.randint(1, 60),
            seed=chance.randrange(2**64),
        )
        for _ in range(24)
    ]


@dataclass
class Reader:
    """Reads one request, perhaps not to its end."""

    request: TextRequest
    leaves_after: int

    async def read(self, router: Router) -> str | RequestError:
        """Return its text, what came of it before it left, or how it failed."""
        try:
            generation = await router.open(self.request)
        except RequestError as error:
            return error
        text, count = "", 0
        try:
            async for delta in generation:
                text, count = text + delta.text, count + 1
                if count == self.leaves_after:
                    break
        except RequestError as error:
            assert self.expected(count) == text, "what came before the error is right"
            return error
        finally:
            await generation.aclose()
        return text

    def expected(self, count: int) -> str:
        request = self.request
        seed = request.parameters.seed
        return word(request.prompt, count, request.adapter, seed)

    @property
    def whole(self) -> str:
        return self.expected(min(self.request.parameters.max_tokens, self.leaves_after))


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_dies_and_when_every_request_ends_in_its_tokens_or_one_error(
    start_world, seed
):
    chance = random.Random(seed)
    world = await start_world(3, rows_total=chance.randint(1, 6), pages_total=60)
    kills = chance.randint(1, MOST_LOSSES - 1) if seed % 2 else 9
    readers = [Reader(r, chance.choice([3, 999, 999])) for r in all_requests(chance)]

    reading = [asyncio.create_task(reader.read(world.router)) for reader in readers]
    for _ in range(kills):
        await turns(chance.randrange(60))
        victim = chance.choice(world.shards)
        await victim.stop()
        world.router.check()
        await turns(chance.randrange(60))
        if seed % 2:
            await victim.start()
            await all_ready(world)
        elif chance.random() < 0.8:
            await victim.start()
    async with asyncio.timeout(50):
        ends = await asyncio.gather(*reading)

    world.router.check()
    errors = [end for end in ends if isinstance(end, RequestError)]
    texts = [(end, r.whole) for end, r in zip(ends, readers, strict=True) if isinstance(end, str)]
    assert [text for text, _ in texts] == [whole for _, whole in texts]
    assert all(e.status.http == 503 or "shards in a row" in e.message for e in errors)
    if seed % 2:
        assert errors == [], "a shard was ready all the time, and none was lost too often"
