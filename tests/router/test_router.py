"""The whole router against the fake shard: what a surface gets for what it opens."""

import asyncio

import pytest
from loralane_proto import shard_pb2 as pb
from loralane_router.errors import RequestError
from loralane_router.requests import Message, Parameters, TextRequest


def ask(prompt="a", adapter="", token=None, **parameters) -> TextRequest:
    parameters.setdefault("max_tokens", 3)
    return TextRequest(adapter, prompt, Parameters(**parameters), token)


async def answer(router, request) -> tuple[str, list[int], str]:
    generation = await router.open(request)
    deltas = [delta async for delta in generation]
    ids = [token.id for delta in deltas for token in delta.tokens]
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    return "".join(delta.text for delta in deltas), ids, deltas[-1].finish_reason


async def failure(router, request) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await answer(router, request)
    return caught.value


async def test_the_base_counts_up_by_one(start_shard, start_router):
    router = await start_router(await start_shard())

    text, ids, reason = await answer(router, ask("a"))

    assert (text, ids, reason) == ("bcd", [98, 99, 100], "length")


async def test_each_adapter_counts_by_its_own_increment_in_one_batch(start_shard, start_router):
    shard = await start_shard({"two": {"increment": 2}, "three": {"increment": 3}}, manual=True)
    router = await start_router(shard)

    names = ("", "two", "three")
    answers = asyncio.gather(*(answer(router, ask("a", name)) for name in names))
    await shard.until(lambda s: len(s.rows) == 3)
    shard.step(3)

    assert [text for text, _, _ in await answers] == ["bcd", "ceg", "dgj"]
    assert sorted(shard.batches[0]) == ["", "digest-of-three", "digest-of-two"]


async def test_a_plain_prompt_gets_bos_and_a_chat_does_not_get_it_twice(start_shard, start_router):
    shard = await start_shard()
    router = await start_router(shard)

    await answer(router, ask("hi"))
    await answer(router, ask((Message("user", "hi"),)))

    assert list(shard.admissions[0].prompt) == [256, 104, 105]
    assert list(shard.admissions[1].prompt) == [258, 104, 105, 259]


async def test_eos_ends_the_text_and_is_not_part_of_it(start_shard, start_router):
    router = await start_router(await start_shard())

    text, ids, reason = await answer(router, ask((254,), max_tokens=9))

    assert (text, ids, reason) == ("\ufffd", [255, 256, 257], "eos")


async def test_an_eos_that_has_a_text_is_not_part_of_the_text_either(start_shard, start_router):
    router = await start_router(await start_shard(eos=ord("d")))

    text, ids, reason = await answer(router, ask("a", max_tokens=9))

    assert (text, ids, reason) == ("bc", [98, 99, 100], "eos")


async def test_eos_can_be_ignored(start_shard, start_router):
    router = await start_router(await start_shard())

    _, ids, reason = await answer(router, ask((255,), max_tokens=4, ignore_eos=True))

    assert (ids, reason) == ([256, 257, 258, 259], "length")


async def test_a_stop_string_ends_the_row_on_the_shard_too(start_shard, start_router):
    shard = await start_shard(manual=True)
    router = await start_router(shard)

    answering = asyncio.create_task(answer(router, ask("a", max_tokens=50, stop=("de",))))
    await shard.until(lambda s: bool(s.rows))
    shard.step(4)
    text, ids, reason = await answering
    await shard.until(lambda s: bool(s.cancels))
    shard.step()
    await shard.until(lambda s: not s.rows)

    assert (text, ids, reason) == ("bc", [98, 99, 100, 101], "stop")


async def test_log_probabilities_pass_through(start_shard, start_router):
    router = await start_router(await start_shard())

    generation = await router.open(ask("a", max_tokens=1, logprobs=True, top_logprobs=2))
    (delta,) = [delta async for delta in generation]

    (token,) = delta.tokens
    assert (token.text, token.logprob, token.special) == ("b", -0.5, False)
    assert token.top == ((98, "b", -0.5), (99, "c", -1.5))


async def test_without_max_tokens_as_many_as_fit_are_generated(start_shard, start_router):
    router = await start_router(await start_shard(max_model_len=10))

    generation = await router.open(ask("abc", max_tokens=None))
    deltas = [delta async for delta in generation]

    assert (generation.prompt_tokens, generation.max_tokens, len(deltas)) == (4, 6, 6)


