"""Steps and prepared requests in CUDA graphs of CuPy and torch."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga

pytestmark = pytest.mark.gpu

LAYERS, HEADS, HEADS_Q, DIM = 2, 1, 2, 64
SIZES: dict[str, Any] = {"num_blocks": 32, "page_size": 8, "kv_heads": HEADS, "head_dim": DIM, "dtype": "float16"}


def rows(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal((*shape, DIM)).astype(np.float16)


def on_gpu(cupy: Any, heads: int) -> Any:
    return cupy.zeros((2, 1, heads, DIM), "float16")


def test_a_graph_of_cupy_replays_a_step_over_other_sequences(context: Any) -> None:
    cupy = pytest.importorskip("cupy")
    rng, side = np.random.default_rng(0), cupy.cuda.Stream(non_blocking=True)
    with context.kv_cache(**SIZES, layers=LAYERS) as cache, context.kv_cache(**SIZES, layers=LAYERS) as plain, side:
        seqs = [[one.create().result(60) for _ in range(4)] for one in (cache, plain)]
        for length in (3, 9):
            prompts = rows(rng, 2, LAYERS, 4, length, HEADS)
            for one, of in zip((cache, plain), seqs, strict=True):
                one.append(of, *prompts).result(60)
        fixed = [[on_gpu(cupy, count) for count in (HEADS_Q, HEADS, HEADS, HEADS_Q)] for _ in range(LAYERS)]

        def attend(step: ga.KvStep) -> None:
            for layer, (q, k, v, out) in enumerate(fixed):
                step.attend(layer, q, k, v, out=out)

        step = cache.step(seqs[0][:2], heads_q=HEADS_Q, max_length=64).result(60)
        attend(step)
        side.begin_capture()
        attend(step)
        graph = side.end_capture()
        step.abort().result(60)
        captured = step.captured
        for members in ([0, 1], [2, 3], [3, 0]):
            values = rows(rng, LAYERS, 2, 1, HEADS_Q), *rows(rng, 2, LAYERS, 2, 1, HEADS)
            for layer, arrays in enumerate(fixed):
                for value, array in zip(values, arrays, strict=False):
                    array.set(value[layer])
            step = captured.step([seqs[0][member] for member in members]).result(60)
            step.replay(lambda: graph.launch(side))
            lengths = step.commit().result(60)
            twins = [seqs[1][member] for member in members]
            plain.append(twins, *values[1:]).result(60)
            assert lengths == [plain.length(twin) for twin in twins]
            for layer, (*_, out) in enumerate(fixed):
                wanted = plain.attend(values[0][layer], twins, layer=layer).result(60).out
                assert np.array_equal(out.get(), wanted)


def test_a_graph_of_cupy_replays_a_prepared_request_with_other_lengths(context: Any) -> None:
    cupy = pytest.importorskip("cupy")
    rng, side = np.random.default_rng(1), cupy.cuda.Stream(non_blocking=True)
    with side:
        pages = cupy.asarray(rows(rng, 2, 16, 8, HEADS))
        numbers, counts = np.array([[1, 2], [3, 4]], np.int32), np.array([10, 16], np.int32)
        table, lengths = cupy.asarray(numbers), cupy.asarray(counts)
        q, out = cupy.asarray(rows(rng, 2, 1, HEADS_Q)), on_gpu(cupy, HEADS_Q)
        request = {"k_cache": pages[0], "v_cache": pages[1], "block_table": table, "cache_seqlens": lengths}
        plan = context.flash_attn.prepare(ga.PagedForward(q=q, **request)).result(60)
        side.begin_capture()
        plan.run(q, out=out)
        graph = side.end_capture()
        for _ in range(3):
            numbers, counts = numbers[:, ::-1].copy(), counts - np.int32(3)
            table.set(numbers)
            lengths.set(counts)
            q.set(rows(rng, 2, 1, HEADS_Q))
            graph.launch(side)
            wanted = context.flash_attn.paged_forward(q, **request).result(60).out
            assert np.array_equal(out.get(), wanted.get())


def test_what_a_capture_cannot_hold_is_refused_and_leaves_the_capture_whole(context: Any) -> None:
    cupy = pytest.importorskip("cupy")
    rng, side = np.random.default_rng(2), cupy.cuda.Stream(non_blocking=True)
    with context.kv_cache(**SIZES, layers=LAYERS) as cache, side:
        seqs = [cache.create().result(60) for _ in range(2)]
        cache.append(seqs, *rows(rng, 2, LAYERS, 2, 3, HEADS)).result(60)
        q, k, v, out = (on_gpu(cupy, count) for count in (HEADS_Q, HEADS, HEADS, HEADS_Q))
        step = cache.step(seqs, heads_q=HEADS_Q).result(60)
        side.begin_capture()
        with pytest.raises(ga.InvalidRequest, match="launch once"):
            step.attend(0, q, k, v, out=out)
        q.data.memset_async(60, q.nbytes, side)  # 0x3c3c is about 1
        graph = side.end_capture()
        graph.launch(side)
        for layer in range(LAYERS):
            step.attend(layer, q, k, v, out=out)
        assert step.commit().result(60) == [4, 4]
        assert (q.get().view(np.uint16) == 0x3C3C).all()


def test_a_capture_that_the_program_broke_fails_no_step(context: Any) -> None:
    """Until the program has ended it, nothing waits for its stream, and a step there goes on."""
    cupy = pytest.importorskip("cupy")
    runtime, side = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True)
    with context.kv_cache(**SIZES, layers=1) as cache, side:
        seqs = [cache.create().result(60) for _ in range(2)]
        q, k, v, out = (on_gpu(cupy, count) for count in (HEADS_Q, HEADS, HEADS, HEADS_Q))
        side.synchronize()
        step = cache.step(seqs, heads_q=HEADS_Q).result(60)
        step.attend(0, q, k, v, out=out)
        side.begin_capture()
        with pytest.raises(runtime.CUDARuntimeError):
            side.synchronize()  # breaks the capture
        with pytest.raises(ga.InvalidRequest, match=r"stream=.*is being captured"):
            context.flash_attn.paged_forward(q, k, v, cache_seqlens=np.array([1, 1], np.int32)).result(60)
        with pytest.raises(ga.InvalidRequest, match=r"out=.*its stream is captured"):
            step.attend(0, q, k, v)
        with pytest.raises(ga.InvalidRequest, match=r"stream=.*is being captured"):
            step.commit().result(60)
        with pytest.raises(runtime.CUDARuntimeError):
            side.end_capture()
        step.attend(0, q, k, v, out=out)
        assert step.commit().result(60) == [1, 1]


def test_the_default_stream_is_left_alone_while_a_blocking_stream_is_captured(context: Any) -> None:
    """CuPy's streams are blocking by default: they and the legacy default stream wait for each other."""
    cupy = pytest.importorskip("cupy")
    side, refused = cupy.cuda.Stream(), r"stream=0: .*while a stream .* is being captured"
    with context.kv_cache(**SIZES, layers=1) as cache:
        seqs = [cache.create().result(60) for _ in range(2)]
        q, k, v, out = (on_gpu(cupy, count) for count in (HEADS_Q, HEADS, HEADS, HEADS_Q))
        held = on_gpu(cupy, HEADS)
        lengths = np.array([1, 1], np.int32)
        context.flash_attn.paged_forward(q, k, v, cache_seqlens=lengths).result(60)
        step = cache.step(seqs, heads_q=HEADS_Q).result(60)
        step.attend(0, q, k, v, out=out)
        side.begin_capture()
        with pytest.raises(ga.InvalidRequest, match=refused):
            context.flash_attn.paged_forward(q, k, v, cache_seqlens=lengths).result(60)
        for given in ({"out": out}, {}):
            with pytest.raises(ga.InvalidRequest, match=refused):
                step.attend(0, q, k, v, **given)
        with pytest.raises(ga.InvalidRequest, match=r"stream=0: is being captured"):
            step.commit().result(60)
        aborted = step.abort()
        held.data.memset_async(60, held.nbytes, side)  # 0x3c3c is about 1
        graph = side.end_capture()
        aborted.result(60)
        graph.launch(side)
        assert (held.get().view(np.uint16) == 0x3C3C).all()
        step = cache.step(seqs, heads_q=HEADS_Q).result(60)
        step.attend(0, q, k, v, out=out)
        assert step.commit().result(60) == [1, 1]


