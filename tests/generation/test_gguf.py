"""Models from GGUF files are read as they were written, and what is not Llama's is refused by name."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from support.generation import draw_tensors

from gpu_actors import InvalidRequest, Unsupported
from gpu_actors.generation import GgufFile, LlamaConfig, load_model
from gpu_actors.generation.config import frequencies
from gpu_actors.generation.gguf_tokenizer import build_tokenizer

CONFIG = LlamaConfig.tiny(vocab=40, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32)
NAMES = {
    "embed_tokens": "token_embd", "input_layernorm": "attn_norm", "q_proj": "attn_q", "k_proj": "attn_k",
    "v_proj": "attn_v", "o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down", "norm": "output_norm", "lm_head": "output",
}  # fmt: skip
TOKENS = [chr(97 + i) for i in range(26)] + ["ab", "abc", "Ġ", "Ġa", "<s>", "</s>", "1", "2", "12", *"ABCD!"]
Write = Callable[..., Path]


def here(name: str) -> str:
    """The GGUF name of a tensor of Hugging Face's layout."""
    parts = name.removesuffix(".weight").split(".")
    layer = f"blk.{parts[2]}." if parts[1:2] == ["layers"] else ""
    return f"{layer}{NAMES[parts[-1]]}.weight"


def interleaved(matrix: Any, heads: int) -> Any:
    """Rows of q or k in the order of GGUF's converters: the two rows of a rotated pair lie side by side."""
    return matrix.reshape(heads, 2, -1, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


def tensors(config: LlamaConfig = CONFIG) -> dict[str, Any]:
    """Tensors by GGUF's names, in GGUF's order of rows."""
    by_name = {here(name): value for name, value in draw_tensors(config, np.float32).items()}
    for name, heads in (("attn_q", config.heads), ("attn_k", config.kv_heads)):
        for layer in range(config.layers):
            by_name[f"blk.{layer}.{name}.weight"] = interleaved(by_name[f"blk.{layer}.{name}.weight"], heads)
    return by_name


def write(
    path: Path,
    *,
    config: LlamaConfig = CONFIG,
    form: str = "F32",
    architecture: str = "llama",
    changed: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    less: tuple[str, ...] = (),
) -> Path:
    """A file of the configuration. form: of its matrices. changed: tensors, None leaves one out. more: metadata."""
    writer = GGUFWriter(path, architecture)
    metadata = {
        "llama.block_count": config.layers,
        "llama.context_length": config.positions,
        "llama.embedding_length": config.hidden,
        "llama.feed_forward_length": config.intermediate,
        "llama.attention.head_count": config.heads,
        "llama.attention.head_count_kv": config.kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3 if token in ("<s>", "</s>") else 1 for token in TOKENS],
        "tokenizer.ggml.merges": ["a b", "ab c", "Ġ a", "1 2"],
        "tokenizer.ggml.bos_token_id": TOKENS.index("<s>"),
        "tokenizer.ggml.eos_token_id": TOKENS.index("</s>"),
        **(more or {}),
    }
    for name, value in metadata.items():
        if name not in less:
            put(writer, name, value)
    for name, value in (tensors(config) | (changed or {})).items():
        if value is None:
            continue
        kind = GGMLQuantizationType[form if value.ndim == 2 else "F32"]
        writer.add_tensor(name, quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def put(writer: GGUFWriter, name: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(name, value)


@pytest.fixture
def written(tmp_path: Path) -> Write:
    return lambda **changes: write(tmp_path / "model.gguf", **changes)


class TestWeights:
    @pytest.mark.parametrize(
        ("form", "stored", "dtype"),
        [
            ("F32", "float32", "float32"),
            ("F16", "float16", "float16"),
            ("BF16", "bfloat16", "bfloat16"),
            ("Q8_0", "Q8_0", "float32"),
            ("Q4_1", "Q4_1", "float32"),
        ],
    )
    def test_each_matrix_is_the_one_that_was_written(self, written, form, stored, dtype):
        file = GgufFile(written(form=form))
        weights = file.weights()
        assert (weights.stored, weights.dtype) == (stored, dtype)
        kind = GGMLQuantizationType[form]
        drawn = draw_tensors(CONFIG, np.float32)

        def given(name: str) -> Any:
            return dequantize(quantize(drawn[f"{name}.weight"], kind), kind)

        for layer in range(CONFIG.layers):
            for field, name in {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}.items():
                matrix = getattr(weights.layers[layer], field)
                np.testing.assert_array_equal(matrix.T, given(f"model.layers.{layer}.{name}"))
        np.testing.assert_array_equal(weights.layers[1].down.T, given("model.layers.1.mlp.down_proj"))
        np.testing.assert_array_equal(weights.embedding, given("model.embed_tokens"))
        np.testing.assert_array_equal(weights.head.T, given("lm_head"))
        np.testing.assert_array_equal(weights.norm, drawn["model.norm.weight"])

    def test_without_an_output_matrix_the_embedding_is_that_too(self, written):
        file = GgufFile(written(changed={"output.weight": None}))
        assert file.config.tied
        weights = file.weights()
        assert np.shares_memory(weights.head, weights.embedding)
        np.testing.assert_array_equal(weights.head.T, tensors()["token_embd.weight"])

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"blk.1.ffn_up.weight": None}, r"lacks the tensor blk\.1\.ffn_up\.weight of shape \(128, 64\)"),
            ({"blk.0.attn_v.weight": np.zeros((32, 64), np.float32)}, r"blk\.0\.attn_v\.weight of shape \(32, 64\)"),
            ({"token_embd.weight": None}, "lacks the tensor token_embd.weight"),
        ],
    )
    def test_a_tensor_that_does_not_fit_is_named(self, written, changed, said):
        with pytest.raises(InvalidRequest, match=said):
            GgufFile(written(changed=changed)).weights()

    def test_a_tensor_that_is_not_llamas_is_refused_by_name(self, written):
        for name in ("blk.0.attn_q.bias", "blk.0.ffn_gate_inp.weight", "blk.7.attn_q.weight"):
            with pytest.raises(Unsupported, match=name):
                GgufFile(written(changed={name: np.zeros(64, np.float32)}))

    def test_a_form_that_cannot_be_read_is_refused_by_name(self, written):
        path = written()
        file = GgufFile(path)
        file._tensors["token_embd.weight"] = file._tensors["token_embd.weight"]._replace(
            tensor_type=GGMLQuantizationType.I8
        )
        with pytest.raises(Unsupported, match=r"token_embd\.weight.*I8"):
            file.weights()


