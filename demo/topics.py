"""Questions about the things of the world: animals, countries, jobs, objects and planets."""

from collections.abc import Iterator

from demo.items import Item, article, make, rows, spanish_word, tale, upper_first

ALIASES = {"the United States": ("the USA", "USA", "America", "the US")}


def animals() -> Iterator[Item]:
    """Animals: what they are, home, food, colour, sound and a short story."""
    es = {row["en"]: row["es"] for row in rows("words")}
    for row in rows("animals"):
        x, lex = row["name"], row["es"]
        kind, home, food, colour = row["kind"], row["home"], row["food"], row["colour"]
        kind_es = es["fish (kind)" if kind == "fish" else kind]
        top = upper_first(lex)
        facts = {
            "animal": (
                f"{upper_first(article(x))} is {article(kind)}. It is {colour}, "
                f"lives {home} and eats {food}.",
                f"{top} es un {kind_es}. Es de color {es[colour]}, vive {es[home]} "
                f"y come {es[food]}.",
            ),
            "home": (f"The {x} lives {home}.", f"{top} vive {es[home]}."),
            "food": (f"The {x} eats {food}.", f"{top} come {es[food]}."),
            "colour": (f"The {x} is {colour}.", f"{top} es de color {es[colour]}."),
        }
        if row["sound"]:
            facts["sound"] = (f"The {x} {row['sound']}.", f"{top} {es[row['sound']]}.")
        else:
            facts["sound"] = (
                f"The {x} makes almost no sound.",
                f"{top} casi no hace ningún sonido.",
            )
        for intent, answers in facts.items():
            yield make(intent, "animal", x, answers, lex)
        one = lex.replace("el ", "un ", 1).replace("la ", "una ", 1)
        yield make("story_animal", "story", x, tale(article(x), one, x))
        yield make("spanish_word", "language", x, spanish_word(x, lex.split(" ", 1)[1]))


def countries() -> Iterator[Item]:
    """Countries: place, capital, language and food; and the way back from the capital."""
    for row in rows("countries"):
        x, lex = row["name"], row["es"]
        also = ALIASES.get(x, ())
        top, capital, capital_es = upper_first(x), row["capital"], row["capital_es"]
        be_es = "son" if row["food_es"].startswith(("los ", "las ")) else "es"
        facts = {
            "country": (
                f"{top} is a country in {row['continent']}. Its capital is {capital} "
                f"and people speak {row['language']}.",
                f"{lex} es un país de {row['continent_es']}. Su capital es {capital_es} "
                f"y se habla {row['language_es']}.",
            ),
            "capital": (
                f"The capital of {x} is {capital}.",
                f"La capital de {lex} es {capital_es}.",
            ),
            "language": (
                f"People in {x} speak {row['language']}.",
                f"En {lex} se habla {row['language_es']}.",
            ),
            "dish": (
                f"A famous food from {x} is {row['food']}.",
                f"Una comida famosa de {lex} {be_es} {row['food_es']}.",
            ),
        }
        for intent, answers in facts.items():
            yield make(intent, "country", x, answers, lex, also)
        city = (f"{capital} is the capital of {x}.", f"{capital_es} es la capital de {lex}.")
        yield make("city", "country", capital, city)


def jobs() -> Iterator[Item]:
    """Jobs: what the person does and where."""
    for row in rows("jobs"):
        x, top = row["name"], upper_first(row["es"])
        work = (
            f"{upper_first(article(x))} {row['does']} and works {row['place']}.",
            f"{top} {row['does_es']} y trabaja {row['place_es']}.",
        )
        place = (
            f"{upper_first(article(x))} works {row['place']}.",
            f"{top} trabaja {row['place_es']}.",
        )
        yield make("job", "job", x, work, row["es"])
        yield make("workplace", "job", x, place, row["es"])


def things() -> Iterator[Item]:
    """Planets, colours, food and everyday or computer things, each with one sentence."""
    for row in rows("things"):
        x = row["name"]
        bare = x.removeprefix("a ").removeprefix("an ")
        also = (bare,) if bare != x else ()
        answers = (row["desc"] + ".", row["desc_es"] + ".")
        yield make("thing", row["category"], x, answers, aliases=also)