def test_requests_in_flight_leave_a_capture_whole(context: Any) -> None:
    """In the global capture mode, which torch uses, other threads may not query events unless they opt out."""
    cupy = pytest.importorskip("cupy")
    rng, side = np.random.default_rng(4), cupy.cuda.Stream(non_blocking=True)
    q, k, v = rows(rng, 3, 1, 512, 4)
    wanted = context.flash_attn.forward(q, k, v).result(60).out
    with side:
        held = on_gpu(cupy, HEADS)
        replies = [context.flash_attn.forward(q, k, v) for _ in range(4)]
        side.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        held.data.memset_async(60, held.nbytes, side)
        answers = [reply.result(60).out for reply in replies]
        graph = side.end_capture()
        graph.launch(side)
        assert (held.get().view(np.uint16) == 0x3C3C).all()
    assert all(np.array_equal(answer, wanted) for answer in answers)


@pytest.mark.parametrize("kind", ["out", "forward", "step", "prepared"])
def test_a_callers_thread_leaves_a_capture_of_another_thread_whole(context: Any, kind: str) -> None:
    """It launches, queries events and, without ``out``, allocates memory."""
    cupy = pytest.importorskip("cupy")
    rng, side = np.random.default_rng(5), cupy.cuda.Stream(non_blocking=True)
    q, k, v = (cupy.asarray(array) for array in rows(rng, 3, 1, 64, 4))
    out = cupy.empty_like(q) if kind == "out" else None
    answers = []
    began, over = threading.Event(), threading.Event()

    async def ask() -> None:
        if kind == "step":
            async with await cache.step([await cache.create()], rows=64, heads_q=4, causal=False) as step:
                answer = step.attend(0, q, k, v)
        elif kind == "prepared":
            plan = await context.flash_attn.prepare(ga.FlashForward(q, k, v))
            answer = plan.run(q, k, v).out
        else:
            answer = (await context.flash_attn.forward(q, k, v, out=out)).out
        answers.append(answer)

    def capture() -> None:
        with side:
            held = on_gpu(cupy, HEADS)
            side.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            began.set()
            assert over.wait(60.0)
            held.data.memset_async(60, held.nbytes, side)
            graph = side.end_capture()
            graph.launch(side)
            assert (held.get().view(np.uint16) == 0x3C3C).all()

    async def program() -> None:
        for _ in range(3):
            await ask()
        captured = asyncio.create_task(asyncio.to_thread(capture))
        assert await asyncio.to_thread(began.wait, 60.0)
        try:
            for _ in range(20):
                await ask()
        finally:
            over.set()
            await captured

    # The main thread has a SIGALRM handler here, so actors do no work on it: the program runs on another thread.
    sizes: Any = {**SIZES, "num_blocks": 256, "kv_heads": 4}
    with context.kv_cache(**sizes) as cache, ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, program()).result(60)
    wanted = answers[0].get()
    assert all(np.array_equal(answer.get(), wanted) for answer in answers)


