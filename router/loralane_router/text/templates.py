"""Chat turns to a prompt, by the model's own Jinja template, exactly as transformers does it."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loralane_router.errors import RequestError, invalid
from loralane_router.requests import Message
from loralane_router.text.tokens import json_file

_SPECIAL_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class ChatTemplate:
    """The chat template of one model, which may have none or a broken one: told when it is used."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._tokens = _special_tokens(files)
        self._template: jinja2.Template | None = None
        self._missing = "this model has no chat template; send a plain prompt instead"
        source = _source(files)
        if source is None:
            return
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as exc:
            self._missing = f"this model's chat template cannot be compiled: {exc}"

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt that asks for the next turn.

        Raises RequestError (400) without a template, without messages, or where it refuses them.
        """
        if self._template is None:
            raise invalid(self._missing, "messages")
        if not messages:
            raise invalid("a chat needs at least one message", "messages")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(
                messages=turns,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._tokens,
            )
        except Exception as exc:  # a template is code: it can raise anything
            raise _refused(exc) from exc


def _refused(error: Exception) -> RequestError:
    return invalid(f"the model's chat template refuses these messages: {error}", "messages")


def _source(files: Mapping[str, bytes]) -> str | None:
    """Return the template's text: a file of its own goes before the tokenizer's settings."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode("utf-8", "replace")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = json_file(files, name).get("chat_template")
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template}
            template = named.get("default")
        if isinstance(template, str):
            return template
    return None


def _special_tokens(files: Mapping[str, bytes]) -> dict[str, str]:
    settings = json_file(files, "special_tokens_map.json")
    settings.update(json_file(files, "tokenizer_config.json"))
    found = {}
    for name in _SPECIAL_TOKENS:
        token = settings.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(Extension):
    """`{% generation %}` marks what the assistant says; it prints its body unchanged."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_print")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _print(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
