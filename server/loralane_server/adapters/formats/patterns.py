r"""Keys of `rank_pattern` and `alpha_pattern`: a stranger's regular expression that cannot hang.

PEFT asks `re.match(rf"(.*\.)?({key})$", module)`. A backtracking engine lets a short key run for
years, so keys are compiled here to nodes that advance a *set of positions*, one bit each: the work
is at most (length of the key) x (length of the name), whatever the key says.

Supported, with the meaning they have in `re`: literals, `.`, escapes of punctuation, `\d \w \s` and
their negations, `[...]`, `( )`, `(?: )`, `|`, `* + ? {m,n}` (lazy or not: both match the same
names), `^` and `$`. Refused: everything else that `re` gives a meaning, and a quantifier inside a
quantified group.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MAX_KEY_LENGTH: Final = 256

#: From the positions that a match may have reached to those that it reaches past this node.
_Node = Callable[["_Name", int], int]

_CLASSES: Final = "dDwWsS"
_QUANTIFIER: Final = re.compile(r"\{([0-9]{0,4})(,?)([0-9]{0,4})\}")
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.]*")
_CLASS_BODY: Final = re.compile(r"(?:\\[dDwWsS\W]|[^\\\[\]])+")


class PatternError(ValueError):
    """The key uses something that is not supported; the message says what."""


@dataclass(frozen=True, slots=True)
class _Name:
    """The text to match; position i is bit i, its end bit `len(text)`."""

    text: str

    def past(self, at: int, accepts: Callable[[str], object]) -> int:
        """The positions behind those in `at` whose character is accepted."""
        reached = 0
        at &= (1 << len(self.text)) - 1
        while at:
            lowest = at & -at
            if accepts(self.text[lowest.bit_length() - 1]):
                reached |= lowest << 1
            at ^= lowest
        return reached


@dataclass(frozen=True, slots=True)
class Pattern:
    """One compiled key. `quantifiers` is what a caller should bound over a whole table."""

    key: str
    quantifiers: int
    #: None for a key without operators.
    _node: _Node | None
    #: Of a key without operators: its last segment.
    _tail: str = ""

    def matches(self, module: str) -> bool:
        r"""Whether `re.match(rf"(.*\.)?({key})$", module)` would match; `module` has no newline."""
        if self._node is None:
            # Most tables name hundreds of modules in full: most pairs end at the first of these.
            return module.endswith(self._tail) and self._is_end_of(module)
        name = _Name(module)
        start = 1 | name.past(-1, ".".__eq__)
        return bool(self._node(name, start) >> len(module))

    def _is_end_of(self, module: str) -> bool:
        start = len(module) - len(self.key)
        if start < 0 or (start > 0 and module[start - 1] != "."):
            return False
        end = module[start:]
        if end == self.key or self.key.count(".") <= end.count("."):
            return end == self.key  # each dot that stands for another character is one more
        return all(wanted in (".", char) for wanted, char in zip(self.key, end, strict=True))


def compile_key(key: str) -> Pattern:
    """Return the key in matchable form.

    Raises:
        PatternError: the key is too long, not a valid expression, or uses an unsupported construct.
    """
    if len(key) > MAX_KEY_LENGTH:
        raise PatternError(f"longer than {MAX_KEY_LENGTH} characters")
    if _PLAIN.fullmatch(key):
        return Pattern(key, 0, None, key[key.rfind(".") + 1 :])
    parser = _Parser(key)
    node = parser.alternatives()
    if parser.rest:
        raise PatternError("unbalanced )")
    return Pattern(key, parser.quantifiers, node)


class _Parser:
    """Recursive descent over one key; `rest` is what is not yet read."""

    def __init__(self, key: str) -> None:
        self.rest = key
        self.quantifiers = 0

    def take(self) -> str:
        char, self.rest = self.rest[:1], self.rest[1:]
        return char

    def alternatives(self) -> _Node:
        branches = [self.sequence()]
        while self.rest.startswith("|"):
            self.take()
            branches.append(self.sequence())
        return branches[0] if len(branches) == 1 else _either(branches)

    def sequence(self) -> _Node:
        nodes: list[_Node] = []
        while self.rest and self.rest[0] not in "|)":
            before, anchor = self.quantifiers, self.rest[0] in "^$"
            node = self.atom()
            if anchor and self.bounds() is not None:
                raise PatternError("nothing to repeat before a quantifier")
            nodes.append(self.quantified(node, nested=self.quantifiers > before))
        return _chain(nodes)

    def quantified(self, node: _Node, *, nested: bool) -> _Node:
        bounds = self.bounds()
        if bounds is None:
            return node
        if nested:
            raise PatternError("a quantifier inside a quantified group")
        if self.rest.startswith("?"):
            self.take()
        if self.rest[:1] in ("*", "+", "?") or (self.rest and _QUANTIFIER.match(self.rest)):
            raise PatternError("a quantifier on a quantifier")
        self.quantifiers += 1
        return _repeat(node, *bounds)

    def bounds(self) -> tuple[int, int | None] | None:
        """Read a quantifier, if one stands here: (least, most), most None = any number."""
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self.rest[:1])
        if simple is not None:
            self.take()
            return simple
        found = _QUANTIFIER.match(self.rest)
        if found is None or found[0] in ("{}", "{,}"):
            if self.rest.startswith("{"):
                raise PatternError("a { that is no quantifier; write \\{")
            return None
        self.rest = self.rest[found.end() :]
        least = int(found[1] or 0)
        most = (int(found[3]) if found[3] else None) if found[2] else least
        if most is not None and most < least:
            raise PatternError("a quantifier whose least is above its most")
        return least, most

    def atom(self) -> _Node:
        char = self.take()
        if char == "(":
            return self.group()
        if char == "[":
            return self.char_class()
        if char == "\\":
            return self.escape()
        if char in "*+?":
            raise PatternError(f"nothing to repeat before {char}")
        if char == "^":
            return lambda _, at: at & 1
        if char == "$":
            return lambda name, at: at & 1 << len(name.text)
        if char == "{":
            raise PatternError("a { that is no quantifier; write \\{")
        return _any_char if char == "." else _one(char.__eq__)

    def group(self) -> _Node:
        if self.rest.startswith("?:"):
            self.rest = self.rest[2:]
        elif self.rest.startswith("?"):
            raise PatternError("a (?...) group other than (?:...)")
        node = self.alternatives()
        if self.take() != ")":
            raise PatternError("missing )")
        return node

    def char_class(self) -> _Node:
        negated = "^" if self.rest.startswith("^") else ""
        body = _CLASS_BODY.match(self.rest, len(negated))
        if body is None or not self.rest.startswith("]", body.end()):
            raise PatternError("a [...] that is empty, not closed or holds an unescaped [")
        self.rest = self.rest[body.end() + 1 :]
        if any(reserved in body[0] for reserved in ("--", "&&", "||", "~~")):
            raise PatternError("a [...] with a set operation")
        try:
            return _one(re.compile(f"[{negated}{body[0]}]").match)
        except re.error as exc:
            raise PatternError(f"a [...] with a {exc.msg}") from exc

    def escape(self) -> _Node:
        char = self.take()
        if char and char in _CLASSES:
            return _one(re.compile(f"\\{char}").match)
        if not char or char.isalnum():
            raise PatternError(f"the escape \\{char}")
        return _one(char.__eq__)


def _any_char(name: _Name, at: int) -> int:
    return at << 1 & (2 << len(name.text)) - 1


def _one(accepts: Callable[[str], object]) -> _Node:
    return lambda name, at: name.past(at, accepts)


def _chain(nodes: list[_Node]) -> _Node:
    def node(name: _Name, at: int) -> int:
        for step in nodes:
            if not at:
                break
            at = step(name, at)
        return at

    return node


def _either(branches: list[_Node]) -> _Node:
    def node(name: _Name, at: int) -> int:
        reached = 0
        for branch in branches:
            reached |= branch(name, at)
        return reached

    return node


def _repeat(inner: _Node, least: int, most: int | None) -> _Node:
    def node(name: _Name, at: int) -> int:
        # Past len(name) + 1 rounds nothing changes: a round moves on or stays where it can stay.
        limit = len(name.text) + 1
        for _ in range(min(least, limit)):
            at = inner(name, at)
        reached = at
        for _ in range(limit if most is None else min(most - least, limit)):
            at = inner(name, at) & ~reached
            if not at:
                break
            reached |= at
        return reached

    return node
