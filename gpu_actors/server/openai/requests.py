"""The bodies that clients send, as pydantic models.

A field that would change the answer and is not supported is refused unless its value asks for nothing. Fields that
change nothing (user, metadata, service_tier) are accepted and not used. Any unknown field is refused by name.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.server.openai.unsupported import hint_of

__all__ = [
    "UNKNOWN",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "EmbeddingRequest",
    "GenerationRequest",
    "Message",
    "StreamOptions",
    "TokenizeRequest",
]

_MOST_STOPS = 16
_LONGEST_STOP = 256
_MOST_METADATA = 16

Nothing = None | Annotated[list[Any], Field(max_length=0)]
"""The type of a list that is not supported: only null and an empty list are accepted."""


UNKNOWN = "unknown_field"
"""The type of pydantic's error for a field that a body may not have; its context has field and value."""


class _Body(BaseModel):
    # Not "forbid", which makes an error for each unknown field.
    model_config = ConfigDict(extra="allow", strict=True, frozen=True, protected_namespaces=())

    @model_validator(mode="after")
    def _knows_every_field(self) -> Self:
        for field, value in (self.model_extra or {}).items():
            raise PydanticCustomError(UNKNOWN, "unknown", {"field": field, "value": value})
        return self


def _only(nothing: Any) -> BeforeValidator:
    """Accept only null and the one value that changes nothing. (True is not 1 here, as in JSON and unlike Python.)"""

    def check(value: Any, info: ValidationInfo) -> Any:
        if value is not None and (type(value) is not type(nothing) or value != nothing):
            field = str(info.field_name)
            raise Unsupported(field, value, f"must be {json.dumps(nothing)}, or be left out; {hint_of([field])}")
        return value

    return BeforeValidator(check)


def _prompt(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(one, str | list) for one in value):
        if len(value) > 1:
            reason = f"must be one prompt a request; {hint_of(['n'])}"
            raise Unsupported("prompt", f"{len(value)} prompts", reason)
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(one) is int for one in value):
        return value
    raise InvalidRequest("prompt", value, "must be a text or a list of token ids, not an empty one")


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    reason = f"must be a string or up to {_MOST_STOPS} strings, of 1 to {_LONGEST_STOP} characters each"
    if stops is None:
        return []
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS:
        raise InvalidRequest("stop", value, reason)
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= _LONGEST_STOP:
            raise InvalidRequest("stop", stop, reason)
    return stops


def _inputs(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and texts and all(isinstance(text, int | list) for text in texts):
        raise Unsupported("input", value, "must be texts: token ids are not taken here")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("input", value, "must be a text or a list of texts, at least one")
    for index, text in enumerate(texts):
        if not text:
            raise InvalidRequest(f"input[{index}]", text, "must not be empty")
    return texts


class StreamOptions(_Body):
    """include_usage: whether the stream ends with the counts of its tokens. include_obfuscation: not used."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class GenerationRequest(_Body):
    """The fields of both kinds of completions. Every number is one of JSON: NaN and Infinity are refused."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = Field(default_factory=list)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, _only(1)] = None
    presence_penalty: Annotated[float, Field(ge=0, le=0, allow_inf_nan=False)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0, allow_inf_nan=False)] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions. logprobs: how many of the likeliest tokens to name at each position.

    echo: whether the answer begins with the prompt, and its logprobs with those of the prompt's tokens. With echo,
    ``max_tokens`` may be 0.
    """

    prompt: Annotated[str | list[int], BeforeValidator(_prompt)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: Annotated[int | None, _only(1)] = None
    echo: bool | None = None
    suffix: Annotated[str | None, _only("")] = None

    @model_validator(mode="after")
    def _asks_for_a_text(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("max_tokens", 0, "must be at least 1, unless echo is true")
        return self


def _content(value: Any) -> Any:
    """The text of a message, which is given as a text or as a list of parts."""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [value]
    texts = [part["text"] for part in parts if _is_text(part)]
    if not parts or len(texts) < len(parts):
        raise InvalidRequest("", value, 'must be a text, or a list of {"type": "text", "text": ...}')
    return "".join(texts)


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and type(part["text"]) is str
    )


class Message(_Body):
    """One message of a conversation. Fields that clients copy from an answer may be present, but null or empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Nothing = None
    annotations: Nothing = None


def _metadata(value: Any) -> Any:
    """Refuse more keys than OpenAI takes, before each of them is checked."""
    if isinstance(value, dict) and len(value) > _MOST_METADATA:
        raise InvalidRequest("metadata", f"{len(value)} keys", f"must have at most {_MOST_METADATA} keys")
    return value


class ResponseFormat(_Body):
    type: Literal["text"]


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Nothing = None
    functions: Nothing = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_metadata)] = None
    store: Annotated[bool | None, _only(False)] = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class EmbeddingRequest(_Body):
    """The body of /v1/embeddings. truncate: cut texts that are too long, in place of refusing them."""

    model: str
    input: Annotated[list[str], BeforeValidator(_inputs)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    truncate: bool = False
    user: str | None = None


class TokenizeRequest(_Body):
    """The body of /tokenize: a prompt, or messages. model: None for the model that generates."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: Annotated[bool | None, _only(True)] = None

    @model_validator(mode="after")
    def _has_one_text(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt", self.prompt, "must be given, or messages in place of it")
        return self


class DetokenizeRequest(_Body):
    """The body of /detokenize. model: None for the model that generates."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
