"""Fields of the API that this server refuses, with the kinds of servers that accept them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["HINTS", "hint_of"]

_KINDS = {
    "servers that draw several texts for one request, such as vLLM and SGLang": (
        *("n", "best_of", "use_beam_search", "length_penalty", "early_stopping"),
    ),
    "servers that parse calls of tools out of texts, such as vLLM and SGLang": (
        *("tools", "tool_choice", "tool_calls", "tool_call_id", "parallel_tool_calls", "functions", "function_call"),
        "web_search_options",
    ),
    "servers that hold texts to a grammar, such as vLLM and SGLang": (
        *("response_format", "grammar", "regex", "json_schema", "ebnf", "structured_outputs", "structural_tag"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"),
    ),
    "servers that change logits before they draw, such as vLLM and llama.cpp": (
        *("logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "repeat_penalty", "top_k"),
        *("min_p", "typical_p", "mirostat", "min_tokens", "ignore_eos", "logits_processors", "bad_words"),
        *("stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids"),
    ),
    "servers of models that fill in the middle, such as llama.cpp": ("suffix",),
    "servers of models that hear, see or speak, such as vLLM": (
        *("modalities", "audio", "image", "image_url", "video", "mm_processor_kwargs"),
    ),
    "servers of models that think aloud, such as vLLM": (
        *("reasoning_effort", "reasoning", "include_reasoning", "verbosity", "thinking", "chat_template_kwargs"),
    ),
    "servers that score prompts in answers of their own form, such as vLLM": ("prompt_logprobs",),
    "services that keep what they answer, such as OpenAI's": (
        "store",
        "service_tier",
        "prediction",
        "moderation",
        "previous_response_id",
    ),
}

HINTS: dict[str, str] = {field: f"{kind}, have it" for kind, fields in _KINDS.items() for field in fields}
"""A hint for each field: the servers that have it."""


def hint_of(place: Sequence[int | str]) -> str:
    """The hint for a place in a body, or for the nearest outer place that has one. Empty if there is none."""
    names = [part for part in reversed(place) if isinstance(part, str)]
    return next((HINTS[name] for name in names if name in HINTS), "")
