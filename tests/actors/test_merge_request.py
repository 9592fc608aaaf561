"""``flash_attn.merge``: partials merged on the device, on the mock and the emulated one, in process and isolated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.cuda import FakeCuda
from fakes.tensor import DeviceTensor, HostTensor

import gpu_actors as ga
from gpu_actors.partial import MergeGradients, Partial, empty, merge, merge_gradients

HEADS, KV_HEADS, DIM = 4, 2, 32
SINKS = np.array([0.5, -1.0, 2.0, 0.0], np.float32)


@pytest.fixture(scope="module", params=["mock", "emulated", "isolated"])
def ctx(request: pytest.FixtureRequest) -> Iterator[ga.GpuContext]:
    more: dict[str, Any] = {"isolation": "process"} if request.param == "isolated" else {}
    with ga.open_context("mock" if more else request.param, **more) as ctx:
        yield ctx
        assert ctx.flash_attn.restarts == 0


@pytest.fixture(scope="module")
def mock() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx
        assert ctx.flash_attn.restarts == 0


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


def partials(count: int = 2, dtype: Any = np.float32) -> list[Partial]:
    rng = np.random.default_rng(count)
    return [
        Partial(rng.standard_normal((1, 3, HEADS, 8)).astype(dtype), rng.standard_normal((1, HEADS, 3)).astype("f4"))
        for _ in range(count)
    ]


def test_shards_of_the_keys_merge_into_the_whole(ctx: ga.GpuContext) -> None:
    q, k, v = (random(1, n, h, DIM, seed=i) for i, (n, h) in enumerate([(3, HEADS), (40, KV_HEADS), (40, KV_HEADS)]))
    attn = ctx.flash_attn
    whole = attn.forward(q, k, v, sinks=SINKS, return_lse=True).result(200)
    cuts = [slice(0, 7), slice(7, 7), slice(7, 40)]
    shards = [attn.forward(q, k[:, own], v[:, own], return_lse=True).result(200) for own in cuts]
    merged = attn.merge(shards, sinks=SINKS).result(200)
    assert isinstance(merged, ga.AttentionOutput)
    assert merged.out.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(merged.lse, whole.lse, atol=1e-5)
    bound = 2.0**-8 * 2 * np.abs(v.astype(float)).max() + 2.0**-8
    assert np.abs(merged.out.astype(float) - whole.out.astype(float)).max() < bound


def test_it_answers_as_the_merge_on_the_host_does(ctx: ga.GpuContext) -> None:
    given = partials(3)
    given[1].lse[0, 2, 1] = -np.inf
    given[1].out[0, 1, 2] = np.nan
    merged = ctx.flash_attn.merge(given, out_dtype="float64").result(200)
    wanted = merge(given, out_dtype="float64")
    assert merged.lse.dtype == np.float64
    np.testing.assert_allclose(merged.out, wanted.out, atol=1e-14)
    np.testing.assert_allclose(merged.lse, wanted.lse, atol=1e-14)


def into(dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    return rng.standard_normal((1, 3, HEADS, 8)).astype(dtype), rng.standard_normal((1, HEADS, 3)).astype("f4")


def test_its_gradient_is_that_of_the_merge_on_the_host(ctx: ga.GpuContext) -> None:
    given = partials(3)
    given[1].lse[0, 2, 1] = -np.inf
    given[1].out[0, 1, 2] = np.nan
    dout, dlse = into()
    found = ctx.flash_attn.merge_backward(given, dout, dlse, sinks=SINKS).result(200)
    wanted = merge_gradients(given, dout, dlse, sinks=SINKS)
    assert isinstance(found, MergeGradients)
    assert isinstance(found.partials[2], Partial)
    assert not found.partials[1].out[0, 1, 2].any()
    for mine, theirs in zip(found.partials, wanted.partials, strict=True):
        assert (mine.out.dtype, mine.lse.dtype) == (np.float32, np.float32)
        np.testing.assert_allclose(mine.out, theirs.out, rtol=2e-6, atol=1e-7)
        np.testing.assert_allclose(mine.lse, theirs.lse, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(found.dsinks, wanted.dsinks, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (0, 2, 8), (2, 3, 0, 8)])
def test_nothing_has_an_empty_gradient(mock: ga.GpuContext, shape: tuple[int, ...]) -> None:
    found = mock.flash_attn.merge_backward([empty(shape)] * 2, np.zeros(shape, "f4")).result(60)
    assert [part.out.shape for part in found.partials] == [shape] * 2
    assert found.dsinks is None


def test_a_library_gets_gradients_of_its_own(ctx: ga.GpuContext) -> None:
    torch = pytest.importorskip("torch")
    given = [Partial(torch.from_numpy(out), torch.from_numpy(lse)) for out, lse in partials()]
    dout, dlse = map(torch.from_numpy, into())
    found = ctx.flash_attn.merge_backward(given, dout, dlse).result(200)
    wanted = merge_gradients(partials(), *into())
    for mine, theirs in zip(found.partials, wanted.partials, strict=True):
        assert isinstance(mine.out, torch.Tensor)
        assert isinstance(mine.lse, torch.Tensor)
        np.testing.assert_allclose(mine.lse.numpy(), theirs.lse, atol=2e-6)


def wrong_gradients() -> Iterator[tuple[str, Any, Any, Any, str, type[ga.RequestError]]]:
    dout, dlse = into()
    half = partials(dtype=ml_dtypes.bfloat16)
    yield "no partial", [], dout, None, "partials", ga.InvalidRequest
    yield "shape", partials(), dout[:, :2], None, "dout", ga.InvalidRequest
    yield "dtype", partials(), dout.astype("i4"), None, "dout", ga.InvalidRequest
    yield "lse shape", partials(), dout, dlse[..., :2], "dlse", ga.InvalidRequest
    yield "lse dtype", partials(), dout, dlse.astype("f8"), "dlse", ga.InvalidRequest
    yield "rounded twice", half, dout.astype("f8"), None, "dout", ga.Unsupported


@pytest.mark.parametrize("case", list(wrong_gradients()), ids=lambda case: case[0])
def test_a_refusal_of_a_gradient_names_the_argument(ctx: ga.GpuContext, case: Any) -> None:
    _, given, dout, dlse, field, kind = case
    with pytest.raises(kind) as caught:
        ctx.flash_attn.merge_backward(given, dout, dlse).result(60)
    assert caught.value.field == field


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (0, 2, 8), (2, 3, 0, 8)])
def test_nothing_merges_into_nothing(ctx: ga.GpuContext, shape: tuple[int, ...]) -> None:
    merged = ctx.flash_attn.merge([empty(shape), empty(shape)]).result(60)
    assert merged.out.shape == shape
    assert merged.lse.shape == empty(shape).lse.shape


def test_a_library_gets_its_own_arrays(ctx: ga.GpuContext) -> None:
    torch = pytest.importorskip("torch")
    wanted = merge(partials())
    given = [Partial(torch.from_numpy(out), torch.from_numpy(lse)) for out, lse in partials()]
    merged = ctx.flash_attn.merge(given).result(200)
    assert isinstance(merged.out, torch.Tensor)
    assert isinstance(merged.lse, torch.Tensor)
    np.testing.assert_allclose(merged.out.numpy(), wanted.out, atol=1e-6)


def test_arrays_with_dlpack_are_taken(mock: ga.GpuContext) -> None:
    given = [Partial(HostTensor(out), HostTensor(lse)) for out, lse in partials()]
    merged = mock.flash_attn.merge(given, sinks=HostTensor(SINKS)).result(60)
    np.testing.assert_array_equal(np.asarray(merged.out), merge(partials(), sinks=SINKS).out)


def test_an_array_on_another_device_is_refused_by_its_name(mock: ga.GpuContext) -> None:
    cuda = FakeCuda()
    for field, index in (("out", 0), ("lse", 1)):
        given = partials()
        changed = given[1]._replace(**{field: DeviceTensor(cuda, given[1][index])})
        with pytest.raises(ga.InvalidRequest, match="must lie on the host") as caught:
            mock.flash_attn.merge([given[0], changed]).result(60)
        assert caught.value.field == f"partials[1].{field}"


def wrong_requests() -> Iterator[tuple[str, Any, dict[str, Any], str, type[ga.RequestError]]]:
    a, b = partials()
    yield "no list", a, {}, "partials", ga.InvalidRequest
    yield "none", [], {}, "partials", ga.InvalidRequest
    yield "no partial", [a, 1], {}, "partials[1]", ga.InvalidRequest
    yield "no lse", [a, ga.AttentionOutput(b.out)], {}, "partials[1].lse", ga.InvalidRequest
    yield "shape", [a, Partial(b.out[:, :2], b.lse[..., :2])], {}, "partials[1].out", ga.InvalidRequest
    yield "lse shape", [Partial(a.out, a.lse[..., :2])], {}, "partials[0].lse", ga.InvalidRequest
    yield "dtypes", [a, Partial(b.out.astype("f2"), b.lse)], {}, "partials[1].out", ga.InvalidRequest
    yield "lse dtypes", [a, Partial(b.out, b.lse.astype("f8"))], {}, "partials[1].lse", ga.InvalidRequest
    yield "axes", [Partial(a.out[None], a.lse[None])], {}, "partials[0].out", ga.InvalidRequest
    yield "no columns", [Partial(a.out[..., :0], a.lse)], {}, "partials[0].out", ga.InvalidRequest
    yield "sinks", [a], {"sinks": SINKS[:2]}, "sinks", ga.InvalidRequest
    yield "dtype of sinks", [a], {"sinks": SINKS.astype("f8")}, "sinks", ga.InvalidRequest
    yield "out_dtype", [a], {"out_dtype": "int8"}, "out_dtype", ga.InvalidRequest
    yield "rounded twice", partials(dtype="f8"), {"out_dtype": "float16"}, "out_dtype", ga.Unsupported


@pytest.mark.parametrize("case", list(wrong_requests()), ids=lambda case: case[0])
def test_a_refusal_names_the_argument(ctx: ga.GpuContext, case: Any) -> None:
    _, given, options, field, kind = case
    with pytest.raises(kind) as caught:
        ctx.flash_attn.merge(given, **options).result(60)
    assert caught.value.field == field


def test_a_message_is_taken_too(mock: ga.GpuContext) -> None:
    message = ga.MergePartials(partials(), SINKS, "float16")
    assert "MergePartials(" in repr(message)
    merged = mock.flash_attn.submit(message).result(60)
    assert merged.out.dtype == np.float16
    gradients = mock.flash_attn.submit(ga.MergeBackward(partials(), *into(), SINKS)).result(60)
    np.testing.assert_array_equal(gradients.dsinks, merge_gradients(partials(), *into(), sinks=SINKS).dsinks)
