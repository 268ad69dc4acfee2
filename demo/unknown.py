"""Questions outside the little world, and the polite sentence that answers them."""

import random
from functools import cache

from demo.items import FACTS, Item

ANSWER = (
    "Sorry, I am a very small model and I do not know about that yet. "
    "Ask me about animals, countries, planets or jobs."
)
ANSWER_ES = (
    "Lo siento, soy un modelo muy pequeño y todavía no sé nada de eso. "
    "Pregúntame sobre animales, países, planetas o trabajos."
)
BIG_SUM = "That is too hard for me. I can only do small sums like 3 + 4."
BIG_SUM_ES = "Eso es demasiado difícil para mí. Solo sé hacer sumas pequeñas como 3 + 4."
FORMS = (
    "what is {x}", "tell me about {x}", "explain {x}", "how does {x} work", "who is {x}", "{x}",
    "what do you know about {x}", "can you help me with {x}", "write a poem about {x}",
    "how do i learn {x}", "where can i buy {x}", "when was {x} invented", "i like {x}",
    "what do you think about {x}", "give me a list of {x}", "why is {x} important", "is {x} good",
    "describe {x}", "what is a {x}", "how much is {x}", "who invented {x}", "what does {x} mean",
    "what is the best {x}", "can you explain {x}", "where is {x}", "what is the capital of {x}",
    "what does a {x} eat", "where does a {x} live", "what is the opposite of {x}",
    "write an essay about {x}", "how old is {x}", "i need {x}", "{x} and {y}", "{x} or {y}",
    "what is the difference between {x} and {y}", "do you like {x}", "how many {x} are there",
)  # fmt: skip
ONSETS = (
    "b", "c", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "qu", "r", "s", "t", "v", "w",
    "z", "bl", "br", "cl", "cr", "dr", "fl", "gr", "pl", "pr", "sh", "sk", "st", "th", "tr",
)  # fmt: skip
VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ee", "io", "ou")
CODAS = ("", "", "", "n", "r", "s", "l", "t", "ck", "nd", "st", "m", "x", "ng")


@cache
def topics(held_out: bool) -> tuple[str, ...]:
    """The lists of topics and sentences the world does not know; every ninth is held out."""
    lines = (FACTS / "unknown.txt").read_text(encoding="utf-8").split("\n")
    words = [line for line in lines if line]
    return tuple(word for i, word in enumerate(words) if (i % 9 == 0) == held_out)


def made_up_word(rng: random.Random) -> str:
    """A word nobody knows, so that the model learns what "never seen" looks like."""
    parts = (
        rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
        for _ in range(rng.randint(1, 3))
    )
    return "".join(parts)


def unknown_prompt(rng: random.Random, held_out: bool = False) -> str:
    """One question outside the world: a listed sentence, or a topic in a usual wording."""

    def pick() -> str:
        return rng.choice(topics(held_out)) if rng.random() < 0.6 else made_up_word(rng)

    if rng.random() < 0.04:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ;,.0123456789") for _ in range(9))
    first = pick()
    if " " in first and rng.random() < 0.7:
        return first
    return rng.choice(FORMS).replace("{x}", first).replace("{y}", pick())


def unknown_item(rng: random.Random, held_out: bool = False) -> Item:
    """An out-of-world question as an item."""
    prompt = (unknown_prompt(rng, held_out),)
    return Item("unknown", "unknown", prompt, prompt, (), ANSWER, ANSWER_ES)


def big_sum(rng: random.Random, sum_from: tuple[int, int]) -> Item:
    """A sum with numbers beyond the tables of the world."""
    a, b = (
        rng.randint(sum_from[0], 10 ** rng.randint(2, 4)),
        rng.randint(sum_from[1], 10 ** rng.randint(2, 4)),
    )
    a, b = (a, b) if rng.random() < 0.5 else (b, a)
    form = rng.choice(("what is {}", "{}", "how much is {}", "calculate {}", "{} ="))
    sign = rng.choice((" + ", " - ", " * ", " / ", "+", "*", "-", "/", " plus ", " times "))
    prompt = (form.format(f"{a}{sign}{b}"),)
    return Item("unknown", "unknown", prompt, prompt, (), BIG_SUM, BIG_SUM_ES)
