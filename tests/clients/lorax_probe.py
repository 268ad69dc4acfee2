"""Uses lorax-client as its users do; prints what it got as one JSON object.

usage: lorax_probe.py URL ADAPTER MISSING_ADAPTER   (run with the clients' own interpreter)
"""

import asyncio
import json
import sys

from lorax import AsyncClient, Client


def summary(reply) -> dict:
    details = reply.details
    return {
        "text": reply.generated_text,
        "reason": details.finish_reason.value,
        "prompt_tokens": details.prompt_tokens,
        "generated_tokens": details.generated_tokens,
        "tokens": [token.text for token in details.tokens],
        "alternatives": [len(token.alternative_tokens or ()) for token in details.tokens],
    }


def stream_summary(events: list) -> dict:
    last = events[-1]
    shown = [event.token.text for event in events if not event.token.special]
    return {
        "joined": "".join(shown),
        "text": last.generated_text,
        "reason": last.details.finish_reason.value,
        "generated_tokens": last.details.generated_tokens,
        "events": len(events),
    }


def error_of(call) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "none"


async def asynchronous(url: str, adapter: str) -> tuple[dict, dict]:
    client = AsyncClient(url)
    whole = await client.generate("hello world", adapter_id=adapter, max_new_tokens=12)
    stream = client.generate_stream("hello world", adapter_id=adapter, max_new_tokens=12)
    return summary(whole), stream_summary([event async for event in stream])


def main(url: str, adapter: str, missing: str) -> dict:
    client = Client(url)
    request = {"adapter_id": adapter, "adapter_source": "local", "max_new_tokens": 12}
    whole = client.generate("hello world", **request)
    again = client.generate("hello world", **request, return_k_alternatives=2)
    sampled = [client.generate("hello", do_sample=True, seed=5, max_new_tokens=8) for _ in "ab"]
    async_whole, async_stream = asyncio.run(asynchronous(url, adapter))
    return {
        "base": summary(client.generate("hello world", max_new_tokens=12)),
        "whole": summary(whole),
        "again": summary(again),
        "stream": stream_summary(list(client.generate_stream("hello world", **request))),
        "async_whole": async_whole,
        "async_stream": async_stream,
        "sampled": [reply.generated_text for reply in sampled],
        "missing": error_of(lambda: client.generate("a", adapter_id=missing)),
        "missing_stream": error_of(lambda: list(client.generate_stream("a", adapter_id=missing))),
        "invalid": error_of(lambda: client.generate("a", adapter_source="s3", adapter_id="x")),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))  # noqa: T201
