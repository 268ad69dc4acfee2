"""Text as it comes equals the text of all tokens at once; stop strings may span tokens."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loralane_router.text.detokenize import Detokenizer, StopStrings
from loralane_router.text.tokens import Codec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġhello", "Ġworld", "ðŁĺ", "ä½", "ł", "Ķæ", "ïĭ½", "ï¿½", "lo"]
    vocab = {token: id for id, token in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁a", "b", "▁▁", "你", "\ufffd"]
    vocab = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    tokens = ["<unk>", "▁", "▁a", "b", "▁▁c", "é"]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, "<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    tokens = ["<unk>", "un", "##do", "##ing", ".", ",", "'", "s", "n't", "do"]
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def codec(tokenizer: Tokenizer) -> Codec:
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    return Codec(files, tokenizer.get_vocab_size() + 3)


CODECS = {
    "byte-level": codec(byte_level()),
    "byte-fallback": codec(byte_fallback()),
    "metaspace": codec(metaspace()),
    "word-piece": codec(word_piece()),
}


def pieces(codec: Codec, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(codec)
    return [*(detokenizer.push(id) for id in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", CODECS)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_the_pieces_join_to_the_text_of_all_tokens(kind, data):
    codec = CODECS[kind]
    ids = data.draw(st.lists(st.integers(0, codec._vocab_size - 1), max_size=40))

    joined = "".join(pieces(codec, ids))

    assert joined == codec.decode(ids)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=12))
def test_no_piece_of_a_valid_text_holds_half_a_character(kind, text):
    codec = CODECS[kind]
    ids = [byte_id(kind, byte) for byte in text.encode()]

    found = pieces(codec, ids)

    assert not any("\ufffd" in piece for piece in found)
    assert "".join(found) == codec.decode(ids)


def byte_id(kind: str, byte: int) -> int:
    if kind == "byte-fallback":
        return 1 + byte
    tokenizer = CODECS[kind]._tokenizer
    from_bytes = {tokenizer.decode([id]): id for id in range(256)}
    if byte < 128:
        return from_bytes[chr(byte)]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    char = chr(byte) if byte in printable else chr(256 + others.index(byte))
    return tokenizer.token_to_id(char)


def test_a_character_appears_when_its_last_byte_is_there():
    ids = [byte_id("byte-level", byte) for byte in "a😀b".encode()]

    assert pieces(CODECS["byte-level"], ids) == ["a", "", "", "", "😀", "b", ""]


@pytest.mark.parametrize("garbage", range(30))
def test_a_character_behind_any_amount_of_garbage_is_whole(garbage):
    codec = CODECS["byte-level"]
    ids = [byte_id("byte-level", byte) for byte in b"\x80" * garbage + "😀é".encode()]

    assert "".join(pieces(codec, ids)) == "\ufffd" * garbage + "😀é"


def test_one_token_costs_the_same_however_long_the_text_is():
    class Counting:
        def __init__(self) -> None:
            self.decoded = 0

        def is_silent(self, token: int) -> bool:
            return False

        def is_byte(self, token: int) -> bool:
            return False

        def decode(self, ids: list[int]) -> str:
            self.decoded += len(ids)
            return CODECS["byte-level"].decode(ids)

    garbage = byte_id("byte-level", 0x80)
    for id in (byte_id("byte-level", ord("x")), garbage):
        counting = Counting()
        detokenizer = Detokenizer(counting)
        for _ in range(2000):
            detokenizer.push(id)
        assert counting.decoded < 12 * 2000


def stopped(cut: tuple[str, ...], stops: tuple[str, ...]) -> tuple[str, bool]:
    matcher = StopStrings(stops)
    text = ""
    for piece in cut:
        text += matcher.push(piece)
        if matcher.found:
            return text, True
    return text + matcher.flush(), False


def reference(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """Letter by letter: the first stop to be complete ends the text, the longest if several."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


def splits(text: str) -> list[tuple[str, ...]]:
    places = range(1, len(text))
    cuts = [c for n in range(len(text)) for c in combinations(places, n)]
    return [
        tuple(text[a:b] for a, b in zip((0, *cut), (*cut, len(text)), strict=True)) for cut in cuts
    ]


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("xaabay", ("ab",)),
        ("xaabay", ("aab", "ab")),
        ("abcabd", ("abd",)),
        ("abcde", ("bcde", "cd")),
        ("aaaa", ("aaa", "aa")),
        ("\n\nUser", ("\n\nUser:",)),
        ("no stop", ("###", "stop!")),
        ("endEND", ("END",)),
    ],
)
def test_a_stop_string_is_found_however_the_text_is_split(text, stops):
    expected = reference(text, stops)

    assert {stopped(cut, stops) for cut in splits(text)} == {expected}


@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_any_split_gives_what_letter_by_letter_gives(pieces, stops):
    assert stopped(tuple(pieces), tuple(stops)) == reference("".join(pieces), tuple(stops))


def test_text_that_could_become_a_stop_string_is_held_back():
    matcher = StopStrings(("###",))

    shown = [matcher.push(piece) for piece in ("a#", "#b", "##")]

    assert shown == ["a", "##b", ""]
    assert matcher.flush() == "##"
