"""Chat templates: what they may use, and what they may not do."""

import datetime

import pytest

from models.chat import render_chat

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


def render(template, messages=MESSAGES, **options):
    return render_chat(template, messages, {"bos_token": "<s>"}, **options)


def test_what_a_template_sees():
    said = "{% for m in messages %}[{{ m.role }}] {{ m['content'] }}{% endfor %}"
    template = "{{ bos_token }}" + said + "{% if add_generation_prompt %}>{% endif %}"
    assert render(template) == "<s>[user] Hi[assistant] Ho>"
    assert render(template, add_generation_prompt=False) == "<s>[user] Hi[assistant] Ho"
    assert render("{{ eos_token }}{% if tools %}tools{% endif %}") == ""


def test_blocks_leave_no_white_space():
    assert render("{% if true %}\n    {% set x = 1 %}\n{{ x }}\n{% endif %}\n") == "1\n"


def test_extensions():
    assert render("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}") == "user"
    assert render('{{ {"a": "<é>"} | tojson }}') == '{"a": "<é>"}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert render("{% generation %}{{ messages[1].content }}{% endgeneration %}!") == "Ho!"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "this model has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "the chat template failed: TemplateError: roles must alternate"),
        ("{% if %}", "the chat template failed: TemplateSyntaxError"),
        ("{{ missing.name }}", "the chat template failed: UndefinedError: 'missing' is undefined"),
        ("{{ messages[0].content + none }}", "the chat template failed: TypeError"),
        ("{{ 1 // 0 }}", "the chat template failed: ZeroDivisionError"),
        ("{{ messages[0].pop('role') }}", "the chat template failed: SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "the chat template failed: SecurityError"),
        ("{{ range(10 ** 9) | list }}", "the chat template failed: OverflowError"),
    ],
)
def test_failures(template, message):
    with pytest.raises(ValueError, match=message):
        render(template)


@pytest.mark.parametrize("messages", [[], ["Hi"], [{"content": "Hi"}]])
def test_what_is_no_message(messages):
    with pytest.raises(ValueError, match="messages must be a list of"):
        render("{{ messages }}", messages)
