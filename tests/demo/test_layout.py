"""The demo's text for a terminal."""

from demo.layout import Paint, answers, printable, table

PLAIN = Paint(colours=False)


def test_long_answers_wrap_below_themselves_within_100_columns():
    text = answers([("base", "no"), ("pirate", "arr " * 40)], PLAIN)

    first, second, *more = text.splitlines()
    assert first == "  base    no"
    assert second.startswith("  pirate  arr arr")
    assert all(line.startswith("          arr") for line in more)
    assert more
    assert max(map(len, text.splitlines())) <= 100


def test_an_empty_answer_is_said_to_be_empty():
    assert answers([("base", " \n")], PLAIN) == "  base  (nothing)"


def test_a_table_has_its_names_left_and_its_numbers_right():
    text = table(("name", "ms"), [("base", "7"), ("a", "120")], PLAIN)

    assert text.splitlines() == ["  name   ms", "  base    7", "  a     120"]


def test_an_answer_cannot_steer_the_terminal():
    assert printable("a\033[2Jb\n\n c\u202e") == "a [2Jb c"


def test_colours_are_around_the_padded_name_so_that_columns_stay_aligned():
    text = answers([("a", "x"), ("long", "y")], Paint(colours=True))

    assert text.splitlines()[0] == "  \033[36ma   \033[0m  x"
