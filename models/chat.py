"""Chat templates: messages in, the text a model was trained on out."""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["render_chat"]


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training masks; the text inside is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    # jinja2's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    # A template comes with a model from elsewhere: it is run in a sandbox that lets it change nothing.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment.from_string(template)


def render_chat(
    template: str | None, messages: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, str], add_generation_prompt: bool = True
) -> str:
    """Renders messages with a model's chat template.

    Args:
      template: the jinja2 template, None where the model has none.
      messages: what was said, each with "role" and "content".
      special_tokens: texts the template may ask for, such as "bos_token".
      add_generation_prompt: end with the opening of the assistant's turn.

    Raises:
      ValueError: there is no template, the messages are not messages, or the template is broken or refuses them.
    """
    if template is None:
        raise ValueError("this model has no chat template: encode a plain prompt, or use the chat variant of the model")
    if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise ValueError('messages must be a list of {"role": ..., "content": ...} that is not empty')
    try:
        return _compile(template).render(
            **{"tools": None, "documents": None, **special_tokens}, messages=messages, add_generation_prompt=add_generation_prompt
        )
    # A template computes with what it is given, so it fails like any program: None + "text", a missing key, a division by zero.
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"the chat template failed: {type(error).__name__}: {error}") from error
