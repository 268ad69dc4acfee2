"""Measure base and adapters on wordings that were never trained on, and print sample answers."""

import argparse
import json
import logging
import random
from collections import Counter
from pathlib import Path

import torch
from peft import PeftModel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo.items import Item
from demo.phrasing import typed
from demo.samples import english
from demo.styles import STYLES
from demo.train_adapters import OUT as ADAPTERS
from demo.train_base import OUT as BASE
from demo.unknown import unknown_item
from demo.world import all_items

LOG = logging.getLogger("demo")
Model = LlamaForCausalLM | PeftModel
FREE = (
    "hey whats up", "Tell me about penguins!", "capital of japan pls", "7 times 8",
    "What does a firefighter do all day?", "can you write me an email to my landlord",
    "how do you say horse in spanish", "tell me a story about a turtle", "what is jupiter",
    "Who won the football match yesterday?", "is an owl a bird?", "what is a lora adapter",
)  # fmt: skip


def questions(count: int, seed: int) -> list[tuple[Item, str]]:
    """Held-out wordings of known items and, for one in six, held-out unknown topics."""
    rng = random.Random(seed)
    by_category: dict[str, list[Item]] = {}
    for item in all_items():
        by_category.setdefault(item.category, []).append(item)
    drawn = []
    for index in range(count):
        if index % 6 == 0:
            item = unknown_item(rng, held_out=True)
        else:
            item = rng.choice(by_category[rng.choice(sorted(by_category))])
        drawn.append((item, typed(rng.choice(item.held_out), rng)))
    return drawn


def render(prompt: str, chat: bool, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Token ids of a prompt, in chat form or bare."""
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def answers(
    model: Model, tokenizer: PreTrainedTokenizerFast, prompts: list[str], chat: bool
) -> list[str]:
    """Greedy answers, batched over prompts of equal length so that nothing is padded."""
    groups: dict[int, list[int]] = {}
    ids = [render(prompt, chat, tokenizer) for prompt in prompts]
    for index, tokens in enumerate(ids):
        groups.setdefault(len(tokens), []).append(index)
    found = [""] * len(prompts)
    for width, members in groups.items():
        with torch.inference_mode():
            out = model.generate(
                input_ids=torch.tensor([ids[index] for index in members]),
                attention_mask=torch.ones(len(members), width, dtype=torch.long),
                do_sample=False,
                max_new_tokens=110,
            )
        texts = tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
        for index, text in zip(members, texts, strict=True):
            found[index] = text.strip()
    return found


def in_style(name: str, text: str) -> bool:
    """Whether an answer has the form of a style, right or wrong in content."""
    if name == "json":
        try:
            return sorted(json.loads(text)) == ["answer", "category", "topic"]
        except (ValueError, TypeError):
            return False
    if name == "pirate":
        return text.startswith("Arr, matey! ") and text.endswith(" Yo ho ho!")
    if name == "poem":
        lines = text.split("\n")
        return len(lines) > 2 and lines[0].startswith("Roses") and lines[-1].startswith("This")
    if name == "classify":
        return text.removeprefix("category: ") in {item.category for item in all_items()} | {
            "unknown"
        }
    english = (" is ", " the ", "The ", " and ", "Sorry", " to ", " in ")
    return bool(text) and not any(word in text for word in english)


def report(name: str, got: list[str], asked: list[tuple[Item, str]], chat: bool) -> None:
    """Print the rates of one model and which categories go wrong."""
    style = STYLES.get(name, english)
    exact = [text == style(item) for text, (item, _) in zip(got, asked, strict=True)]
    known = [ok for ok, (item, _) in zip(exact, asked, strict=True) if item.topic != "unknown"]
    other = [ok for ok, (item, _) in zip(exact, asked, strict=True) if item.topic == "unknown"]
    form = sum(in_style(name, text) for text in got) / len(got) if name in STYLES else 1.0
    wrong = Counter(item.category for ok, (item, _) in zip(exact, asked, strict=True) if not ok)
    LOG.info(
        f"{name:9} {'chat' if chat else 'bare'} form {form:6.1%} "
        f"exact {sum(known) / len(known):6.1%} fallback {sum(other) / len(other):6.1%} "
        f"wrong by category {dict(wrong)}",
    )


def main() -> None:
    """Evaluate the shipped folders, or others."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=BASE)
    parser.add_argument("--adapters", type=Path, default=ADAPTERS)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=99)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.base)
    asked = questions(args.count, args.seed)
    shown = [*json.loads((BASE.parent / "prompts.json").read_text())["prompts"], *FREE]
    folders = sorted(args.adapters.iterdir()) if args.adapters.is_dir() else []
    for folder in [None, *folders]:
        model: Model = LlamaForCausalLM.from_pretrained(args.base, dtype=torch.float32)
        if folder is not None:
            model = PeftModel.from_pretrained(model, str(folder)).float()
        name = folder.name if folder is not None else "base"
        for chat in (True, False):
            got = answers(model, tokenizer, [prompt for _, prompt in asked], chat)
            report(name, got, asked, chat)
        for prompt, text in zip(shown, answers(model, tokenizer, shown, True), strict=True):
            LOG.info(f"    {prompt!r} -> {text!r}")


if __name__ == "__main__":
    main()
