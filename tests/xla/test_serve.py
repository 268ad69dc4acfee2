"""`loralane serve --device xla` as its users start it, on the embedded demo."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from loralane_server.assembly import DEMO
from openai import OpenAI
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.product import Served, serve, stop_cleanly

TOKENS = 24
QUESTION = "What is a fox?"
#: Few graphs to compile: short rows, few of them, and the five adapters' lanes.
SMALL = ("--max-model-len=128", "--max-rows=4", "--step-tokens=64", "--lanes=128")


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    with serve("--device=xla", "--dtype=float32", *SMALL) as served:
        yield served
        stop_cleanly(served.command)


def reference_answer(adapter: Path | None) -> str:
    """What transformers and PEFT answer, in float32."""
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32)
    adapted = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False
    )
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    out = adapted.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=TOKENS,
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def ask(demo: Served, model: str, **options: Any) -> str:
    with OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        reply = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=TOKENS,
            **options,
        )
    return str(reply.choices[0].message.content)


@pytest.mark.parametrize("name", ["", *sorted(p.name for p in (DEMO / "adapters").iterdir())])
def test_base_and_adapters_answer_like_the_reference(demo: Served, name: str) -> None:
    answer = ask(demo, name or "loralane-demo", temperature=0)

    assert answer == reference_answer(DEMO / "adapters" / name if name else None)


def test_a_seed_gives_the_same_answer_again(demo: Served) -> None:
    first, second, other = (ask(demo, "pirate", temperature=1.5, seed=seed) for seed in (5, 5, 6))

    assert first == second != other


def test_every_declared_graph_is_compiled_when_it_is_ready(demo: Served) -> None:
    page = httpx.get(f"{demo.url}/metrics").text
    samples = dict(line.rsplit(" ", 1) for line in page.splitlines() if line[:1] != "#")
    compiled, declared = (
        next(float(value) for name, value in samples.items() if name.startswith(wanted))
        for wanted in ("loralane_graphs_compiled_total", "loralane_graphs_declared")
    )

    assert compiled == declared > 0
