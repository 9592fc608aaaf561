"""The tokenizers and chat templates of folders, compared with Transformers on the same folders."""

from __future__ import annotations

import json
import logging
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inside.package import install_hint
from support.generation import write_tokenizer

from gpu_actors import InvalidRequest
from gpu_actors.generation import (
    ByteTokenizer,
    ChatTemplate,
    FolderTokenizer,
    LlamaConfig,
    PlainChat,
    chat_template_of,
    ended_by,
    load_chat_template,
    load_tokenizer,
)

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors  # noqa: E402

WORDS = ["once", "upon", "a", "time", "é", "naïve", "🙂", "�", ".", ",", "日本", "\n"]


def byte_pairs() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    tokenizer.add_special_tokens(["<|end of text|>"])
    tokenizer.add_tokens(["<think>", "日記"])
    return tokenizer


def sentencepiece() -> Any:
    """A tokenizer as of Llama 2."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdeé日�"]
    pieces += [f"▁{word}" for word in WORDS]
    tokenizer = Tokenizer(
        models.BPE({piece: token for token, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def of_words(decoder: Any, *marks: str) -> Any:
    pieces = [*(word for word in WORDS if word != "\n"), *marks, "[UNK]"]
    tokenizer = Tokenizer(models.WordPiece({piece: token for token, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoder
    return tokenizer


KINDS = {
    "byte pairs": byte_pairs,
    "sentencepiece": sentencepiece,
    "metaspace": lambda: of_words(decoders.Metaspace(), "▁on", "▁", "▁."),
    "word pieces": lambda: of_words(decoders.WordPiece(), "##s", "##ing", "don", "'", "t", "!"),
    "ends of words": lambda: of_words(decoders.BPEDecoder(suffix="</w>"), "on</w>", "time</w>", ".</w>"),
    "no decoder": lambda: of_words(None),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[FolderTokenizer, Any]]:
    """Our tokenizer and Transformers' of each kind."""
    loaded = {}
    for kind, make in KINDS.items():
        folder = tmp_path_factory.mktemp("tokenizer")
        make().save(str(folder / "tokenizer.json"))
        ours = load_tokenizer(folder)
        assert isinstance(ours, FolderTokenizer)
        loaded[kind] = ours, transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return loaded


def streamed(tokenizer: FolderTokenizer | ByteTokenizer, tokens: list[int]) -> str:
    stream = tokenizer.stream()
    return "".join([*(stream.feed(token) for token in tokens), stream.end()])


def decoded(theirs: Any, tokens: list[int]) -> str:
    text: str = theirs.decode(tokens, clean_up_tokenization_spaces=False)
    return text


