"""Single tokens in answers: spaces, special tokens, bytes. The models generate scripted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.generation import write_scripted, write_tokenizer
from support.openai_server import Serving, text_of

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

START, END, TURN = 256, 257, 258
"""<s>, </s> and <|turn|> of `write_tokenizer`."""


def scripted(folder: Path, tokens: Sequence[int], **changes: Any) -> None:
    """Write a model that generates these tokens in this order, each of them once."""
    assert len(set(tokens)) == len(tokens)
    write_scripted(folder, dict(pairwise(tokens)), **changes)


def ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that generates `SAID` after "A". Its tokenizer ends texts with </s>, its config with another token."""
    folder = tmp_path_factory.mktemp("said")
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{% if tools is not none %}no{% endif %}A"}
    tokenizer = write_tokenizer(folder, config, special=["<s>", "</s>", "<|turn|>"])
    says = [*ids(tokenizer, "ABC d"), TURN, *ids(tokenizer, "e\n🙂"), END]
    scripted(folder, [*says, *ids(tokenizer, "xyz")], bos_token_id=START, eos_token_id=300)
    with Serving(models=(f"said={folder}",)) as running:
        yield running


SAID = "BC de\n🙂"
ASKED = {"model": "said", "prompt": "A", "max_tokens": 20, "temperature": 0}


def test_the_tokenizers_end_ends_a_text_and_special_tokens_do_not_show(serving: Serving) -> None:
    answer = serving.complete(**ASKED)
    assert answer["choices"][0] | {"logprobs": 0} == {
        "index": 0, "text": SAID, "finish_reason": "stop", "logprobs": 0
    }  # fmt: skip
    # There is no post-processor that adds <s>, whatever config.json says.
    assert answer["usage"]["prompt_tokens"] == 1
    assert answer["usage"]["completion_tokens"] == len("BC d") + 1 + len("e\n") + 4 + 1
    assert text_of(serving.stream("/v1/completions", ASKED)) == SAID
    asked = {**ASKED, "messages": [{"role": "user", "content": "hi"}]}
    del asked["prompt"]
    answer = serving.chat(**asked)
    assert (answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]) == (SAID, 1)


def test_a_stop_string_may_name_a_special_token(serving: Serving) -> None:
    for stop, text in (("<|turn|>", "BC d"), (["nothing", "d<|turn|>e"], "BC "), ("<|turn|>\n", SAID), ("</s>", SAID)):
        answer = serving.complete(**ASKED, stop=stop)["choices"][0]
        assert (answer["text"], answer["finish_reason"]) == (text, "stop")
        assert text_of(serving.stream("/v1/completions", {**ASKED, "stop": stop})) == text


def test_parts_of_characters_have_their_bytes(serving: Serving) -> None:
    asked = {**ASKED, "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 1}
    del asked["prompt"]
    content = serving.chat(**asked)["choices"][0]["logprobs"]["content"]
    assert [one["bytes"] for one in content if one["token"] == "�"] == [[byte] for byte in "🙂".encode()]
    assert [one["token"] for one in content[:6]] == ["B", "C", " ", "d", "<|turn|>", "e"]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == "BC d<|turn|>e\n🙂</s>"
    assert all(one["bytes"] == one["top_logprobs"][0]["bytes"] for one in content)


def test_a_character_cut_by_the_last_token_shows_once(serving: Serving) -> None:
    for most in (8, 9, 10):
        assert serving.complete(**{**ASKED, "max_tokens": most})["choices"][0]["text"] == "BC de\n�"[: most - 1]


def test_the_offsets_of_a_prompt_are_those_of_the_text_that_shows(serving: Serving) -> None:
    tokenizer = serving.state.models.generator_of("said").tokenizer
    text = "<s>A<|turn|>é\nA"
    for prompt, shown, offsets in (
        (text, text, [0, 3, 4, 12, 12, 13, 14]),
        ([START, *tokenizer.encode("A"), TURN, *tokenizer.encode("é")[:1]], "A\ufffd", [0, 0, 1, 1]),
    ):
        asked = {**ASKED, "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1}
        choice = serving.complete(**asked)["choices"][0]
        assert choice["text"].startswith(shown)
        assert choice["logprobs"]["text_offset"] == [*offsets, len(shown)]


def test_the_first_space_of_a_continuation_is_kept(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", "</s>", "▁once", "▁upon", "▁a", "▁time"]
    tokenizer = Tokenizer(models.BPE({piece: token for token, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    scripted(tmp_path, [2, 3, 4, 5], vocab=32, bos_token_id=None, eos_token_id=1)
    asked = {**ASKED, "prompt": [2], "max_tokens": 3}
    with Serving(models=(f"said={tmp_path}",)) as serving:
        answer = serving.complete(**asked, logprobs=0)["choices"][0]
        assert answer["text"] == " upon a time"
        assert answer["logprobs"]["tokens"] == [" upon", " a", " time"]
        assert answer["logprobs"]["text_offset"] == [0, 5, 7]
        echoed = serving.complete(**{**asked, "prompt": [2, 3], "max_tokens": 2}, echo=True, logprobs=0)["choices"][0]
        assert echoed["text"] == "once upon a time"
        assert echoed["logprobs"]["text_offset"] == [0, 4, 9, 11]
        assert serving.complete(**asked, stop=" upon")["choices"][0]["text"] == ""
        assert serving.complete(**asked, stop=" a ")["choices"][0]["text"] == " upon"
        assert text_of(serving.stream("/v1/completions", asked)) == " upon a time"
