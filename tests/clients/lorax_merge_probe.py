"""Merges adapters with lorax-client as its users do; prints what it got as one JSON object.

usage: lorax_merge_probe.py URL ADAPTER OTHER   (run with the clients' own interpreter)
"""

import asyncio
import json
import sys

from lorax import AsyncClient, Client
from lorax.types import MergedAdapters

PROMPT = "hello world"
TOKENS = 12


def error_of(call) -> list:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


async def asynchronous(url: str, merged: MergedAdapters) -> str:
    reply = await AsyncClient(url).generate(PROMPT, merged_adapters=merged, max_new_tokens=TOKENS)
    return reply.generated_text


def main(url: str, adapter: str, other: str) -> dict:
    client = Client(url)

    def merged(ids: tuple = (adapter, other), **options) -> MergedAdapters:
        return MergedAdapters(ids=list(ids), weights=[0.5, 0.5], density=0.5, **options)

    def text(asked: MergedAdapters) -> str:
        reply = client.generate(PROMPT, merged_adapters=asked, max_new_tokens=TOKENS)
        return reply.generated_text

    strategies = {
        "linear": merged(merge_strategy="linear"),
        "ties": merged(merge_strategy="ties", majority_sign_method="frequency"),
        "dare_linear": merged(merge_strategy="dare_linear"),
        "dare_ties": merged(merge_strategy="dare_ties", majority_sign_method="total"),
    }
    stream = client.generate_stream(
        PROMPT, merged_adapters=strategies["linear"], max_new_tokens=TOKENS
    )
    return {
        "texts": {name: text(asked) for name, asked in strategies.items()},
        "again": {name: text(asked) for name, asked in strategies.items()},
        "default": text(merged()),
        "async": asyncio.run(asynchronous(url, strategies["linear"])),
        "stream": "".join(event.token.text for event in stream if not event.token.special),
        "missing": error_of(lambda: text(merged(ids=(adapter, "nope")))),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))  # noqa: T201