class TestStreams:
    @pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sentencepiece"])
    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_the_pieces_are_what_transformers_decodes_behind_a_prompt(self, pairs, kind, data):
        ours, theirs = pairs[kind]
        tokens = data.draw(st.lists(st.integers(0, len(theirs) + 1), max_size=12))
        first = theirs.convert_tokens_to_ids("a")
        text = decoded(theirs, [first, *tokens])
        assert decoded(theirs, [first]) + streamed(ours, tokens) == text
        stream = ours.stream()
        shown = "a" + "".join(stream.feed(token) for token in tokens)
        assert text.startswith(shown)
        assert text[len(shown) :] in ("", "�"), "no more than one character waits"

    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_tokens_of_bytes_too(self, pairs, data):
        ours, theirs = pairs["sentencepiece"]
        characters = st.characters(exclude_categories=["Cs"]).map(lambda each: [3 + byte for byte in each.encode()])
        others = st.integers(259, len(theirs)).map(lambda token: [token])
        tokens = [token for group in data.draw(st.lists(characters | others, max_size=8)) for token in group]
        first = theirs.convert_tokens_to_ids("a")
        assert "a" + streamed(ours, tokens) == decoded(theirs, [first, *tokens])

    def test_bytes_that_are_no_text_take_no_whole_character_with_them(self, pairs):
        """Transformers shows each byte of a run as U+FFFD if one byte of the run is wrong."""
        ours, theirs = pairs["sentencepiece"]
        smile = [3 + byte for byte in "🙂".encode()]
        assert decoded(theirs, [*smile, *smile[:3]]) == "�" * 7
        assert streamed(ours, [*smile, *smile[:3]]) == "🙂�"
        assert streamed(ours, [*smile, *smile[:1], theirs.convert_tokens_to_ids("▁once")]) == "🙂� once"

    @pytest.mark.parametrize("kind", ["byte pairs", "sentencepiece"])
    def test_a_continuation_keeps_its_first_space_and_the_models_own_replacement_characters(self, pairs, kind):
        ours, _ = pairs[kind]
        text = " upon a time 🙂"
        tokens = ours.encode("once" + text)[len(ours.encode("once")) :]
        assert streamed(ours, tokens) == text
        assert b"".join(ours.bytes_of(token) for token in tokens).decode() == text
        stream = ours.stream()
        assert "".join(stream.feed(token) for token in ours.encode("�" * 5)).strip(" ") == "�" * 5, "not held back"

    def test_a_token_has_its_bytes_also_where_they_are_no_character(self, pairs):
        ours, known = pairs["byte pairs"]
        theirs = [ours.bytes_of(token) for token in ours.encode("é → 🦜")]
        assert b"".join(theirs) == "é → 🦜".encode()
        assert {b"\xe2", b"\x86", b"\x92"} < set(theirs)
        sentencepiece, _ = pairs["sentencepiece"]
        assert [sentencepiece.bytes_of(token) for token in (3 + 0xF0, 3 + 0x41)] == [b"\xf0", b"A"]
        end = known.convert_tokens_to_ids("<|end of text|>")
        assert ours.special == {end: "<|end of text|>"}
        assert ours.stream().feed(end) == "<|end of text|>", "a special token shows"
        assert logging.getLogger("transformers").filters == [], "only its import is silenced"

    @pytest.mark.parametrize("fast", [True, False])
    def test_the_offsets_of_a_text_are_where_its_tokens_begin(self, pairs, monkeypatch, fast):
        monkeypatch.setattr(type(pairs["byte pairs"][0].transformers), "is_fast", fast)
        for kind, text, offsets in (
            ("byte pairs", "a<|end of text|> b🙂 d", [0, 1, 16, 17, 18, 18, 19, 20]),
            ("sentencepiece", "a bé c", [0, 0, 0, 1, 2, 3, 4, 5]),
            ("sentencepiece", " a é</s>", [0, 0, 0, 1, 2, 3, 4]),
            ("word pieces", "once upon a", [0, 4, 9]),
        ):
            ours, _ = pairs[kind]
            assert ours.offsets(text) == offsets
            assert len(ours.prompt(text)) == len(offsets)

    def test_the_offsets_hold_where_the_text_is_changed_before_it_is_cut(self, pairs):
        ours, _ = pairs["word pieces"]
        assert ours.offsets("  once\tupon  日本語 a") == [0, 6, 11, 16]
        ours, _ = pairs["sentencepiece"]
        assert ours.offsets("a</s>a") == [0, 0, 0, 1, 5, 5]

    def test_a_text_that_begins_lacks_the_space_that_the_tokenizer_puts_there(self, pairs):
        for kind, spaced in (("sentencepiece", " "), ("word pieces", " "), ("byte pairs", "")):
            ours, theirs = pairs[kind]
            tokens = ours.encode("a once")
            stream = ours.stream(begins=True)
            assert "".join(stream.feed(token) for token in tokens) + stream.end() == decoded(theirs, tokens)
            assert streamed(ours, tokens) == spaced + decoded(theirs, tokens)

    def test_a_token_costs_the_same_however_long_its_text_is(self, pairs, monkeypatch):
        ours, theirs = pairs["sentencepiece"]
        sizes = []

        def noting(names: list[str]) -> str:
            sizes.append(len(names))
            return str(theirs.convert_tokens_to_string(names))

        monkeypatch.setattr(ours.transformers, "convert_tokens_to_string", noting)
        tokens = [259 + number % 20 for number in range(500)]
        streamed(ours, tokens)
        assert len(sizes) <= 2 * len(tokens)
        assert max(sizes) <= 3


