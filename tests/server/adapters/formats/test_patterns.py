import re
import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loralane_server.adapters.formats.patterns import PatternError, compile_key

from tests.server.adapters.samples import FUZZ

MODULE = "model.layers.3.self_attn.q_proj"


@pytest.mark.parametrize(
    "key",
    [
        "q_proj",
        "self_attn.q_proj",
        "layers.3.self_attn.q_proj",
        MODULE,
        r".*\.layers\.3\..*(q_proj)$",
        r"layers\.\d+\.self_attn\.(q|v)_proj",
        r"layers.[0-9].self_attn.[qk]_proj",
        r"^model\.layers\.3\.(?:self_attn|mlp)\.q_proj",
        r"layers\.(1|3)\..+",
        r"model.{3,30}proj",
        r"layers\.3\..*?q_proj",
    ],
)
def test_keys_that_trainers_write_match(key: str) -> None:
    assert compile_key(key).matches(MODULE)
    assert re.match(rf"(.*\.)?({key})$", MODULE)


@pytest.mark.parametrize(
    "key", ["proj", "v_proj", "layers.3", "layers.[^3].+", r"\d", "q_proj.", ""]
)
def test_keys_that_mean_something_else_do_not_match(key: str) -> None:
    assert not compile_key(key).matches(MODULE)
    assert not re.match(rf"(.*\.)?({key})$", MODULE)


@pytest.mark.parametrize(
    "key",
    [
        "(a+)+",
        "(a*b?)*",
        "a**",
        "a*+",
        "$?",
        "a|^{2}",
        r"(a)\1",
        "(?=a)",
        "(?i)a",
        "(?P<n>a)",
        "(",
        ")",
        "[",
        "[a",
        "a{",
        "*",
        r"\b",
        r"\x41",
        "\\",
        "a{3,1}",
        "[a--b]",
        "[z-a]",
        "x" * 257,
    ],
)
def test_what_is_not_supported_is_refused(key: str) -> None:
    with pytest.raises(PatternError):
        compile_key(key)


def test_an_expression_that_makes_backtracking_explode_takes_no_time() -> None:
    pattern = compile_key("a*" * 60 + "b")
    started = time.perf_counter()

    matched = pattern.matches("a" * 100)

    assert not matched
    assert time.perf_counter() - started < 1


@FUZZ
@given(st.text(alphabet="ab.", max_size=5), st.text(alphabet="ab.", max_size=8))
def test_a_plain_key_matches_exactly_when_re_does(key: str, name: str) -> None:
    assert compile_key(key).matches(name) == bool(re.match(rf"(.*\.)?({key})$", name))


ATOMS = st.one_of(
    st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\w", r"\d", "^", "$", "_1"]),
    st.text(alphabet="ab.", min_size=1, max_size=3),
)
QUANTIFIED = st.tuples(
    ATOMS, st.sampled_from(["", "*", "+", "?", "{2}", "{0,2}", "{1,}", "*?"])
).map("".join)
SEQUENCES = st.lists(QUANTIFIED, max_size=4).map("".join)
GROUPS = st.tuples(SEQUENCES, SEQUENCES, SEQUENCES).map(lambda p: f"{p[0]}({p[1]}|{p[2]})")


@FUZZ
@given(st.one_of(SEQUENCES, GROUPS), st.text(alphabet="ab._1", max_size=12))
def test_it_matches_exactly_when_re_does(key: str, name: str) -> None:
    try:
        expected = re.match(rf"(.*\.)?({key})$", name)
    except re.error:
        return

    assert compile_key(key).matches(name) == bool(expected)


@FUZZ
@given(st.text(alphabet=string.printable, max_size=40), st.text(alphabet="ab.", max_size=8))
def test_any_text_is_either_refused_or_means_what_re_means(key: str, name: str) -> None:
    try:
        pattern = compile_key(key)
    except PatternError:
        return

    assert pattern.matches(name) == bool(re.match(rf"(.*\.)?({key})$", name))
