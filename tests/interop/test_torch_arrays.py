"""torch tensors on the host: adopted without a copy, results as tensors."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from inside.arrays import CallerNotes, adopt, caller_streams, check_output, restore

import gpu_actors as ga
from gpu_actors.errors import InvalidRequest

torch = pytest.importorskip("torch")

DTYPES = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int32", "int64", "bool"]


def numbered(dtype: str) -> Any:
    return torch.arange(24).reshape(2, 3, 4).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_is_adopted_without_a_copy(dtype: str) -> None:
    tensor = numbered(dtype)
    adopted = adopt(tensor, "q")
    array = adopted.array
    assert (adopted.kind, adopted.device, adopted.source is tensor) == ("torch", "cpu", True)
    assert array.dtype.name == dtype
    assert array.ctypes.data == tensor.data_ptr()
    np.testing.assert_array_equal(array.astype(np.float64), tensor.to(torch.float64).numpy())


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize(
    "cut",
    [lambda t: t.transpose(0, 2), lambda t: t[:, 1:, ::2], lambda t: t[:1].expand(5, 3, 4), lambda t: t[0, 0, 0]],
    ids=["transposed", "sliced", "expanded", "0-d"],
)
def test_any_strides_are_kept(dtype: str, cut: Any) -> None:
    tensor = cut(numbered(dtype))
    array = adopt(tensor, "q").array
    assert array.shape == tuple(tensor.shape)
    assert tuple(step // array.itemsize for step in array.strides) == tensor.stride()
    np.testing.assert_array_equal(array.astype(np.float64), tensor.to(torch.float64).numpy())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_that_requires_grad_is_adopted_where_gradients_are_off(dtype: str) -> None:
    leaf = numbered(dtype).requires_grad_()
    for tensor in (leaf, leaf * 2, torch.nn.Parameter(numbered(dtype))):
        with pytest.raises(InvalidRequest, match=r"interop\.torch\.attention"):
            adopt(tensor, "q")
        array = adopt(tensor, "q", CallerNotes(grad=False)).array
        assert array.ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_becomes_a_tensor_over_the_same_memory(dtype: str) -> None:
    like = adopt(numbered("float32"), "q")
    result = np.arange(6).reshape(2, 3).astype(dtype)
    tensor = restore(result, like)
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.data_ptr() == result.ctypes.data
    np.testing.assert_array_equal(tensor.to(torch.float64).numpy(), result.astype(np.float64))


def test_an_output_tensor_is_filled_through_its_view() -> None:
    out = torch.zeros(2, 3, dtype=torch.bfloat16).T
    view = adopt(out, "out").array
    check_output(view, (3, 2), "bfloat16", "out")
    view[...] = np.full((3, 2), 7, ml_dtypes.bfloat16)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.zeros(3, 3).to_sparse(), "must be dense"),
        (lambda: torch.zeros(3, device="meta"), "not on meta"),
        (lambda: torch.zeros(3, dtype=torch.complex64), "one of the dtypes"),
        (lambda: torch.zeros(3, dtype=torch.complex64).conj().imag, "resolve_neg"),
        (lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8), "one of the dtypes"),
    ],
    ids=["sparse", "meta", "complex", "negative bit", "quantised"],
)
@pytest.mark.filterwarnings("ignore")  # torch warns about the kinds that are refused here
def test_a_tensor_that_is_not_plain_memory_is_refused(make: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        adopt(make(), "k")
    assert caught.value.field == "k"


def test_the_callers_streams_of_a_program_without_cuda_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)  # other tests load it
    assert caller_streams(0) is None


def test_a_compiled_model_attends_in_a_step() -> None:
    sizes: dict[str, Any] = {"num_blocks": 16, "page_size": 4, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}
    weights = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(3)) / 6

    def model(x: Any, attend: Any) -> Any:
        for layer, weight in enumerate(weights):
            heads = (x @ weight).view(1, 1, 8, 8)
            q, k, v = (part.contiguous() for part in heads.split((4, 2, 2), 2))
            x = x + attend(layer, q, k, v).view(1, 32)
        return x

    with ga.open_context("mock") as ctx, ctx.kv_cache(**sizes, layers=2) as cache:
        answers = []
        for called in (model, torch.compile(model, backend="eager")):
            seq, x = cache.create().result(20), torch.ones(1, 32)
            for _ in range(3):
                with cache.step([seq], heads_q=4).result(20) as step:
                    x = called(x, torch.compiler.disable(step.attend))
            answers.append(x)
        assert torch.equal(*answers)
