"""`logit_bias` over the whole product: it forces or bans a token in its own request only."""

import asyncio

from tests.product import World


async def complete(http, **fields: object) -> str:
    body = {"prompt": "tale", "max_tokens": 6, "temperature": 0, **fields}
    reply = (await http.post("/v1/completions", json=body)).raise_for_status().json()
    return reply["choices"][0]["text"]


async def test_a_forced_token_is_all_that_comes_and_the_neighbour_is_right(http, world: World):
    forced = world.ids("A")[-1]

    biased, plain = await asyncio.gather(
        complete(http, logit_bias={str(forced): 100}), complete(http)
    )

    assert biased == "AAAAAA"
    assert plain == world.text("", "tale", 6)


async def test_a_banned_token_does_not_come(http, world: World):
    first = world.tokens("", [world.ids("tale")], 6)[0][0]

    text = await complete(http, logit_bias={str(first): -100})

    assert text[0] != world.decode([first])
