"""Encoders from folders, as sentence-transformers writes them. The expected vectors are computed in float64 from its
formulas, text by text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpu_actors import ContextOptions, MockOptions, open_context
from gpu_actors.embedding import Embedder, MiniLM, Tokenizer, find_weights, rank
from gpu_actors.errors import InvalidRequest, Unsupported

tokenizers = pytest.importorskip("tokenizers")
save_file = pytest.importorskip("safetensors.numpy").save_file

HIDDEN, LAYERS, HEADS, INNER, POSITIONS = 16, 2, 2, 24, 32
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "mat", "query", ":", "##s"]
TEXTS = ["the cat sat on the mat", "cats", "The mat on the cat sat", "on " * 50]
ROOM = "sentence_transformers.models."


def write_tokenizer(folder: Path) -> None:
    vocab = {word: token for token, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def draw_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        # Of few bits, so that half precisions hold them exactly.
        return (rng.integers(-64, 64, shape) / 64).astype(np.float32)

    tensors = {
        "embeddings.word_embeddings.weight": matrix(len(WORDS), HIDDEN),
        "embeddings.position_embeddings.weight": matrix(POSITIONS, HIDDEN),
        "embeddings.token_type_embeddings.weight": matrix(2, HIDDEN),
    }
    linears = {}
    for layer in range(LAYERS):
        prefix = f"encoder.layer.{layer}"
        for part in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            linears[f"{prefix}.{part}"] = (HIDDEN, HIDDEN)
        linears |= {f"{prefix}.intermediate.dense": (INNER, HIDDEN), f"{prefix}.output.dense": (HIDDEN, INNER)}
    norms = [
        "embeddings",
        *(f"encoder.layer.{n}.{part}" for n in range(LAYERS) for part in ("attention.output", "output")),
    ]
    for name, shape in linears.items():
        tensors |= {f"{name}.weight": matrix(*shape), f"{name}.bias": matrix(shape[0])}
    for name in norms:
        tensors |= {f"{name}.LayerNorm.weight": 1 + matrix(HIDDEN) / 2, f"{name}.LayerNorm.bias": matrix(HIDDEN)}
    return tensors


TENSORS = draw_tensors()
DENSE = {"linear.weight": TENSORS["encoder.layer.0.intermediate.dense.weight"][:5], "linear.bias": np.arange(5) / 8}


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def write_folder(folder: Path, modules: list[str] | None = None, dtype: Any = np.float32, prefix: str = "") -> Path:
    """Write an encoder, and modules.json with these modules in folders that are named after them."""
    config = {
        "model_type": "bert", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "vocab_size": len(WORDS), "intermediate_size": INNER, "max_position_embeddings": POSITIONS,
        "layer_norm_eps": 1e-12,
    }  # fmt: skip
    write_json(folder / "config.json", config)
    save_file({prefix + name: tensor.astype(dtype) for name, tensor in TENSORS.items()}, folder / "model.safetensors")
    write_tokenizer(folder)
    if modules is not None:
        listed = [
            {"idx": n, "name": str(n), "path": f"{n}_{name}" if n else "", "type": ROOM + name}
            for n, name in enumerate(["Transformer", *modules])
        ]
        write_json(folder / "modules.json", listed)
    return folder


def write_dense(folder: Path, activation: str = "torch.nn.modules.activation.Tanh", **changes: Any) -> None:
    config = {"in_features": HIDDEN, "out_features": 5, "bias": True, "activation_function": activation, **changes}
    write_json(folder / "config.json", config)
    tensors = {
        name: tensor.astype(np.float32) for name, tensor in DENSE.items() if config["bias"] or "bias" not in name
    }
    save_file(tensors, folder / "model.safetensors")


# The formulas


def erf_gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def rows_of(ids: np.ndarray) -> np.ndarray:
    """The last layer's rows of one text in float64: BERT as Transformers' BertModel computes it."""
    weights = {name: tensor.astype(np.float64) for name, tensor in TENSORS.items()}

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-12)
        return x * weights[f"{name}.LayerNorm.weight"] + weights[f"{name}.LayerNorm.bias"]

    word, position, kind = (
        weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
    )
    x = norm("embeddings", word[ids] + position[: len(ids)] + kind[0])
    for layer in range(LAYERS):
        prefix = f"encoder.layer.{layer}"
        q, k, v = (
            linear(f"{prefix}.attention.self.{part}", x).reshape(len(x), HEADS, -1).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        scores = q @ k.swapaxes(1, 2) / math.sqrt(HIDDEN / HEADS)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        attended = (shares / shares.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(x.shape)
        x = norm(f"{prefix}.attention.output", x + linear(f"{prefix}.attention.output.dense", attended))
        inner = erf_gelu(linear(f"{prefix}.intermediate.dense", x))
        x = norm(f"{prefix}.output", x + linear(f"{prefix}.output.dense", inner))
    return x


def ids_of(text: str, most: int = POSITIONS) -> np.ndarray:
    words = text.replace(":", " : ").replace("cats", "cat ##s").split()
    ids = [WORDS.index(word) if word in WORDS else 1 for word in words]
    return np.array([2, *ids[: most - 2], 3])


def right(end: Callable[[np.ndarray], np.ndarray], texts: list[str] = TEXTS, most: int = POSITIONS) -> np.ndarray:
    return np.stack([end(rows_of(ids_of(text, most))) for text in texts])


def unit(y: np.ndarray) -> np.ndarray:
    return y / np.sqrt((y * y).sum())


def dense(y: np.ndarray, bias: float = 1.0) -> np.ndarray:
    return DENSE["linear.weight"].astype(np.float64) @ y + bias * DENSE["linear.bias"]


async def vectors(folder: Path, texts: list[str] = TEXTS) -> np.ndarray:
    async with open_context("mock", ContextOptions(mock=MockOptions(dtype="float32"))) as context:
        embedder = await Embedder.open(context, folder, dtype="float32")
        result = (await embedder.embed(texts)).vectors
        assert (await embedder.embed([])).vectors.shape == (0, result.shape[1])
    return result


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=3e-5)


POOLINGS: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], np.ndarray]]] = {
    "cls": ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, lambda x: x[0]),
    "mean": ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, lambda x: x.mean(0)),
    "max": ({"pooling_mode_max_tokens": True}, lambda x: x.max(0)),
    "none is mean": ({"pooling_mode_cls_token": False}, lambda x: x.mean(0)),
    "two": (
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        lambda x: np.concatenate([x[0], x.mean(0)]),
    ),
    "new": ({"embedding_dimension": HIDDEN, "pooling_mode": "cls"}, lambda x: x[0]),
    "new, two": ({"pooling_mode": ["mean", "max"]}, lambda x: np.concatenate([x.mean(0), x.max(0)])),
}


@pytest.mark.parametrize("name", POOLINGS)
async def test_pooling_is_that_of_its_file(tmp_path: Path, name: str) -> None:
    config, pooled = POOLINGS[name]
    write_json(write_folder(tmp_path, ["Pooling"]) / "1_Pooling" / "config.json", config)
    close(await vectors(tmp_path), right(pooled))


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "torch.nn.modules.activation.Tanh": np.tanh,
    "torch.nn.modules.linear.Identity": lambda y: y,
    "torch.nn.modules.activation.ReLU": lambda y: np.maximum(y, 0),
    "torch.nn.modules.activation.GELU": erf_gelu,
    "torch.nn.modules.activation.Sigmoid": lambda y: 1 / (1 + np.exp(-y)),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
async def test_dense_has_its_activation(tmp_path: Path, activation: str) -> None:
    write_folder(tmp_path, ["Pooling", "Dense", "Normalize"])
    write_json(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True})
    write_dense(tmp_path / "2_Dense", activation)
    function = ACTIVATIONS[activation]
    close(await vectors(tmp_path), right(lambda x: unit(function(dense(x[0])))))


async def test_modules_are_taken_in_their_order(tmp_path: Path) -> None:
    """Newer versions of sentence-transformers give modules other names, and Dense may have no bias."""
    write_folder(tmp_path)
    kinds = ["base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling"]
    kinds += ["base.modules.normalize.Normalize", "sentence_transformer.modules.dropout.Dropout"]
    kinds += ["base.modules.dense.Dense"]
    paths = ["", "pooling", "normalize", "dropout", "dense"]
    listed = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in zip(paths, kinds, strict=True)]
    write_json(tmp_path / "modules.json", listed)
    write_json(tmp_path / "pooling" / "config.json", {"pooling_mode": "mean"})
    write_dense(tmp_path / "dense", bias=False, use_residual=False, module_input_name="sentence_embedding")
    close(await vectors(tmp_path), right(lambda x: np.tanh(dense(unit(x.mean(0)), bias=0))))
    write_json(tmp_path / "config_sentence_transformers.json", {"truncate_dim": 3})
    close(await vectors(tmp_path), right(lambda x: np.tanh(dense(unit(x.mean(0)), bias=0)))[:, :3])


@pytest.mark.parametrize(("dtype", "prefix"), [(np.float16, ""), (ml_dtypes.bfloat16, "bert."), (np.float64, "")])
async def test_a_folder_of_any_float_without_modules(tmp_path: Path, dtype: Any, prefix: str) -> None:
    write_folder(tmp_path, dtype=dtype, prefix=prefix)
    close(await vectors(tmp_path), right(lambda x: unit(x.mean(0))))


async def test_texts_are_cut_where_sentence_transformers_cuts_them(tmp_path: Path) -> None:
    write_folder(tmp_path)
    for file, content, most in (
        ("tokenizer_config.json", {"model_max_length": 10**30}, POSITIONS),
        ("tokenizer_config.json", {"model_max_length": 20}, 20),
        ("sentence_bert_config.json", {"max_seq_length": 12}, 12),
        ("sentence_bert_config.json", {"max_seq_length": None}, 20),
    ):
        write_json(tmp_path / file, content)
        close(await vectors(tmp_path), right(lambda x: unit(x.mean(0)), most=most))


async def test_a_default_prompt_is_put_before_every_text(tmp_path: Path) -> None:
    write_json(write_folder(tmp_path, ["Pooling"]) / "1_Pooling" / "config.json", {"include_prompt": False})
    settings = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": None}
    write_json(tmp_path / "config_sentence_transformers.json", settings)
    close(await vectors(tmp_path), right(lambda x: x.mean(0)))
    write_json(tmp_path / "config_sentence_transformers.json", {**settings, "default_prompt_name": "query"})
    with pytest.raises(Unsupported, match="include_prompt"):
        await vectors(tmp_path)
    write_json(tmp_path / "1_Pooling" / "config.json", {})
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 10, "do_lower_case": True})
    lowered = ["query: " + text.lower() for text in TEXTS]
    close(await vectors(tmp_path), right(lambda x: x.mean(0), lowered, most=10))
    # The prompt counts towards the length, so that no passage is cut.
    from gpu_actors.embedding import split_passages

    tokenizer = Tokenizer(tmp_path, 10)
    pieces = [TEXTS[3][start:stop] for start, stop, _ in split_passages(TEXTS[3], tokenizer)]
    assert not any(row.truncated for row in tokenizer.encode(pieces))


NOT_COMPUTED: list[tuple[str, Any, type[Exception], str]] = [
    ("Pooling", {"pooling_mode_weightedmean_tokens": True}, Unsupported, "weightedmean"),
    ("Pooling", {"pooling_mode_lasttoken": True}, Unsupported, "lasttoken"),
    ("Pooling", {"pooling_mode_mean_tokens": True, "pooling_mode_mean_sqrt_len_tokens": True}, Unsupported, "sqrt"),
    *(("Pooling", {"pooling_mode": mode}, Unsupported, "pooling_mode") for mode in ("rms", [[]])),
    *(("Pooling", {"pooling_mode": mode}, InvalidRequest, "pooling_mode") for mode in ([], None)),
    ("Pooling", [], InvalidRequest, "1_Pooling"),
    *(
        ("Dense", {"activation_function": name}, Unsupported, "activation_function")
        for name in ("torch.nn.modules.activation.Softmax", "mine.Tanh")
    ),
    ("Dense", {"use_residual": True}, Unsupported, "use_residual"),
    ("Dense", {"in_features": 3}, InvalidRequest, "in_features"),
    ("Dense", {"out_features": 6}, InvalidRequest, "linear.bias"),
    ("Dense", {"out_features": None}, InvalidRequest, "out_features"),
    *(
        (name, {"module_input_name": "token_embeddings"}, Unsupported, "module_input")
        for name in ("Dense", "Normalize")
    ),
]


def test_what_is_not_computed_is_refused_by_name(tmp_path: Path) -> None:
    named = ["Pooling", "Dense", "Normalize"]
    write_folder(tmp_path, named)
    for module, config, error, field in NOT_COMPUTED:
        write_json(tmp_path / "1_Pooling" / "config.json", {})
        write_dense(tmp_path / "2_Dense")
        path = tmp_path / f"{named.index(module) + 1}_{module}" / "config.json"
        if isinstance(config, dict) and path.is_file():
            config = {**json.loads(path.read_text()), **config}
        write_json(path, config)
        with pytest.raises(error, match=field):
            MiniLM.load(tmp_path)


def test_other_modules_are_refused_by_name(tmp_path: Path) -> None:
    for modules in (["LSTM", "Pooling"], ["Pooling", "LayerNorm"], ["Pooling", "WordWeights"], []):
        write_folder(tmp_path, modules)
        for n, name in enumerate(modules, 1):
            if name == "Pooling":
                write_json(tmp_path / f"{n}_{name}" / "config.json", {})
        with pytest.raises(Unsupported, match=next((name for name in modules if name != "Pooling"), "Transformer")):
            MiniLM.load(tmp_path)


def module(name: str, **entries: str) -> dict[str, str]:
    return {"type": ROOM + name, **entries}


def test_broken_lists_of_modules_and_prompts_are_refused(tmp_path: Path) -> None:
    pooling = module("Pooling", path="1_Pooling")
    write_folder(tmp_path)
    for modules, error, match in (
        ({}, InvalidRequest, "list"),
        (["Pooling"], InvalidRequest, r"modules\.json"),
        ([module("Transformer", path="0_Transformer"), pooling], Unsupported, "path"),
        ([{"type": "custom_st.Transformer"}, pooling], Unsupported, "custom_st"),
        ([module("Transformer"), module("Pooling", path="missing")], InvalidRequest, "missing"),
    ):
        write_json(tmp_path / "modules.json", modules)
        with pytest.raises(error, match=match):
            MiniLM.load(tmp_path)
    name = "default_prompt_name"
    for settings in ({name: "x"}, {name: "x", "prompts": {"x": 1}}, {name: []}, []):
        write_json(tmp_path / "config_sentence_transformers.json", settings)
        with pytest.raises(InvalidRequest):
            Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "entry"),
    [("sentence_bert_config.json", {"transformer_task": "fill-mask"}), ("config.json", {"is_decoder": True})],
)
def test_a_transformer_that_does_something_else_is_refused(tmp_path: Path, file: str, entry: dict[str, Any]) -> None:
    write_json(write_folder(tmp_path, ["Pooling"]) / "1_Pooling" / "config.json", {})
    MiniLM.load(tmp_path)
    path = tmp_path / file
    write_json(path, {**(json.loads(path.read_text()) if path.is_file() else {}), **entry})
    with pytest.raises(Unsupported, match=next(iter(entry))):
        MiniLM.load(tmp_path)


def test_a_text_without_a_token_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain.post_processor = tokenizers.processors.TemplateProcessing(single="$A")
    plain.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidRequest, match=r"texts\[1\]"):
        Tokenizer(tmp_path).encode(["cat", ""])


def test_vectors_of_any_length_are_ranked_by_their_cosine() -> None:
    passages = np.array([[3, 0], [0, 0.5], [10, 10], [0, 0]], np.float32)
    hits = rank(np.array([0, 2], np.float32), passages, 4)
    assert [hit.index for hit in hits] == [1, 2, 0, 3]
    assert [hit.score for hit in hits] == pytest.approx([1, math.sqrt(0.5), 0, 0])


def test_the_installed_model_says_mean_and_unit_length_itself() -> None:
    head = MiniLM.load(find_weights()).head
    assert (head.modes, len(head.steps), head.columns) == (("mean",), 1, 384)
