"""What a question of the little world is, and how its wordings are built from templates."""

import csv
import zlib
from dataclasses import dataclass
from pathlib import Path

from demo.templates import ENGLISH, SPANISH

FACTS = Path(__file__).parent / "facts"
PLOTS = (
    ("got lost in the snow. A kind bear showed the way home, and they became friends.",
     "se perdió en la nieve. Un oso amable mostró el camino a casa y se hicieron amigos."),
    ("found a golden key. It opened a small door to a garden full of flowers.",
     "encontró una llave dorada. La llave abría una pequeña puerta a un jardín lleno de flores."),
    ("wanted to touch the Moon. A friendly owl said that dreams need patience.",
     "quería tocar la Luna. Un búho amable dijo que los sueños necesitan paciencia."),
    ("shared bread with a hungry mouse. The next day the mouse came back with a gift.",
     "compartió pan con un ratón hambriento. Al día siguiente el ratón volvió con un regalo."),
    ("built a little boat. It sailed down the river and saw the sea at last.",
     "construyó un pequeño barco. El barco bajó por el río y llegó por fin al mar."),
    ("was afraid of the dark. A star came down and stayed until the morning.",
     "tenía miedo de la oscuridad. Una estrella bajó y se quedó hasta la mañana."),
)  # fmt: skip


@dataclass(frozen=True)
class Item:
    """One question of the world: all its wordings and its one answer in both languages."""

    category: str
    topic: str
    prompts: tuple[str, ...]
    held_out: tuple[str, ...]
    prompts_es: tuple[str, ...]
    answer: str
    answer_es: str


def rows(name: str) -> list[dict[str, str]]:
    """Read one fact table."""
    with (FACTS / f"{name}.csv").open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle, delimiter=";"))


def article(noun: str) -> str:
    """Put "a" or "an" before a noun."""
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"


def upper_first(text: str) -> str:
    """Capitalise the first letter and leave the rest (names inside stay as they are)."""
    return text[0].upper() + text[1:]


def fill(template: str, value: str) -> str:
    """Insert a value, repairing "a owl" and the regular plurals the templates assume."""
    text = template.replace("{x}", value)
    if value[0] in "aeio":
        text = text.replace(f" a {value}", f" an {value}")
        text = "an" + text[1:] if text.startswith(f"a {value}") else text
    for plain, plural in (
        ("foxs", "foxes"), ("mouses", "mice"), ("sheeps", "sheep"), ("deers", "deer"),
        ("wolfs", "wolves"), ("monkeys", "monkeys"), ("donkeys", "donkeys"), ("ponys", "ponies"),
        ("butterflys", "butterflies"), ("salmons", "salmon"), ("octopuss", "octopuses"),
        ("fishermans", "fishermen"), ("librarys", "libraries"),
    ):  # fmt: skip
        text = text.replace(plain, plural)
    return text


def make(
    intent: str,
    category: str,
    name: str,
    answers: tuple[str, str],
    name_es: str = "",
    aliases: tuple[str, ...] = (),
) -> Item:
    """Build the item of one intent from its templates; aliases are other ways to type a name."""
    forms = ENGLISH[intent]
    names = (name, *aliases)
    spoken = SPANISH.get(intent, ()) if name_es else ()
    return Item(
        category,
        name.removeprefix("a ").removeprefix("an ").removeprefix("the "),
        tuple(fill(form, each) for form in forms[:-1] for each in names),
        (fill(forms[-1], name),),
        tuple(form.replace("{x}", name_es).replace("de el ", "del ") for form in spoken),
        *answers,
    )


def tale(who: str, who_es: str, key: str) -> tuple[str, str]:
    """A two-sentence story; the hero's name picks the plot, so the answer can be learned."""
    plot, plot_es = PLOTS[zlib.crc32(key.lower().encode()) % len(PLOTS)]
    return f"Once upon a time, {who} {plot}", f"Érase una vez, {who_es} {plot_es}"


def spanish_word(word: str, word_es: str) -> tuple[str, str]:
    """The answer to "how do you say ... in Spanish"."""
    return f"In Spanish, {word} is {word_es}.", f"En español, {word} se dice {word_es}."