class TestFolders:
    def test_what_training_left_does_not_change_a_prompt(self, tmp_path: Path):
        folder = write_tokenizer(tmp_path)
        folder.enable_truncation(8)
        folder.enable_padding(length=40)
        folder.save(str(tmp_path / "tokenizer.json"))
        ours = load_tokenizer(tmp_path)
        text = "abcdefghijklmnop"
        with ThreadPoolExecutor(4) as pool:
            assert {tuple(tokens) for tokens in pool.map(ours.prompt, [text] * 50)} == {tuple(ours.encode(text))}
        assert len(ours.encode(text)) == 16

    @pytest.mark.parametrize("begins", [False, True])
    def test_the_tokenizer_says_what_begins_a_prompt(self, tmp_path: Path, begins: bool):
        folder = write_tokenizer(tmp_path, {"bos_token": "<s>", "eos_token": "</s>"}, special=["<s>", "</s>"])
        if begins:
            folder.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
            folder.save(str(tmp_path / "tokenizer.json"))
        ours = load_tokenizer(tmp_path)
        assert ours.prompt("é") == [256] * begins + ours.encode("é")
        assert len(ours.encode("é")) == 2

    def test_a_tokenizer_class_may_begin_prompts_too(self, tmp_path: Path):
        sentencepiece().save(str(tmp_path / "tokenizer.json"))
        config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        ours = load_tokenizer(tmp_path)
        assert ours.prompt("a") == [1, *ours.encode("a")]
        assert ours.end_tokens == (2,)

    @pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
    def test_the_tokenizers_end_ends_texts_beside_the_configurations(self, tmp_path: Path, file: str):
        config = LlamaConfig.tiny(vocab=259)
        for spelled in ("</s>", {"__type": "AddedToken", "content": "</s>"}):
            write_tokenizer(tmp_path, special=["<s>", "</s>"])
            (tmp_path / file).write_text(json.dumps({"eos_token": spelled}))
            ours = load_tokenizer(tmp_path)
            assert ours.end_tokens == (257,)
            assert ended_by(config, ours).stop_tokens == (257,)
        write_tokenizer(tmp_path, special=["<s>", "<x>", "</s>"])
        assert ended_by(config, load_tokenizer(tmp_path)).stop_tokens == (257, 258)

    def test_without_a_folder_a_token_is_a_byte(self):
        ours = load_tokenizer(None)
        assert isinstance(ours, ByteTokenizer)
        assert ours.prompt("é") == [256, *ours.encode("é")]
        assert [ours.bytes_of(token) for token in (0xC3, 256, 257)] == [b"\xc3", b"", b""]
        assert ended_by(LlamaConfig.tiny(), ours) == LlamaConfig.tiny()

    def test_a_folder_without_a_tokenizer_is_refused(self, tmp_path: Path):
        (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
        with pytest.raises(InvalidRequest, match=r"one of tokenizer\.json, tokenizer\.model") as caught:
            load_tokenizer(tmp_path)
        assert caught.value.field == "model"

    @pytest.mark.parametrize(
        ("file", "content"),
        [
            ("tokenizer.json", "{}"),
            ("tokenizer.json", "\xff"),
            ("tokenizer_config.json", "{"),
            ("tokenizer_config.json", "\xff"),
            ("special_tokens_map.json", "{"),
            ("tokenizer.model", "no protocol buffer"),
            ("vocab.txt", ""),
        ],
    )
    def test_a_broken_file_is_named(self, tmp_path: Path, file: str, content: str):
        if file.endswith("_config.json") or file.startswith("special"):
            write_tokenizer(tmp_path)
        (tmp_path / file).write_bytes(content.encode("latin-1"))
        with pytest.raises(InvalidRequest, match=file.replace(".", r"\.")) as caught:
            load_tokenizer(tmp_path)
        assert caught.value.field == "model"

    def test_code_of_the_folder_is_not_run(self, tmp_path: Path):
        (tmp_path / "mine.py").write_text("raise SystemExit('this ran')")
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        auto = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
        write_tokenizer(tmp_path, auto)
        with pytest.raises(InvalidRequest, match="trust_remote_code"):
            load_tokenizer(tmp_path)

    def test_without_transformers_it_says_what_to_install(self, tmp_path: Path, monkeypatch):
        write_tokenizer(tmp_path)
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(InvalidRequest, match=re.escape(install_hint("serve"))) as caught:
            load_tokenizer(tmp_path)
        assert caught.value.field == "model"
        with pytest.raises(InvalidRequest, match=re.escape(install_hint("serve"))):
            ChatTemplate("x")
        assert PlainChat().render(SAID) == "system: Be kind.\nuser: <b> & é\nassistant: "


SAID = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "<b> & é"}]


