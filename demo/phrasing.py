"""How people really type: case, punctuation, politeness and the odd slip of a finger."""

import random

BEFORE = ("please ", "hi, ", "hey, ", "hello! ", "ok, ", "can you tell me ", "so ", "um ")
AFTER = (" please", " ?", "??", "!", "...", " thanks")
QUESTIONS = ("what", "where", "which", "how", "who", "why", "in what", "in which", "do ", "can ")


def typed(prompt: str, rng: random.Random, capitals: float = 0.02) -> str:
    """Turn a clean prompt into one of the ways a person would type it."""
    text = prompt
    if rng.random() < 0.18:
        text = rng.choice(BEFORE) + text
    dice = rng.random()
    if dice < 0.45:
        text += "?" if prompt.startswith(QUESTIONS) else "."
    elif dice < 0.55:
        text += rng.choice(AFTER)
    dice = rng.random()
    if dice < 0.50:
        text = text[0].upper() + text[1:]
    elif dice < 0.85:
        text = text.lower()
    elif dice < 0.85 + capitals:
        text = text.upper()
    return slip(text, rng) if rng.random() < 0.03 else text


def slip(text: str, rng: random.Random) -> str:
    """Drop, double or swap one letter somewhere after the first."""
    if len(text) < 6:
        return text
    at = rng.randrange(1, len(text) - 1)
    return rng.choice(
        (
            text[:at] + text[at + 1 :],
            text[:at] + text[at] + text[at:],
            text[:at] + text[at + 1] + text[at] + text[at + 2 :],
        )
    )
