"""gpu_actors.generation without the service: configurations, weights, tokens, and the model's formulas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.generation import draw_tensors, hugging_face_json, tiny, write_model, write_safetensors

from gpu_actors import InvalidRequest, Unsupported
from gpu_actors.generation import (
    ByteTokenizer,
    Llama,
    LlamaConfig,
    load_weights,
    plain_logits,
    random_weights,
)
from gpu_actors.generation.model import rms_norm, silu

SMALL = LlamaConfig.tiny(vocab=258, hidden=24, layers=2, heads=4, kv_heads=2, head_dim=8)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def load(folder: Path, **changes: Any) -> LlamaConfig:
    (folder / "config.json").write_text(json.dumps(hugging_face_json(SMALL, **changes)))
    return LlamaConfig.load(folder)


class TestConfig:
    def test_config_json_says_the_sizes(self, tmp_path):
        assert load(tmp_path) == SMALL
        assert load(tmp_path, eos_token_id=[5, 6]).stop_tokens == (5, 6)
        assert load(tmp_path, eos_token_id=None, bos_token_id=None).begin_token is None
        assert load(tmp_path, head_dim=None).head_dim == 6
        assert load(tmp_path, num_key_value_heads=None).kv_heads == 4
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
        assert load(tmp_path).stop_tokens == (5, 6), "the file of its generation has the last word"

    def test_the_base_of_the_rotation_is_where_older_and_newer_files_have_it(self, tmp_path):
        old = load(tmp_path, rope_theta=500.0)
        new = load(tmp_path, rope_theta=None, rope_parameters={"rope_theta": 500.0, "rope_type": "default"})
        assert old.inv_freq == new.inv_freq == tuple(500.0 ** (-i / 4) for i in range(4))

    def test_scaled_rotations_follow_the_configuration(self, tmp_path):
        halved = load(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})
        assert halved.inv_freq == tuple(f / 2 for f in SMALL.inv_freq)
        scaled = load(tmp_path, rope_scaling=LLAMA3).inv_freq
        assert scaled[0] == SMALL.inv_freq[0]
        assert SMALL.inv_freq[1] / 8 < scaled[1] < SMALL.inv_freq[1]
        assert scaled[3] == SMALL.inv_freq[3] / 8

    def test_what_is_not_this_model_is_refused_by_name(self, tmp_path):
        rope = {"rope_scaling": {"rope_type": "yarn"}}
        for changes in ({"model_type": "mamba"}, {"hidden_act": "gelu"}, {"attention_bias": True}, rope):
            with pytest.raises(Unsupported, match="rope_type" if changes is rope else next(iter(changes))):
                load(tmp_path, **changes)

    def test_sizes_that_no_model_has_are_refused_with_the_file(self, tmp_path):
        inf, linear = float("inf"), {"rope_type": "linear"}
        wrong: dict[str, list[Any]] = {
            "hidden_size": [None],
            "num_hidden_layers": [-1, 10**12],
            "num_attention_heads": [0, inf],
            "num_key_value_heads": [3],
            "intermediate_size": [0],
            "head_dim": [7, 10**12],
            "rms_norm_eps": [float("nan"), "small"],
            "rope_theta": [0, -2.0, inf],
            "rope_scaling": ["yarn", linear | {"factor": 0}, linear | {"factor": inf}],
            "eos_token_id": [258, [1, -1], [[1]]],
        }
        changed = ({"high_freq_factor": 1.0}, {"low_freq_factor": float("nan")}, {"factor": 0})
        wrong["rope_scaling"] += [LLAMA3 | changes for changes in changed]
        for name, values in wrong.items():
            for value in values:
                with pytest.raises(InvalidRequest, match=r"config\.json"):
                    load(tmp_path, **{name: value})

    def test_a_configuration_names_what_does_not_fit(self):
        for name, value in (
            ("layers", 0),
            ("vocab", True),
            ("kv_heads", 3),
            ("inv_freq", (1.0,)),
            ("inv_freq", (0.0,) * 4),
        ):
            with pytest.raises(InvalidRequest) as caught:
                replace(SMALL, **{name: value})
            assert caught.value.field == name

    def test_a_broken_file_is_named(self, tmp_path):
        for text in (None, "[1]", "{", "", "[" * 100_000):
            if text is not None:
                (tmp_path / "config.json").write_text(text)
            with pytest.raises(InvalidRequest, match=r"config\.json"):
                LlamaConfig.load(tmp_path)


class TestWeights:
    @pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
    def test_a_folder_in_hugging_faces_layout(self, tmp_path, dtype):
        tensors = write_model(tmp_path, SMALL, dtype)
        weights = load_weights(tmp_path, LlamaConfig.load(tmp_path))
        named = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
        np.testing.assert_array_equal(weights.embedding, named["model.embed_tokens.weight"])
        np.testing.assert_array_equal(weights.head, named["lm_head.weight"].T)
        np.testing.assert_array_equal(weights.layers[1].gate, named["model.layers.1.mlp.gate_proj.weight"].T)
        np.testing.assert_array_equal(
            weights.layers[0].mlp_norm, named["model.layers.0.post_attention_layernorm.weight"]
        )
        assert all(part.dtype == np.float32 for layer in weights.layers for part in layer)

    def test_tied_embeddings_are_the_head(self, tmp_path):
        tied = load(tmp_path, tie_word_embeddings=True)
        write_model(tmp_path, tied)
        weights = load_weights(tmp_path, tied)
        np.testing.assert_array_equal(weights.head, weights.embedding.T)

    def test_several_files_by_their_index(self, tmp_path):
        tensors = draw_tensors(SMALL, np.float32)
        halves = [dict(list(tensors.items())[:7]), dict(list(tensors.items())[7:])]
        where = {}
        for number, half in enumerate(halves):
            write_safetensors(tmp_path / f"part{number}.safetensors", half)
            where |= dict.fromkeys(half, f"part{number}.safetensors")
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        weights = load_weights(tmp_path, SMALL)
        np.testing.assert_array_equal(weights.norm, tensors["model.norm.weight"])

    def test_what_is_missing_broken_or_misshapen_is_named(self, tmp_path):
        with pytest.raises(InvalidRequest, match=r"model\.safetensors"):
            load_weights(tmp_path, SMALL)
        tensors = draw_tensors(SMALL, np.float32)
        for change in ({"model.norm.weight": np.ones(3, np.float32)}, {"model.norm.weight": np.ones(24, np.int64)}):
            write_safetensors(tmp_path / "model.safetensors", tensors | change)
            with pytest.raises(InvalidRequest, match=r"model\.norm\.weight"):
                load_weights(tmp_path, SMALL)
        for data in (b"", b"abc", (1 << 40).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]"):
            (tmp_path / "model.safetensors").write_bytes(data)
            with pytest.raises(InvalidRequest, match=r"model\.safetensors"):
                load_weights(tmp_path, SMALL)
        (tmp_path / "model.safetensors.index.json").write_text("{}")
        with pytest.raises(InvalidRequest, match=r"index\.json"):
            load_weights(tmp_path, SMALL)

    def test_the_same_seed_gives_the_same_weights(self):
        one, other, third = (random_weights(SMALL, seed).layers[1].down for seed in (1, 1, 2))
        np.testing.assert_array_equal(one, other)
        assert (one != third).any()


class TestTokens:
    def test_bytes_go_there_and_back_also_cut_in_pieces(self):
        tokenizer = ByteTokenizer()
        text = "añb → 🙂"
        stream = tokenizer.stream()
        pieces = [stream.feed(token) for token in tokenizer.encode(text)]
        assert "".join(pieces) == text
        assert stream.end() == ""
        assert pieces[1:3] == ["", "ñ"]

    def test_bytes_that_are_no_text_show_as_such(self):
        stream = ByteTokenizer().stream()
        assert [stream.feed(token) for token in (255, 256, 257, 65, 0xE2, 0x86)] == ["�", "", "", "A", "", ""]
        assert stream.end() == "�", "of a character that was not completed"


class TestModel:
    def test_parts_follow_their_formulas(self):
        x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
        weight = np.arange(8, dtype=np.float32)
        expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * weight
        np.testing.assert_allclose(rms_norm(x, weight, 1e-5), expected, rtol=1e-6)
        steep = np.array([-1e4, -1.0, 0.0, 2.0, 1e4], np.float32)
        with np.errstate(all="raise"):
            np.testing.assert_allclose(silu(steep), [0, -1 / (1 + np.e), 0, 2 / (1 + np.exp(-2)), 1e4], atol=1e-6)

    def test_a_row_sees_nothing_of_the_rows_after_it_and_all_before(self):
        model = tiny()
        tokens = np.array([1, 2, 3, 4, 5])
        whole = plain_logits(model, tokens)
        np.testing.assert_allclose(plain_logits(model, tokens[:3]), whole[:3], rtol=1e-4, atol=1e-5)
        assert np.abs(plain_logits(model, np.array([9, 2, 3, 4, 5]))[4] - whole[4]).max() > 1e-2

    def test_positions_matter_only_by_their_distance(self):
        """The score of two rotated rows depends only on their distance. Here all tokens are equal."""
        model = tiny(layers=1)
        one, many = plain_logits(model, np.array([7])), plain_logits(model, np.array([7] * 6))
        np.testing.assert_allclose(many, np.repeat(one, 6, 0), rtol=1e-4, atol=1e-5)

    def test_a_token_that_the_vocabulary_lacks_is_refused(self):
        for tokens in (np.array([258]), np.array([-1])):
            with pytest.raises(InvalidRequest, match="257"):
                tiny().embed(tokens)
        assert isinstance(tiny(), Llama)
