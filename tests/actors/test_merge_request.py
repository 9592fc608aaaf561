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


def partials(count: int = 2, dtype: Any = np.float32) -> list[Partial]:
    rng = np.random.default_rng(count)
    return [
        Partial(rng.standard_normal((1, 3, HEADS, 8)).astype(dtype), rng.standard_normal((1, HEADS, 3)).astype("f4"))
        for _ in range(count)
    ]


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
def test_nothing_merges_into_nothing(mock: ga.GpuContext, shape: tuple[int, ...]) -> None:
    merged = mock.flash_attn.merge([empty(shape), empty(shape)]).result(60)
    assert merged.out.shape == shape
    assert merged.lse.shape == empty(shape).lse.shape
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


INVALID, UNSUPPORTED = ga.InvalidRequest, ga.Unsupported


def wrong_merges() -> Iterator[tuple[str, type[ga.RequestError], list[Any], dict[str, Any]]]:
    a, b = partials()
    yield "partials", INVALID, [a], {}
    yield "partials", INVALID, [[]], {}
    yield "partials[1]", INVALID, [[a, 1]], {}
    yield "partials[1].lse", INVALID, [[a, ga.AttentionOutput(b.out)]], {}
    yield "partials[1].out", INVALID, [[a, Partial(b.out[:, :2], b.lse[..., :2])]], {}
    yield "partials[0].lse", INVALID, [[Partial(a.out, a.lse[..., :2])]], {}
    yield "partials[1].out", INVALID, [[a, Partial(b.out.astype("f2"), b.lse)]], {}
    yield "partials[1].lse", INVALID, [[a, Partial(b.out, b.lse.astype("f8"))]], {}
    yield "partials[0].out", INVALID, [[Partial(a.out[None], a.lse[None])]], {}
    yield "partials[0].out", INVALID, [[Partial(a.out[..., :0], a.lse)]], {}
    yield "sinks", INVALID, [[a]], {"sinks": SINKS[:2]}
    yield "sinks", INVALID, [[a]], {"sinks": SINKS.astype("f8")}
    yield "out_dtype", INVALID, [[a]], {"out_dtype": "int8"}
    yield "out_dtype", UNSUPPORTED, [partials(dtype="f8")], {"out_dtype": "float16"}


def wrong_gradients() -> Iterator[tuple[str, type[ga.RequestError], list[Any]]]:
    dout, dlse = into()
    yield "partials", INVALID, [[], dout]
    yield "dout", INVALID, [partials(), dout[:, :2]]
    yield "dout", INVALID, [partials(), dout.astype("i4")]
    yield "dlse", INVALID, [partials(), dout, dlse[..., :2]]
    yield "dlse", INVALID, [partials(), dout, dlse.astype("f8")]
    yield "dout", UNSUPPORTED, [partials(dtype=ml_dtypes.bfloat16), dout.astype("f8")]


def test_a_refusal_names_the_argument(mock: ga.GpuContext) -> None:
    attn = mock.flash_attn
    asked: list[Any] = [(*wrong[:2], attn.merge(*wrong[2], **wrong[3])) for wrong in wrong_merges()]
    asked += [(*wrong[:2], attn.merge_backward(*wrong[2])) for wrong in wrong_gradients()]
    for field, kind, reply in asked:
        with pytest.raises(kind) as caught:
            reply.result(60)
        assert caught.value.field == field


def test_a_message_is_taken_too(mock: ga.GpuContext) -> None:
    message = ga.MergePartials(partials(), SINKS, "float16")
    assert "MergePartials(" in repr(message)
    merged = mock.flash_attn.submit(message).result(60)
    assert merged.out.dtype == np.float16
    gradients = mock.flash_attn.submit(ga.MergeBackward(partials(), *into(), SINKS)).result(60)
    np.testing.assert_array_equal(gradients.dsinks, merge_gradients(partials(), *into(), sinks=SINKS).dsinks)