def test_a_graph_of_torch_replays_a_step_over_other_sequences(context: Any) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this build of torch has no tensors on a GPU")
    rng = np.random.default_rng(3)
    with context.kv_cache(**SIZES, layers=LAYERS) as cache, context.kv_cache(**SIZES, layers=LAYERS) as plain:
        seqs = [[one.create().result(60) for _ in range(2)] for one in (cache, plain)]
        prompts = rows(rng, 2, LAYERS, 2, 5, HEADS)
        for one, of in zip((cache, plain), seqs, strict=True):
            one.append(of, *prompts).result(60)
        heads = (HEADS_Q, HEADS, HEADS, HEADS_Q)
        fixed = [
            [torch.zeros((2, 1, n, DIM), dtype=torch.float16, device="cuda") for n in heads] for _ in range(LAYERS)
        ]

        def attend(step: ga.KvStep) -> None:
            for layer, (q, k, v, out) in enumerate(fixed):
                step.attend(layer, q, k, v, out=out)

        step = cache.step(seqs[0], heads_q=HEADS_Q, max_length=64).result(60)
        attend(step)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend(step)
        step.abort().result(60)
        captured = step.captured
        for _ in range(3):
            values = rows(rng, LAYERS, 2, 1, HEADS_Q), *rows(rng, 2, LAYERS, 2, 1, HEADS)
            for layer, arrays in enumerate(fixed):
                for value, array in zip(values, arrays, strict=False):
                    array.copy_(torch.from_numpy(value[layer]))
            step = captured.step(seqs[0]).result(60)
            step.replay(graph.replay)
            step.commit().result(60)
            plain.append(seqs[1], *values[1:]).result(60)
            for layer, (*_, out) in enumerate(fixed):
                wanted = plain.attend(values[0][layer], seqs[1], layer=layer).result(60).out
                assert np.array_equal(out.cpu().numpy(), wanted)
