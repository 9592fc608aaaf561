"""Requests beside other work on the GPU: producers' and consumers' streams, dropped memory, a full device."""

from __future__ import annotations

import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.errors import OutOfDeviceMemory
from gpu_actors.reference import attention_forward
from gpu_actors.testing import check_output

pytestmark = pytest.mark.gpu

SHAPE = (2, 256, 4, 64)
LONG = 200_000_000
"""Cycles: about a tenth of a second."""


def operands(seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(SHAPE).astype(np.float16) for _ in range(3))


@pytest.fixture
def torch() -> Any:
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip("this build of torch has no tensors on a GPU")
    return found


def test_torch_tensors_still_being_written_are_waited_for(context: Any, torch: Any) -> None:
    host = operands()
    sources = [torch.from_numpy(x).cuda() for x in host]
    inputs = [torch.zeros_like(x) for x in sources]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        for into, source in zip(inputs, sources, strict=True):
            into.copy_(source)
        reply = context.flash_attn.forward(*inputs, causal=True)
        result = reply.result(60).out
    assert isinstance(result, torch.Tensor)
    check_output(result.cpu().numpy(), None, *host, causal=True)


def test_a_result_may_be_used_at_once_and_its_memory_reused_in_order(context: Any, torch: Any) -> None:
    """The caller drops a result that its kernels still read, and torch gives the memory to the next request."""
    side = torch.cuda.Stream()
    sums, expected = [], []
    with torch.cuda.stream(side):
        for seed in range(20):
            host = operands(seed)
            inputs = [torch.from_numpy(x).cuda(non_blocking=False) for x in host]
            out = context.flash_attn.forward(*inputs).result(60).out
            torch.cuda._sleep(LONG // 50)
            sums.append(out.float().sum())
            expected.append(attention_forward(*host).out.sum())
            del out, inputs
        side.synchronize()
    np.testing.assert_allclose([float(x) for x in sums], expected, rtol=0.02, atol=4.0)


def test_inputs_dropped_after_submission_are_read_all_the_same(context: Any, torch: Any) -> None:
    host = operands(3)
    replies = []
    for _ in range(8):
        inputs = [torch.from_numpy(x).cuda() for x in host]
        replies.append(context.flash_attn.forward(*inputs))
        del inputs
        torch.full(SHAPE, float("nan"), dtype=torch.float16, device="cuda")
    for reply in replies:
        check_output(reply.result(60).out.cpu().numpy(), None, *host)


def test_bfloat16_tensors_keep_their_bits(context: Any, torch: Any) -> None:
    host = [x.astype(ml_dtypes.bfloat16) for x in operands(4)]
    inputs = [torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).cuda() for x in host]
    out = context.flash_attn.forward(*inputs).result(60).out
    assert out.dtype == torch.bfloat16
    check_output(out.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16), None, *host)


def test_anything_with_dlpack_is_read_where_it_lies(context: Any, torch: Any) -> None:
    host = operands(5)

    class Foreign:
        def __init__(self, tensor: Any) -> None:
            self.__dlpack__ = tensor.__dlpack__
            self.__dlpack_device__ = tensor.__dlpack_device__

    out = torch.zeros(SHAPE, dtype=torch.float16, device="cuda")
    inputs = [Foreign(torch.from_numpy(x).cuda()) for x in host]
    context.flash_attn.forward(*inputs, out=out).result(60)
    check_output(out.cpu().numpy(), None, *host)


def test_cupy_arrays_on_a_stream_of_their_own(context: Any) -> None:
    import cupy

    host = operands(6)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        inputs = [cupy.asarray(x) for x in host]
        out = context.flash_attn.forward(*inputs).result(60).out
        assert isinstance(out, cupy.ndarray)
        check_output(cupy.asnumpy(out), None, *host)


