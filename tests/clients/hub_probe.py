"""Uses huggingface_hub's clients as their users do; prints what it got as one JSON object.

usage: hub_probe.py URL ADAPTER MISSING_ADAPTER   (run with the clients' own interpreter)
"""

import asyncio
import json
import sys

from huggingface_hub import AsyncInferenceClient, InferenceClient, __version__

HI = [{"role": "user", "content": "hello world"}]


async def asynchronous(url: str, adapter: str) -> str:
    client = AsyncInferenceClient(model=url, token="any")
    request = {"adapter_id": adapter, "max_new_tokens": 12, "stream": True}
    stream = await client.text_generation("hello world", **request)
    text = "".join([piece async for piece in stream])
    await client.close()
    return text


def error_of(call) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "none"


def main(url: str, adapter: str, missing: str) -> dict:
    client = InferenceClient(model=url, token="any")
    request = {"adapter_id": adapter, "max_new_tokens": 12}
    chat = InferenceClient(base_url=f"{url}/v1", api_key="any")
    turns = {"model": adapter, "max_tokens": 12, "temperature": 0}
    chunks = chat.chat_completion(HI, **turns, stream=True)
    details = client.text_generation("hello world", **request, details=True).details
    return {
        "version": __version__,
        "base": client.text_generation("hello world", max_new_tokens=12),
        "whole": client.text_generation("hello world", **request),
        "stream": "".join(client.text_generation("hello world", **request, stream=True)),
        "async_stream": asyncio.run(asynchronous(url, adapter)),
        "generated_tokens": details.generated_tokens,
        "chat": chat.chat_completion(HI, **turns).choices[0].message.content,
        "chat_stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "missing": error_of(lambda: client.text_generation("a", adapter_id=missing)),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))  # noqa: T201
