"""The tokenizer of a GGUF file, as one of Transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.generation.tokenizer import transformers_module

__all__ = ["adds", "build_tokenizer"]

_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED, _UNKNOWN = 3, 4, 2  # token_type: never split in a text; others are merged from characters

# Patterns published with GPT-2, Llama 3, Qwen 2 and Mistral's Tekken. A merge never crosses the pieces that they match.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"{_ENDINGS}|\p{{N}}{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Split(NamedTuple):
    """How a text is split into pieces before merges.

    patterns: applied in order, each to the pieces of the one before.
    whole: whether a piece that is a token is taken whole, and not merged from characters.
    begins: whether a text begins with the "bos" token, if the file does not say.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    begins: bool = False


_DIGITS = _Split((r"\p{N}", _GPT2))
_LLAMA3_SPLIT = _Split((_LLAMA3,), whole=True, begins=True)
_SPLITS = {
    "default": _Split((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _Split((_GPT2,)),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "falcon3": _LLAMA3_SPLIT,
    "smaug-bpe": _Split((_LLAMA3,)),
    "qwen2": _Split((_QWEN2,)),
    "tekken": _Split((_TEKKEN,), whole=True, begins=True),
}
"""The splits by their names in the metadata, tokenizer.ggml.pre."""


def adds(metadata: Mapping[str, Any], kind: str) -> int | None:
    """The token that begins ("bos") or ends ("eos") every text, None if the file has none or does not add it."""
    default = False
    if kind == "bos":
        model, split = metadata.get(f"{_PREFIX}model"), metadata.get(f"{_PREFIX}pre", "default")
        # A list, which a broken file may have, cannot be looked up in a dict.
        default = model == "llama" or (split in list(_SPLITS) and _SPLITS[split].begins)
    if not metadata.get(f"{_PREFIX}add_{kind}_token", default):
        return None
    token: int | None = metadata.get(f"{_PREFIX}{kind}_token_id")
    return token


def build_tokenizer(metadata: Mapping[str, Any]) -> Any:
    """The tokenizer as an object of Transformers, with its chat template. metadata: of a GGUF file, by name.

    Raises `Unsupported` for an unknown kind of tokenizer, `InvalidRequest` for a broken one and if Transformers (extra
    "serve") is missing.
    """
    transformers = transformers_module("model", None)
    from tokenizers import AddedToken

    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise InvalidRequest("tokenizer.chat_template", template, "must be a string, a template in Jinja")
    kind = metadata.get(f"{_PREFIX}model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in list(builders):
        raise Unsupported(f"{_PREFIX}model", kind, f"must be one of {', '.join(builders)}", "gpt2")
    try:
        tokens: list[str] = metadata[f"{_PREFIX}tokens"]
        tokenizer = builders[kind](metadata, {token: number for number, token in enumerate(tokens)})
        types = metadata.get(f"{_PREFIX}token_type", ())
        typed = list(zip(tokens, types, strict=False))
        special = [token for token, of in typed if of in (_CONTROL, _UNKNOWN)]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        plain = [token for token, of in typed if of == _USER_DEFINED]
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
        _add_surrounding_tokens(tokenizer, metadata, tokens)
        named = {f"{kind}_token": metadata.get(f"{_PREFIX}{name}_token_id") for kind, name in _NAMED.items()}
        texts = {name: tokens[token] for name, token in named.items() if token is not None}
        # Not by AutoTokenizer, which would search the folders of all models that Transformers has.
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            clean_up_tokenization_spaces=False,
            chat_template=template,
            **texts,
        )
    except (Unsupported, InvalidRequest):
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise InvalidRequest(f"{_PREFIX}model", kind, f"is broken: {error!r}") from error


_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def _byte_level(metadata: Mapping[str, Any], numbers: dict[str, int]) -> Any:
    """A tokenizer of byte pairs with GPT-2's spelling of bytes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = metadata.get(f"{_PREFIX}pre", "default")
    if name not in list(_SPLITS):
        raise Unsupported(f"{_PREFIX}pre", name, f"must be one of {', '.join(_SPLITS)}", "default")
    split = _SPLITS[name]
    # A space separates the two tokens. The first may begin with a space.
    pairs = [(merge[:cut], merge[cut + 1 :]) for merge in metadata[f"{_PREFIX}merges"] for cut in [merge.index(" ", 1)]]
    for left, right in pairs:
        # The library would panic, and `except Exception` does not catch a panic.
        if not {left, right, left + right} <= numbers.keys():
            raise InvalidRequest(f"{_PREFIX}merges", f"{left} {right}", "must join two tokens of the file to a third")
    tokenizer = Tokenizer(models.BPE(numbers, pairs, ignore_merges=split.whole))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], numbers: dict[str, int]) -> Any:
    """SentencePiece's tokenizer of byte pairs: neighbours that form a token are merged, the highest score first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = metadata.get(f"{_PREFIX}unknown_token_id")
    model = models.BPE(
        numbers,
        list(_pairs(numbers, metadata[f"{_PREFIX}scores"])),
        unk_token=None if unknown is None else metadata[f"{_PREFIX}tokens"][unknown],
        fuse_unk=True,
        byte_fallback="<0x00>" in numbers,
    )
    tokenizer = Tokenizer(model)
    prefix = metadata.get(f"{_PREFIX}add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return tokenizer


def _pairs(numbers: Mapping[str, int], scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """The merges that the scores imply, in the order in which they are tried."""
    for token in sorted(numbers, key=lambda token: (-scores[numbers[token]], numbers[token])):
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        yield from ((left, right) for left, right in cuts if left in numbers and right in numbers)


def _add_surrounding_tokens(tokenizer: Any, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    from tokenizers import processors

    begin, end = adds(metadata, "bos"), adds(metadata, "eos")
    special_tokens = [(tokens[token], token) for token in (begin, end) if token is not None]
    if special_tokens:
        parts = [[] if begin is None else [tokens[begin]], ["$A"], [] if end is None else [tokens[end]]]
        single = [part for some in parts for part in some]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special_tokens)
