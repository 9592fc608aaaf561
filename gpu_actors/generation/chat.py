"""Chat templates: the messages of a conversation as the text that a model continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gpu_actors.errors import InvalidRequest
from gpu_actors.generation.tokenizer import FolderTokenizer, Tokenizer, load_tokenizer, transformers_module

__all__ = ["Chat", "ChatTemplate", "PlainChat", "chat_template_of", "load_chat_template"]


class Chat(Protocol):
    """Makes a prompt from a conversation."""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for the assistant's next message. messages: role and content of each."""


class PlainChat:
    """Makes prompts for a model that was not trained on conversations: one line for each message."""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return "".join(f"{each['role']}: {each['content']}\n" for each in messages) + "assistant: "


class ChatTemplate:
    """A Jinja template, rendered by Transformers in a sandbox as by its ``tokenizer.apply_chat_template``.

    source: the template.
    tokens: further variables for it, such as ``bos_token``.
    Raises `InvalidRequest` for a template that cannot be parsed, and if Transformers (extra "serve") is missing.
    """

    def __init__(self, source: str, tokens: Mapping[str, Any] | None = None) -> None:
        transformers = transformers_module("chat_template", None)
        self._render = transformers.utils.chat_template_utils.render_jinja_template
        self._options = {**(tokens or {}), "chat_template": source, "add_generation_prompt": True}
        try:
            self._render(conversations=[], **self._options)
        except Exception as error:  # Jinja's, or ImportError for a Jinja that Transformers does not take
            raise InvalidRequest("chat_template", source, f"is no template: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for the assistant's next message.

        messages: role and content of each.
        Raises `InvalidRequest` for a conversation that the template refuses. Most refuse two messages of the user in a
        row.
        """
        conversation = [dict(message) for message in messages]
        try:
            texts: list[str] = self._render(conversations=[conversation], **self._options)[0]
        except Exception as error:  # a template is a program, and may raise anything
            value = f"{len(conversation)} messages"
            raise InvalidRequest("messages", value, f"must suit the model's chat template: {error}") from error
        return texts[0]


def chat_template_of(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of a folder's tokenizer, None if it has none. Of several it is the one named "default".

    Raises `InvalidRequest` for a template that cannot be parsed.
    """
    if not isinstance(tokenizer, FolderTokenizer) or not getattr(tokenizer.transformers, "chat_template", None):
        return None
    try:
        source: str = tokenizer.transformers.get_chat_template()
    except ValueError as error:
        raise InvalidRequest("chat_template", None, str(error)) from error
    return ChatTemplate(source, tokenizer.transformers.special_tokens_map)


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """`chat_template_of` the tokenizer of a model's folder. Raises `InvalidRequest`."""
    return chat_template_of(load_tokenizer(folder))