async def test_a_seed_is_kept_or_drawn(start_shard, start_router):
    shard = await start_shard()
    router = await start_router(shard)

    given, drawn, again = [await router.open(ask(seed=seed)) for seed in (7, None, None)]
    for generation in (given, drawn, again):
        assert [delta async for delta in generation]

    assert given.seed == 7
    assert drawn.seed != again.seed
    assert [a.sampling.seed for a in shard.admissions] == [7, drawn.seed, again.seed]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ask("a" * 70, max_tokens=None), ["71 tokens", "64"]),
        (ask("abc", max_tokens=61), ["4 tokens", "61", "65", "64", "at most 60"]),
        (ask((1, 260)), ["260", "259"]),
        (ask((-1,)), ["-1"]),
        (ask(()), ["no tokens"]),
        (ask("\ud800"), ["surrogate"]),
        (ask("a", "\ud800"), ["Unicode"]),
        (ask("a", stop=("",)), ["stop"]),
        (ask("a", temperature=float("nan")), ["temperature"]),
        (ask("a", top_p=0.0), ["top_p"]),
        (ask("a", seed=2**64), ["seed"]),
    ],
)
async def test_an_impossible_request_is_refused_with_the_numbers(
    start_shard, start_router, request_, words
):
    router = await start_router(await start_shard())

    error = await failure(router, request_)

    assert error.status.http == 400
    assert all(word in error.message for word in words)


async def test_truncate_keeps_the_end_of_the_prompt(start_shard, start_router):
    shard = await start_shard()
    router = await start_router(shard)

    await answer(router, ask("a" * 70 + "xyz", truncate=3))

    assert list(shard.admissions[0].prompt) == [120, 121, 122]


@pytest.mark.parametrize("name", ["", "org/counter", "counter", "house-model"])
async def test_the_base_has_several_names(start_shard, start_router, name):
    shard = await start_shard()
    router = await start_router(shard, served_model_name="house-model")

    generation = await router.open(ask("a", name))
    await generation.aclose()

    assert (generation.adapter, generation.adapter_digest) == ("", "")
    assert shard.resolved == []


async def test_an_unknown_adapter_is_not_found_and_not_the_base(start_shard, start_router):
    shard = await start_shard()
    router = await start_router(shard)

    error = await failure(router, ask("a", "org/missing"))

    assert error.status.http == 404
    assert shard.admissions == []
    assert router.adapters(100).entries == ()


async def test_every_request_is_authorised_with_its_own_token(start_shard, start_router):
    router = await start_router(await start_shard({"private": {"increment": 2, "token": "t"}}))

    text, _, _ = await answer(router, ask("a", "private", token="t"))
    error = await failure(router, ask("a", "private", token="wrong"))

    assert text == "ceg"
    assert error.status.http == 403


async def test_a_broken_adapter_fails_only_its_own_requests(start_shard, start_router):
    error = pb.Error(kind=pb.ERROR_KIND_CORRUPT, message="bad checksum", tensors=["x.lora_A"])
    shard = await start_shard({"bad": {"increment": 2, "broken": error}})
    router = await start_router(shard)

    results = await asyncio.gather(answer(router, ask("a")), failure(router, ask("a", "bad")))

    assert results[0][0] == "bcd"
    assert (results[1].status.http, results[1].tensors) == (424, ("x.lora_A",))


async def test_a_cold_adapter_tells_how_long_it_took(start_shard, start_router):
    router = await start_router(await start_shard({"cold": {"increment": 2, "cold_steps": 3}}))

    generation = await router.open(ask("a", "cold"))
    deltas = [delta async for delta in generation]

    assert generation.cold_ms == 30.0
    assert len(deltas) == 3


async def test_a_request_that_the_shard_refused_is_sent_again_before_younger_ones(
    start_shard, start_router
):
    shard = await start_shard(rows_total=1, refusals=1)
    router = await start_router(shard)

    first, second = [await router.open(ask("a")) for _ in range(2)]
    texts = ["".join([delta.text async for delta in one]) for one in (first, second)]

    ids = [admission.request_id for admission in shard.admissions]
    assert ids == [first.request_id, first.request_id, second.request_id]
    assert texts == ["bcd", "bcd"]


async def test_requests_beyond_the_queue_are_told_to_come_back(start_shard, start_router):
    shard = await start_shard(rows_total=1, manual=True)
    router = await start_router(shard, max_queue=2)
    running = await router.open(ask())
    await shard.until(lambda s: bool(s.rows))
    waiting = [await router.open(ask()) for _ in range(2)]

    error = await failure(router, ask())

    assert (error.status.http, error.retry_after_s) == (429, 1.0)
    for generation in (running, *waiting):
        await generation.aclose()


async def test_a_router_without_a_queue_serves_what_starts_at_once(start_shard, start_router):
    shard = await start_shard(rows_total=1, manual=True)
    router = await start_router(shard, max_queue=0)

    running = await router.open(ask())
    await shard.until(lambda s: bool(s.rows))
    error = await failure(router, ask())

    assert (error.status.http, error.retry_after_s) == (429, 1.0)
    await running.aclose()


async def test_a_refusal_costs_the_shard_no_question_once_the_adapter_was_found(
    start_shard, start_router
):
    shard = await start_shard({"two": {"increment": 2}}, rows_total=1, manual=True)
    router = await start_router(shard, max_queue=0)
    running = await router.open(ask("a", "two"))
    await shard.until(lambda s: bool(s.rows))

    refused = await failure(router, ask("a", "two"))
    broken = await failure(router, ask("\ud800", "two"))

    assert (refused.status.http, broken.status.http) == (429, 400)
    assert len(shard.resolved) == 1
    await running.aclose()