class TestChatTemplates:
    def test_it_knows_what_transformers_gives_templates(self):
        source = (
            "{{ bos_token }}{% for message in messages %}\n{% if loop.first %}{% continue %}{% endif %}"
            "{{ message['content'] | tojson }}{% endfor %}\n"
            "{% if tools is not none or documents is not none %}tools{% endif %}"
            "{% generation %}{{ add_generation_prompt }}{% endgeneration %}{{ strftime_now('%Y')|length }}"
        )
        assert ChatTemplate(source, {"bos_token": "<s>"}).render(SAID) == '<s>"<b> & é"True4'

    def test_what_a_template_refuses_is_said_of_the_messages_or_when_it_is_loaded(self):
        for source, said in {
            "{{ raise_exception('roles must alternate') }}": "roles must alternate",
            "{{ messages[7].content.lower() }}": "no element 7",
            "{{ 1 / 0 }}": "division",
            "{{ messages.append(1) }}": "unsafe",
            "{{ ''.__class__.__mro__[1].__subclasses__() }}": "unsafe",
        }.items():
            with pytest.raises(InvalidRequest, match=said) as caught:
                ChatTemplate(source).render(SAID)
            assert caught.value.field == "messages"
        for broken in ("{% if %}", "{{ x | nosuchfilter }}", 1):
            with pytest.raises(InvalidRequest, match="is no template"):
                ChatTemplate(broken)

    def test_a_folder_has_its_template_in_either_file(self, tmp_path: Path):
        config = {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>", "pad_token": None}
        write_tokenizer(tmp_path, config, special=["<s>", "</s>"])
        assert load_chat_template(tmp_path) is None
        write_tokenizer(
            tmp_path, {**config, "chat_template": "{{ bos_token }}{{ eos_token }}"}, special=["<s>", "</s>"]
        )
        assert load_chat_template(tmp_path).render([]) == "<s></s>"
        several = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
        write_tokenizer(tmp_path, {"chat_template": several})
        assert load_chat_template(tmp_path).render([]) == "yes"
        write_tokenizer(tmp_path, {"chat_template": several[:1] * 2})
        with pytest.raises(InvalidRequest, match="default") as caught:
            load_chat_template(tmp_path)
        assert caught.value.field == "chat_template"
        (tmp_path / "chat_template.jinja").write_text("alone")
        assert load_chat_template(tmp_path).render([]) == "alone"
        assert chat_template_of(ByteTokenizer()) is None

    def test_a_template_is_rendered_as_by_the_tokenizer(self, tmp_path: Path):
        template = (
            "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}{{ eos_token }}\n"
            "{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
        )
        config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
        write_tokenizer(tmp_path, config, special=["<s>", "</s>"])
        theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
        right = theirs.apply_chat_template(SAID, tokenize=False, add_generation_prompt=True)
        ours = load_tokenizer(tmp_path)
        assert chat_template_of(ours).render(SAID) == right
        ids = theirs.apply_chat_template(SAID, add_generation_prompt=True, return_dict=False)
        assert ours.encode(right) == ids
