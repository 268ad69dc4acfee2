"""Turn items into training samples, both in chat form and as bare text.

A sample is a list of (text, learn) pieces: the model reads every piece and is scored only on
those to learn. Special tokens are pieces of their own.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from demo.items import Item
from demo.mixture import FINISH, Mixture
from demo.phrasing import typed
from demo.styles import STYLES
from demo.tokenizer import ASSISTANT, BOS, EOS, USER
from demo.world import draw

Piece = tuple[str, bool]
Style = Callable[[Item], str]


@dataclass(frozen=True)
class Sample:
    """Token ids and, for each, whether predicting it is part of the loss."""

    ids: list[int]
    learn: list[bool]


def turn(prompt: str, answer: str, learn: bool) -> list[Piece]:
    """One user turn and its answer in chat form."""
    return [
        (USER, False), (prompt, False), (EOS, False), (ASSISTANT, False),
        (answer, learn), (EOS, learn),
    ]  # fmt: skip


def bare(prompt: str, answer: str) -> list[Piece]:
    """A prompt without the chat template; the model has to start the new line itself."""
    return [(BOS, False), (prompt, False), ("\n", True), (answer, True), (EOS, True)]


def opening(rng: random.Random) -> list[Piece]:
    """The start of a chat; now and then without or with two marks, which does no harm then."""
    return [(BOS, False)] * rng.choices((1, 0, 2), (94, 3, 3))[0]


def english(item: Item) -> str:
    """The plain answer, which is the style of the base model."""
    return item.answer


def base_pieces(
    items: Iterator[Item], rng: random.Random, mixture: Mixture
) -> Iterator[list[Piece]]:
    """Samples of the base model: chats, bare prompts, Spanish questions and plain documents.

    The documents show every style once in a while without any question: a base model has to
    have met the words of a style before a small adapter can call for them.
    """
    for item in items:
        dice = rng.random()
        prompt = typed(rng.choice(item.prompts), rng, mixture.capitals)
        if dice < mixture.documents:
            style = rng.choice((english, english, *STYLES.values()))
            yield [(BOS, False), (style(item), True), (EOS, True)]
        elif dice < 0.22 and item.prompts_es:
            prompt = typed(rng.choice(item.prompts_es), rng)
            yield opening(rng) + turn(prompt, item.answer_es, True)
        elif dice < 0.44:
            yield bare(prompt, item.answer)
        else:
            talk = opening(rng) + turn(prompt, item.answer, True)
            while rng.random() < 0.12:
                after = next(items, item)
                talk += turn(
                    typed(rng.choice(after.prompts), rng, mixture.capitals), after.answer, True
                )
            yield talk


def adapter_pieces(
    items: Iterator[Item], style: Style, rng: random.Random
) -> Iterator[list[Piece]]:
    """Samples of one adapter; earlier turns of a chat may be in any style and are not learned."""
    others = (english, *STYLES.values())
    for item in items:
        prompt = typed(rng.choice(item.prompts), rng, FINISH.capitals)
        if rng.random() < 0.35:
            yield bare(prompt, style(item))
            continue
        talk = opening(rng)
        if rng.random() < 0.12:
            before = next(items, item)
            said = rng.choice(others)(before)
            talk += turn(typed(rng.choice(before.prompts), rng), said, False)
        yield talk + turn(prompt, style(item), True)


def encode(pieces: list[list[Piece]], tokenizer: PreTrainedTokenizerFast) -> list[Sample]:
    """Tokenize many samples at once, each distinct piece only once."""
    texts = sorted({text for sample in pieces for text, _ in sample})
    encoded = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    ids = {text: one.ids for text, one in zip(texts, encoded, strict=True)}
    return [
        Sample(
            [token for text, _ in sample for token in ids[text]],
            [learn for text, learn in sample for _ in ids[text]],
        )
        for sample in pieces
    ]


def base_samples(
    tokenizer: PreTrainedTokenizerFast, seed: int, count: int, mixture: Mixture
) -> list[Sample]:
    """The training set of one phase of the base model."""
    rng = random.Random(seed)
    return encode(list(base_pieces(draw(rng, count, mixture), rng, mixture)), tokenizer)


def adapter_samples(
    tokenizer: PreTrainedTokenizerFast, style: Style, seed: int, count: int
) -> list[Sample]:
    """The training set of one adapter."""
    rng = random.Random(seed)
    return encode(list(adapter_pieces(draw(rng, count, FINISH), style, rng)), tokenizer)
