"""ChatTemplate: the messages of a conversation as the text that a model continues."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from gpu_actors.errors import InvalidRequest
from gpu_actors.extras import missing

__all__ = ["PLAIN_TEMPLATE", "ChatTemplate", "load_chat_template"]

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""For a model that has never seen a conversation: a line a message."""


class ChatTemplate:
    """A Jinja template in the dialect of Transformers (``tokenizer.apply_chat_template``).

    source: the template. tokens: what else it may name, as ``bos_token``. Runs in Jinja's sandbox. Raises
    `InvalidRequest` for a template that cannot be parsed, and where Jinja (extra "serve") is missing.
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise InvalidRequest("chat_template", None, missing(error, "serve")) from error
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self._errors: type[Exception] = TemplateError
        self._tokens = dict(tokens or {})
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InvalidRequest("chat_template", source, f"is no template: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for the assistant's next message.

        messages: role and content of each. Raises `InvalidRequest` for a conversation that the template refuses, as
        most refuse two messages of the user in a row.
        """
        given = [dict(message) for message in messages]
        try:
            return self._template.render(messages=given, add_generation_prompt=True, **self._tokens)
        except InvalidRequest:
            raise
        except (self._errors, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # A template is a program of the model's authors, and may fail in their code as in any.
            shown = f"{len(given)} messages"
            raise InvalidRequest("messages", shown, f"must suit the model's chat template: {error}") from error


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of a model's folder, from chat_template.jinja or tokenizer_config.json; None where it has none.

    Of several in a list the one called "default" is taken. Raises `InvalidRequest` for a file that is not readable.
    """
    path = folder / "tokenizer_config.json"
    config: Any = {}
    try:
        if path.is_file():
            config = json.loads(path.read_text(encoding="utf-8"))
        alone = folder / "chat_template.jinja"
        source: Any = alone.read_text(encoding="utf-8") if alone.is_file() else None
    except (OSError, ValueError) as error:
        raise InvalidRequest("model", str(path), f"is not readable: {error}") from error
    if not isinstance(config, dict):
        raise InvalidRequest("model", str(path), "must hold a JSON object")
    if source is None:
        source = config.get("chat_template")
    if isinstance(source, list):
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise InvalidRequest("model", str(path), "must have a string as its chat_template")
    return ChatTemplate(source, _tokens(config))


def _tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in config.items():
        # Older files have an object where newer ones have the text alone.
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own escapes the characters of HTML.
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise InvalidRequest("messages", None, f"must suit the model's chat template: {message}")


def _now(form: str) -> str:
    return datetime.now().strftime(form)