@pytest.mark.parametrize("given", ["a number", "an object", "nothing"])
def test_a_step_on_the_stream_of_its_own_thread_ends_behind_its_layers(context: Any, given: str) -> None:
    """The handle 2 is another stream on each thread, so the actor's thread cannot record the end of the step there."""
    import cupy
    from cupy.cuda import runtime

    sizes: dict[str, Any] = {"num_blocks": 8, "page_size": 8, "kv_heads": 1, "head_dim": 64, "dtype": "float16"}
    own = cupy.cuda.Stream.ptds
    with context.kv_cache(**sizes, layers=1) as cache, own:
        seq = cache.create().result(60)
        q, k, v = (cupy.asarray(np.ones((1, 1, 1, 64), np.float16)) for _ in range(3))
        sources = [cupy.asarray(np.full((1, 1, 1, 64), value, np.float16)) for value in (2, 3)]
        late = cupy.asarray(np.ones(1 << 26, np.uint8))
        own.synchronize()
        for number, source in enumerate(sources, 1):
            for _ in range(20):
                runtime.memcpyAsync(late.data.ptr, late.data.ptr, late.nbytes, runtime.memcpyDeviceToDevice, own.ptr)
            runtime.memcpyAsync(v.data.ptr, source.data.ptr, v.nbytes, runtime.memcpyDeviceToDevice, own.ptr)
            step = cache.step([seq], heads_q=1).result(60)
            out = step.attend(0, q, k, v, stream={"a number": own.ptr, "an object": own, "nothing": None}[given])
            assert step.commit().result(60) == [number]
            assert own.done
            assert out.get().item(0) == {1: 2.0, 2: 2.5}[number]


def test_a_result_for_another_library_may_be_dropped_while_it_is_read(context: Any) -> None:
    """No library of the caller's keeps the order of its memory, so that of the default stream is kept."""
    import cupy
    from cupy.cuda import runtime

    class Foreign:
        def __init__(self, array: Any) -> None:
            self.__dlpack__ = array.__dlpack__
            self.__dlpack_device__ = array.__dlpack_device__

    inputs = [Foreign(cupy.asarray(np.full((1, 64, 2, 64), value, np.float16))) for value in (1, 2)]
    late, read = cupy.asarray(np.ones(1 << 26, np.uint8)), cupy.asarray(np.zeros((1, 64, 2, 64), np.float16))
    context.flash_attn.forward(*inputs[1:] * 3).result(60)
    runtime.deviceSynchronize()
    out = context.flash_attn.forward(*inputs[:1] * 3).result(60).out
    for _ in range(20):
        runtime.memcpyAsync(late.data.ptr, late.data.ptr, late.nbytes, runtime.memcpyDeviceToDevice, 0)
    runtime.memcpyAsync(read.data.ptr, out.data.ptr, out.nbytes, runtime.memcpyDeviceToDevice, 0)
    place = out.data.ptr
    del out
    gc.collect()
    again = context.flash_attn.forward(*inputs[1:] * 3).result(60).out
    assert again.data.ptr == place
    assert set(read.get().ravel().tolist()) == {1.0}
    assert set(again.get().ravel().tolist()) == {2.0}


def test_a_full_device_fails_one_request_and_later_ones_succeed() -> None:
    import cupy

    pool = cupy.cuda.MemoryPool()
    host = operands(7)
    with ga.open_context("cuda") as context:
        check_output(context.flash_attn.forward(*host).result(60).out, None, *host)
        hoard, piece = [], 1 << 34
        while piece >= 1 << 24:
            try:
                hoard.append(pool.malloc(piece))
            except cupy.cuda.memory.OutOfMemoryError:
                piece //= 2
        large = np.zeros((1, 65_536, 8, 128), np.float16)
        with pytest.raises(OutOfDeviceMemory):
            context.flash_attn.forward(large, large[:, :64], large[:, :64]).result(60)
        assert context.health().ready
        hoard.clear()
        gc.collect()
        pool.free_all_blocks()
        check_output(context.flash_attn.forward(*host).result(60).out, None, *host)
        assert context.flash_attn.forward(large, large[:, :64], large[:, :64]).result(60).out.shape == large.shape


def test_many_requests_at_once_use_bounded_memory_and_are_all_answered(context: Any) -> None:
    host = operands(8)
    replies = [context.flash_attn.forward(*host, causal=True) for _ in range(200)]
    first = replies[0].result(60).out
    check_output(first, None, *host, causal=True)
    for reply in replies[1:]:
        np.testing.assert_array_equal(reply.result(60).out, first)
