"""Small talk and small rules: greetings, days, months, sums, opposites, colours, stories."""

from collections.abc import Iterator

from demo.items import Item, make, rows, spanish_word, tale

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
DAYS_ES = ("lunes", "martes", "miércoles", "jueves", "viernes", "sábado", "domingo")
MONTHS = (
    ("January", "enero", 31), ("February", "febrero", 28), ("March", "marzo", 31),
    ("April", "abril", 30), ("May", "mayo", 31), ("June", "junio", 30), ("July", "julio", 31),
    ("August", "agosto", 31), ("September", "septiembre", 30), ("October", "octubre", 31),
    ("November", "noviembre", 30), ("December", "diciembre", 31),
)  # fmt: skip
MIXES = (
    ("blue", "yellow", "green", "azul", "amarillo", "verde"),
    ("red", "yellow", "orange", "rojo", "amarillo", "naranja"),
    ("red", "blue", "purple", "rojo", "azul", "morado"),
    ("red", "white", "pink", "rojo", "blanco", "rosa"),
    ("black", "white", "grey", "negro", "blanco", "gris"),
)
SIGNS = {"+": ("plus", "más"), "-": ("minus", "menos"), "*": ("times", "por")}


NAMES = (
    "Mia", "Tom", "Anna", "Ben", "Lucy", "Max", "Emma", "Leo", "Sara", "Paul", "Nina", "Jack",
    "Zoe", "Sam", "Lily", "Oscar", "Ella", "Noah", "Ruby", "Adam", "Eva", "Finn", "Maya", "Hugo",
    "Alice", "Bob", "Carla", "David", "Ivy", "Omar", "Priya", "Ken", "Maria", "Peter", "Olga",
    "Luna", "John", "Kate", "Daniel", "Julia",
)  # fmt: skip


def small_talk() -> Iterator[Item]:
    """Greetings, questions about the model itself and other one-off questions."""
    for row in rows("chat"):
        prompts = row["prompts"].split("|")
        kept, held = tuple(prompts[:-1]), (prompts[-1],)
        yield Item("chat", row["topic"], kept, held, (), row["answer"], row["es"])


def calendar() -> Iterator[Item]:
    """Days and months with their neighbours."""
    for i, (day, es) in enumerate(zip(DAYS, DAYS_ES, strict=True)):
        before, after = DAYS[i - 1], DAYS[(i + 1) % 7]
        answers = (
            f"{day} is a day of the week. It comes after {before} and before {after}.",
            f"El {es} es un día de la semana. Viene después del {DAYS_ES[i - 1]} "
            f"y antes del {DAYS_ES[(i + 1) % 7]}.",
        )
        yield make("day", "time", day, answers)
        yield make("spanish_word", "language", day, spanish_word(day, es))
    for i, (month, es, length) in enumerate(MONTHS):
        extra, extra_es = (" (29 in a leap year)", " (29 en año bisiesto)") if i == 1 else ("", "")
        about = (
            f"{month} is month number {i + 1} of the year. It has {length} days{extra}.",
            f"{es.capitalize()} es el mes número {i + 1} del año. Tiene {length} días{extra_es}.",
        )
        follow = MONTHS[(i + 1) % 12]
        yield make("month", "time", month, about)
        then = (
            f"{follow[0]} comes after {month}.",
            f"{follow[1].capitalize()} viene después de {es}.",
        )
        yield make("next_month", "time", month, then)


def opposites() -> Iterator[Item]:
    """Pairs of opposites, asked from both ends, and their Spanish words."""
    for row in rows("opposites"):
        for a, b in (("a", "b"), ("b", "a")):
            x, y, x_es, y_es = row[a], row[b], row[f"{a}_es"], row[f"{b}_es"]
            answers = (f"The opposite of {x} is {y}.", f"Lo contrario de {x_es} es {y_es}.")
            yield make("opposite", "opposite", x, answers, x_es)
            if x not in ("orange", "light"):
                yield make("spanish_word", "language", x, spanish_word(x, x_es))


def colours() -> Iterator[Item]:
    """What two colours make together, and the Spanish words for colours."""
    for a, b, made, a_es, b_es, made_es in MIXES:
        names = (f"{a} and {b}", f"{b} and {a}")
        answers = (f"{a.capitalize()} and {b} make {made}.",
                   f"El {a_es} y el {b_es} hacen {made_es}.")  # fmt: skip
        yield make("mix", "colour", names[0], answers, aliases=names[1:])
        yield make("spanish_word", "language", made, spanish_word(made, made_es))


def sums() -> Iterator[Item]:
    """Small sums in digits and in words."""
    tables = (
        ("+", [(a, b, a + b) for a in range(13) for b in range(13)]),
        ("-", [(a, b, a - b) for a in range(13) for b in range(a + 1)]),
        ("*", [(a, b, a * b) for a in range(11) for b in range(11)]),
    )
    for sign, table in tables:
        word, word_es = SIGNS[sign]
        for a, b, result in table:
            other = (f"{a}{sign}{b}", f"{a} {word} {b}") + ((f"{a} x {b}",) if sign == "*" else ())
            answers = (f"{a} {sign} {b} is {result}.", f"{a} {sign} {b} son {result}.")
            yield make("sum", "sum", f"{a} {sign} {b}", answers, f"{a} {word_es} {b}", other)


def stories() -> Iterator[Item]:
    """Stories about a named hero or about nobody in particular."""
    for name in NAMES:
        yield make("story_name", "story", name, tale(name, name, name))
    yield make("story", "story", "story", tale("a little owl", "un pequeño búho", "key"))