class TestConfig:
    def test_the_metadata_are_the_configuration(self, written):
        config = dataclasses.replace(CONFIG, norm_eps=float(np.float32(1e-5)), begin_token=None, stop_tokens=(31,))
        assert GgufFile(written()).config == config
        assert GgufFile(written(more={"tokenizer.ggml.add_bos_token": True})).config.begin_token == 30
        assert GgufFile(written(more={"tokenizer.ggml.pre": "llama-bpe"})).config.begin_token == 30
        turns = {"tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 31}
        assert GgufFile(written(more=turns)).config.stop_tokens == (31, 3)
        no_experts = {"llama.expert_count": 0, "llama.expert_used_count": 0}
        assert GgufFile(written(more=no_experts)).config == config

    def test_what_older_files_leave_out_has_llamas_values(self, written):
        left_out = ("llama.attention.head_count_kv", "llama.attention.key_length", "llama.attention.value_length")
        path = written(config=LlamaConfig.tiny(vocab=40, hidden=64, heads=4, kv_heads=4, head_dim=16), less=left_out)
        config = GgufFile(path).config
        assert (config.kv_heads, config.head_dim) == (4, 16)

    @pytest.mark.parametrize(
        ("more", "rope"),
        [
            ({}, {"rope_theta": 10000.0}),
            ({"llama.rope.freq_base": 500.0}, {"rope_theta": 500.0}),
            ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {"factor": 4.0}),
            ({"llama.rope.scaling.factor": 4.0}, {"factor": 4.0}),
            ({"llama.rope.scale_linear": 2.0}, {"factor": 2.0}),
            ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, {}),
        ],
    )
    def test_the_rotation_is_scaled_as_the_metadata_say(self, written, more, rope):
        rope = {"rope_theta": 10000.0, "rope_type": "linear" if "factor" in rope else "default", **rope}
        assert GgufFile(written(more=more)).config.inv_freq == frequencies(32, rope)

    def test_the_factors_of_llama_3_are_a_tensor(self, written):
        factors = np.linspace(1, 8, 16, dtype=np.float32)
        result = GgufFile(written(changed={"rope_freqs.weight": factors})).config.inv_freq
        np.testing.assert_allclose(result, np.array(CONFIG.inv_freq) / factors, rtol=1e-12)
        for factor in (0, np.nan, np.inf, -1):
            with pytest.raises(InvalidRequest, match=r"model\.gguf"):
                GgufFile(written(changed={"rope_freqs.weight": np.full(16, factor, np.float32)}))

    def test_metadata_that_this_model_does_not_compute_are_refused_by_name(self, written):
        for named, value in {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.dimension_count": 16,
            "llama.attention.value_length": 64,
            "llama.expert_count": 8,
            "llama.attention.sliding_window": 1024,
            "llama.attention.scale": 0.5,
            "llama.feed_forward_length": [128, 64],
            "split.count": 3,
        }.items():
            with pytest.raises(Unsupported) as refused:
                GgufFile(written(more={named: value}))
            assert (refused.value.field, refused.value.value) == (f"model.gguf: {named}", value)
        for architecture in ("qwen2", "llama4"):
            with pytest.raises(Unsupported, match=rf"general\.architecture='{architecture}'"):
                GgufFile(written(architecture=architecture))

    def test_broken_metadata_are_named(self, written):
        for name, changes in {
            "llama.block_count": {"less": ("llama.block_count",)},
            "llama.attention.head_count": {"more": {"llama.attention.head_count": 0}},
            "llama.context_length": {"more": {"llama.context_length": "long"}},
        }.items():
            with pytest.raises(InvalidRequest, match=name):
                GgufFile(written(**changes))

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("llama.rope.freq_base", [0.0, -1.0]),
            ("llama.attention.key_length", [31, 4_000_000_000]),
            ("llama.attention.head_count_kv", [3]),
            ("llama.block_count", [4_000_000_000]),
            ("tokenizer.ggml.eos_token_id", [[1, 2], "x"]),
            ("tokenizer.ggml.eot_token_id", [40, [1]]),
            ("tokenizer.ggml.eom_token_id", ["z"]),
            ("split.count", ["two", [2, 3]]),
        ],
    )
    def test_metadata_that_no_model_has_are_refused_with_the_file(self, written, name, values):
        for value in values:
            more = {"llama.attention.value_length": value} if name == "llama.attention.key_length" else {}
            with pytest.raises((InvalidRequest, Unsupported), match=r"model\.gguf"):
                load_model(written(more={name: value, **more}))


