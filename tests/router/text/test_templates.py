"""Chats render as transformers renders them."""

import json

import pytest
from loralane_router.errors import RequestError
from loralane_router.requests import Message
from loralane_router.text.templates import ChatTemplate
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

CHATS = [
    [Message("user", "hi")],
    [Message("system", "Be <b>brief</b> & kind."), Message("user", "  hé ☃ \n")],
    [Message("user", "a"), Message("assistant", "b"), Message("user", "c'\"")],
]

TEMPLATES = {
    "llama": """{{ bos_token }}{% for message in messages %}
    {%- if loop.first and message['role'] == 'system' %}<<SYS>>{{ message.content | trim }}<</SYS>>
    {% elif message['role'] == 'user' %}
[INST] {{ message['content'] }} [/INST]
    {% else %}{{ message['content'] }}{{ eos_token }}{% endif %}
{% endfor %}""",
    "chatml": "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + m['content'] "
    "+ '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ tools }}{{ unk_token }}",
    "loopcontrols": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{{ m.content }}{% if loop.index > 1 %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ dict(a=1) }}{{ strftime_now('%%') }}",
}


def files(template) -> dict[str, bytes]:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    return {"tokenizer_config.json": json.dumps(config).encode()}


def by_transformers(template: str, chat: list[Message]) -> str:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, "x")),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )
    turns = [{"role": m.role, "content": m.content} for m in chat]
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
def test_a_chat_renders_as_in_transformers(name, chat):
    rendered = ChatTemplate(files(TEMPLATES[name])).render(chat)

    assert rendered == by_transformers(TEMPLATES[name], chat)


def test_the_default_of_several_templates_is_used():
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]

    assert ChatTemplate(files(named)).render(CHATS[0]) == "D"


def test_a_template_file_goes_before_the_settings():
    both = files("settings") | {"chat_template.jinja": b"file"}

    assert ChatTemplate(both).render(CHATS[0]) == "file"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "chat template"),
        ("{% if %}", "cannot be compiled"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "chat template"),
        ("{{ messages.__class__.__mro__ }}", "chat template"),
        ("{{ messages.append(1) }}", "chat template"),
    ],
)
def test_what_cannot_be_rendered_is_the_callers_400(template, words):
    chat_template = ChatTemplate(files(template))

    with pytest.raises(RequestError, match=words) as caught:
        chat_template.render(CHATS[0])

    assert caught.value.status.http == 400


def test_a_chat_without_messages_is_refused():
    with pytest.raises(RequestError, match="at least one message"):
        ChatTemplate(files("x")).render([])
