"""The bodies that clients get, as pydantic models. Their fields are OpenAI's, as its Python client reads them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, model_serializer

__all__ = [
    "ChatChoice",
    "ChatChunk",
    "ChatCompletion",
    "ChatLogprobs",
    "ChatMessage",
    "ChatToken",
    "ChunkChoice",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "Delta",
    "Embedding",
    "EmbeddingList",
    "EmbeddingUsage",
    "Finish",
    "ModelCard",
    "ModelList",
    "PromptDetails",
    "TopToken",
    "Usage",
]

Finish = Literal["stop", "length"]


class PromptDetails(BaseModel):
    """cached_tokens: tokens of the prompt that were not computed again."""

    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class _Answer(BaseModel):
    """id: the same in each event of a stream. created: Unix time in seconds."""

    id: str
    object: str
    created: int
    model: str


class CompletionLogprobs(BaseModel):
    """Lists with one entry per token. The scores of a prompt's first token are null, since it follows no token.

    text_offset: characters of the answer before the token.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None = None


class Completion(_Answer):
    """The answer of /v1/completions, and each event of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopToken(BaseModel):
    """A token and the logarithm of its probability. bytes: its text, which may begin or end within a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(TopToken):
    """A token of the answer, and the likeliest tokens at its position."""

    top_logprobs: list[TopToken]


class ChatLogprobs(BaseModel):
    """One entry per token."""

    content: list[ChatToken]
    refusal: None = None


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int = 0
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish


class ChatCompletion(_Answer):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None

    @model_serializer
    def _new(self) -> dict[str, str]:
        """Leave out fields that have not changed: some clients would take null for the content."""
        return {name: value for name, value in (("role", self.role), ("content", self.content)) if value is not None}


class ChunkChoice(BaseModel):
    index: int = 0
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None


class ChatChunk(_Answer):
    """An event of a stream of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: Usage | None = None


class Embedding(BaseModel):
    """A vector, as numbers or as base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """The answer of /v1/embeddings."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class ModelCard(BaseModel):
    """A model. Everything but attention is computed in float32, or in ``dtype`` by the torch engine.

    max_model_len: the most tokens of a text.
    dtype: the dtype of attention's operands.
    weights: how the weights are stored, for a model that generates.
    cache_dtype: the dtype of the KV cache, for a model that generates.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["gpu_actors"] = "gpu_actors"
    max_model_len: int
    kind: Literal["generation", "embedding"]
    dtype: str
    weights: str | None = None
    cache_dtype: str | None = None


class ModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