class TestBrokenFiles:
    def test_what_is_no_gguf_file_is_refused(self, tmp_path):
        path = tmp_path / "a.gguf"
        for content in (None, b"", b"GGUF", b"no GGUF file at all", bytes(4096)):
            if content is not None:
                path.write_bytes(content)
            with pytest.raises(InvalidRequest, match=r"a\.gguf"):
                load_model(path)

    def test_a_file_that_is_cut_off_anywhere_is_refused(self, written):
        path = written()
        whole = path.read_bytes()
        for length in [*range(0, 4000, 197), *range(4000, len(whole), 19_919), len(whole) - 1]:
            path.write_bytes(whole[:length])
            with pytest.raises(InvalidRequest, match=r"model\.gguf"):
                load_model(path)

    def test_an_array_longer_than_the_file_is_refused_at_once(self, tmp_path):
        """Reading it would go on until memory is full."""
        path, head = tmp_path / "a.gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
        for count in (1 << 20, (1 << 64) - 1):
            array = struct.pack("<Q1sIIQ", 1, b"a", 9, 0, count).replace(bytes(3), b"", 1)
            path.write_bytes(head + array + bytes(64))
            with pytest.raises(InvalidRequest, match=r"a\.gguf"):
                GgufFile(path)


class TestTokenizer:
    def encode(self, written: Write, text: str, **more: Any) -> list[str]:
        """The tokens of a text as strings."""
        tokenizer = load_model(written(more=more)).tokenizer
        return [TOKENS[token] for token in tokenizer.encode(text)]

    def test_merges_and_digits_are_the_files(self, written):
        assert self.encode(written, "abc a12<s>") == ["abc", "Ġa", "1", "2", "<s>"]
        tokenizer = load_model(written()).tokenizer
        stream = tokenizer.stream()
        assert "".join(stream.feed(token) for token in tokenizer.encode("abc a12")) + stream.end() == "abc a12"

    def test_text_is_split_as_the_file_names_it(self, written):
        for pre in ("default", "gpt-2", "llama-bpe", "smollm", "qwen2", "tekken"):
            result = self.encode(written, "121", **{"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False})
            assert result == (["12", "1"] if pre in ("default", "gpt-2", "llama-bpe") else ["1", "2", "1"]), pre

    def test_a_whole_token_needs_no_merge_where_the_vocabulary_says_so(self, written):
        more = {"tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.add_bos_token": False}
        assert self.encode(written, "abc", **more) == ["ab", "c"]
        assert self.encode(written, "abc", **more, **{"tokenizer.ggml.pre": "llama-bpe"}) == ["abc"]

    def test_sentencepiece_merges_the_highest_score_first(self, written):
        tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "▁a", "ab", "bc", "▁ab"]
        tokens += [f"<0x{i:02X}>" for i in range(256)]
        more = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * 7 + [-4.0, -1.0, -2.0, -3.0] + [0.0] * 256,
            "tokenizer.ggml.token_type": [2, 3, 3] + [1] * 8 + [6] * 256,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        }
        config = LlamaConfig.tiny(vocab=len(tokens), hidden=64, heads=4, kv_heads=2, head_dim=32)
        loaded = load_model(written(config=config, more=more))
        spelled = [tokens[token] for token in loaded.tokenizer.encode("abc é")]
        assert spelled == ["▁ab", "c", "▁", "<0xC3>", "<0xA9>"]
        stream = loaded.tokenizer.stream()
        assert "".join(stream.feed(token) for token in loaded.tokenizer.encode("abc é")) + stream.end() == " abc é"
        assert loaded.model.config.begin_token == 1

    def test_the_chat_template_is_the_files(self, written):
        template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
        loaded = load_model(written(more={"tokenizer.chat_template": template}))
        assert loaded.template is not None
        assert loaded.template.render([{"role": "user", "content": "abc"}]) == "<s>abc"
        assert load_model(written()).template is None

    def test_a_kind_that_is_not_built_is_refused_by_name(self, written):
        wrong = {"model": ["bert", ["gpt2"]], "pre": ["deepseek-llm", ["default"]]}
        for name, value in [(f"tokenizer.ggml.{part}", value) for part in wrong for value in wrong[part]]:
            with pytest.raises(Unsupported) as refused:
                load_model(written(more={name: value}))
            assert (refused.value.field, refused.value.value) == (name, value)

    def test_a_broken_one_is_refused(self, written):
        merges = [["ab"], ["z !"], ["a b", "y z"], ["a b", "a "], [1, 2]]
        broken: list[dict[str, Any]] = [{"merges": value} for value in merges]
        broken += [{"tokens": ["a", "b"], "merges": ["a b"], "eos_token_id": 1}]
        broken += [{"bos_token_id": value} for value in (99, [1])]
        for more in broken:
            with pytest.raises(InvalidRequest, match=r"tokenizer\.ggml\.(model|merges)"):
                build_tokenizer(GgufFile(written(more={f"tokenizer.ggml.{key}": more[key] for key in more})).metadata)
        for template in (5, True, [1, 2], ["a"]):
            with pytest.raises(InvalidRequest, match=r"tokenizer\.chat_template="):
                build_tokenizer(GgufFile(written(more={"tokenizer.chat_template": template})).metadata)