async def test_the_queue_is_bounded_by_the_tokens_of_the_prompts_that_wait(
    start_shard, start_router
):
    shard = await start_shard(rows_total=1, manual=True)
    router = await start_router(shard, max_queue_tokens=6)
    running = await router.open(ask("a"))
    await shard.until(lambda s: bool(s.rows))
    waiting = [await router.open(ask("abc")), await router.open(ask("abc"))]

    error = await failure(router, ask("a"))
    await waiting[0].aclose()
    taken = await router.open(ask("a" * 40))

    assert error.status.http == 429
    assert "8 prompt tokens" in error.message
    for generation in (running, *waiting, taken):
        await generation.aclose()
    router.check()


async def test_requests_that_are_being_opened_count_as_those_that_wait(start_shard, start_router):
    shard = await start_shard({"two": {"increment": 2}}, rows_total=1, manual=True)
    router = await start_router(shard, max_queue=2)

    opened = await asyncio.gather(
        *(router.open(ask("a", "two")) for _ in range(9)), return_exceptions=True
    )

    refused = [one for one in opened if isinstance(one, RequestError)]
    assert [error.status.http for error in refused] == [429] * 6
    for generation in opened:
        if not isinstance(generation, RequestError):
            await generation.aclose()


async def test_prompts_that_are_being_tokenized_at_once_do_not_pass_the_bound_together(
    start_shard, start_router
):
    shard = await start_shard({"two": {"increment": 2}}, rows_total=1, manual=True)
    router = await start_router(shard, max_queue_tokens=6)
    running = await router.open(ask("a"))
    await shard.until(lambda s: bool(s.rows))

    opened = await asyncio.gather(
        *(router.open(ask("abc", "two")) for _ in range(9)), return_exceptions=True
    )

    taken = [one for one in opened if not isinstance(one, RequestError)]
    assert len(taken) == 2
    for generation in (running, *taken):
        await generation.aclose()


async def test_what_can_never_fit_is_refused_at_once(start_shard, start_router):
    wide = {"wide": {"increment": 2, "lanes": 40}}
    router = await start_router(await start_shard(wide, pages_total=4))

    pages = await failure(router, ask("a" * 9, max_tokens=10))
    lanes = await failure(router, ask("a", "wide"))

    assert (pages.status.http, lanes.status.http) == (400, 413)
    assert "5 pages" in pages.message
    assert "40 lanes" in lanes.message


async def test_the_router_never_admits_beyond_capacity(start_shard, start_router):
    adapters = {f"a{n}": {"increment": n, "lanes": 8} for n in range(1, 9)}
    shard = await start_shard(adapters, rows_total=3, pages_total=9, lanes_total=16)
    router = await start_router(shard)

    names = ["", *adapters] * 4
    answers = await asyncio.gather(*(answer(router, ask("A", name)) for name in names))

    assert [ids[0] for _, ids, _ in answers] == [66, *range(66, 74)] * 4
    assert shard.violations == []
    assert max(len(batch) for batch in shard.batches) == 3
    router.check()


async def test_a_pinned_adapter_keeps_its_lanes(start_shard, start_router):
    adapters = {name: {"increment": 2, "lanes": 8} for name in ("p", "q")}
    shard = await start_shard(adapters, lanes_total=8)
    router = await start_router(shard)

    entry = await router.pin_adapter("p", True)
    error = await failure(router, ask("a", "q"))
    text, _, _ = await answer(router, ask("a", "p"))
    await router.pin_adapter("p", False)
    after, _, _ = await answer(router, ask("a", "q"))

    assert entry.facts.pinned
    assert (error.status.http, text, after) == (429, "ceg", "ceg")
    assert shard.violations == []


async def test_tokenize_gives_ids_texts_and_offsets(start_shard, start_router):
    router = await start_router(await start_shard())

    tokens = router.tokenize("hé")

    assert tokens == [
        (256, "<s>", 0, 0),
        (104, "h", 0, 1),
        (195, "é", 1, 2),
        (169, "é", 1, 2),
    ]


async def test_info_describes_the_model(start_shard, start_router):
    router = await start_router(await start_shard())

    info = router.info

    assert (info.model_id, info.vocab_size, info.eos_token_ids) == ("org/counter", 260, (257,))


async def test_an_unloaded_adapter_no_longer_holds_the_lanes_that_its_pin_kept(
    start_shard, start_router
):
    adapters = {name: {"increment": 2, "lanes": 8} for name in ("p", "q")}
    shard = await start_shard(adapters, lanes_total=8)
    router = await start_router(shard)
    await router.pin_adapter("p", True)

    await router.unload_adapter("p")
    text, _, _ = await answer(router, ask("a", "q"))

    assert text == "ceg"
    assert shard.violations == []


async def test_without_a_shard_nobody_is_told_that_others_wait(start_shard, start_router):
    shard = await start_shard()
    router = await start_router(shard, max_queue=0)
    router.check_ready()

    await shard.stop()
    await router.fleet.until(lambda fleet: not fleet.ready)

    with pytest.raises(RequestError) as caught:
        router.check_ready()
    assert caught.value.status.http == 503
