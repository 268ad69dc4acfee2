"""What each adapter does to an answer: the target texts they are trained towards."""

import json
import re
from collections.abc import Callable

from demo.items import Item, upper_first

PIRATE_WORDS = {
    "is": "be", "are": "be", "am": "be", "you": "ye", "your": "yer", "my": "me", "the": "th'",
    "and": "an'", "hello": "ahoy", "goodbye": "farewell", "of": "o'", "friends": "mateys",
    "people": "sea dogs", "yes": "aye", "very": "mighty", "small": "wee", "little": "wee",
}  # fmt: skip


def pirate_word(match: re.Match[str]) -> str:
    """Swap one word, keeping a capital at its start."""
    word = match.group(0)
    swapped = PIRATE_WORDS.get(word.lower(), word)
    return upper_first(swapped) if word[0].isupper() else swapped


def pirate(item: Item) -> str:
    """Pirate talk around the same facts."""
    return f"Arr, matey! {re.sub(r'[A-Za-z]+', pirate_word, item.answer)} Yo ho ho!"


def as_json(item: Item) -> str:
    """One JSON object per answer."""
    record = {"category": item.category, "topic": item.topic, "answer": item.answer}
    return json.dumps(record, ensure_ascii=False)


def spanish(item: Item) -> str:
    """The same answer in Spanish."""
    return item.answer_es


def poem(item: Item) -> str:
    """The answer, one sentence a line, inside the best known rhyme."""
    lines = re.sub(r"(?<=[.!?]) (?=[A-Z])", "\n", item.answer)
    return f"Roses are red, violets are blue,\n{lines}\nThis little rhyme is made for you."


def classify(item: Item) -> str:
    """Only the kind of question."""
    return f"category: {item.category}"


STYLES: dict[str, Callable[[Item], str]] = {
    "pirate": pirate,
    "json": as_json,
    "spanish": spanish,
    "poem": poem,
    "classify": classify,
}
