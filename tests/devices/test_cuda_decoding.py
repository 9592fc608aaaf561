"""Requests over pages on a CUDA device over a fake driver: rows that lie on the device are put together there."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from cases.cached_batches import random_batch
from fakes.bench import Bench, on_device
from fakes.cuda import FakeCuda, Geometry
from fakes.memory import FakeMemory
from fakes.service import service
from fakes.tensor import DeviceTensor
from inside.arrays import DeviceArray, Joined
from inside.kernels import decode_layout
from inside.planning import join, joining_kind
from support.service import eventually
from support.structs import fields_of

from gpu_actors.reference import gather_pages, paged_attention_forward
from gpu_actors.testing import MockClock

HEADS, HEADS_KV, DIM, PAGE, BLOCKS = 4, 2, 64, 16, 12
HALF = np.dtype(np.float16)


def decode_on_host(memory: FakeMemory, params: bytes, geometry: Geometry) -> None:
    """decode_mma with one split over pages of fp16, found through the packed parameters alone."""
    fields = fields_of(params, decode_layout())

    def at(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        return memory.array(int(fields[name]), shape, dtype)

    batch, rows = int(fields["batch"]), int(fields["attention.seqlen_q"])
    q = at("attention.q", (batch, rows, HEADS, DIM), HALF)
    table = at("block_table", (batch, int(fields["table_stride"])), np.int32)
    pools = [at(f"attention.{side}", (BLOCKS, PAGE, HEADS_KV, DIM), HALF) for side in "kv"]
    gathered = gather_pages(*pools, table, at("seq_lens", (batch,), np.int32))
    result = paged_attention_forward(q, gathered, causal=True, softmax_scale=float(fields["attention.softmax_scale"]))
    at("attention.out", (batch, rows, HEADS, DIM), HALF)[...] = result.out.astype(HALF)


def test_rows_on_the_device_share_a_launch_without_a_copy_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, clock = FakeCuda({"decode_mma": decode_on_host}), MockClock()
    batch = random_batch(1, (20, 3, 40), rows=2, heads=(HEADS, HEADS_KV), dim=DIM, dtype="float16")
    pages = batch.pages(PAGE)
    pools = np.zeros((2, BLOCKS, PAGE, HEADS_KV, DIM), HALF)
    pools[:, : len(pages.k)] = pages.k, pages.v
    with service(cuda, monkeypatch, clock=clock, coalesce_delay_us=1e5) as ctx:
        k, v = (DeviceTensor(cuda, pool) for pool in pools)
        down = cuda.calls.count("copy_to_host")
        queries = [DeviceTensor(cuda, batch.q[index : index + 1]) for index in range(3)]
        replies = [
            ctx.flash_attn.paged_forward(
                q, k, v, block_table=pages.block_table[index : index + 1],
                cache_seqlens=pages.cache_seqlens[index : index + 1], num_splits=1,
            )
            for index, q in enumerate(queries)
        ]  # fmt: skip
        eventually(lambda: ctx.stats()["flash_attn"].queued == 0, 60.0)
        eventually(lambda: clock.advance(0.2) or all(reply.done() for reply in replies), 60.0)
        results = [reply.result(20.0).out for reply in replies]
        gathered = gather_pages(*pools, pages.block_table, pages.cache_seqlens)
        expected = paged_attention_forward(batch.q, gathered, causal=True).out.astype(HALF)
        for index, out in enumerate(results):
            result = cuda.memory.array(out.data.ptr, out.shape, HALF)
            assert np.array_equal(result, expected[index : index + 1])
        stats = ctx.stats()["flash_attn"]
        assert (stats.launched, stats.requests_per_launch) == (1, 3.0)
        assert cuda.calls.count("copy_on_device") == 3
        assert cuda.calls.count("copy_to_host") == down


def test_joined_arrays_arrive_one_behind_the_other() -> None:
    bench = Bench()
    arrays = [np.arange(n * 6, dtype=np.float32).reshape(n, 2, 3) + 100 * n for n in (2, 0, 3)]
    parts = tuple(
        DeviceArray(DeviceTensor(bench.cuda, array).block.address, array.shape, array.strides, array.dtype, 0)
        for array in arrays
    )
    joined = join(parts)
    assert isinstance(joined, Joined)
    whole = np.concatenate(arrays)
    assert (joined.shape, joined.strides, len(joined), joined.ndim) == (whole.shape, whole.strides, 5, 3)
    assert joined[:, None].shape == (5, 1, 2, 3)
    assert joined.view(np.dtype(np.int32)).dtype == np.int32
    with pytest.raises(ValueError, match="behind its first axis"):
        joined[0, 1]
    event = bench.launch(joined)
    event.wait()
    out = event.outputs["out"]
    assert np.array_equal(bench.cuda.memory.array(out.address, out.shape, np.float32), 2 * whole)


@pytest.mark.parametrize("last", range(2))
def test_the_producers_of_joined_arrays_are_waited_for(last: int) -> None:
    bench = Bench()
    streams = [bench.cuda.new_stream() for _ in range(2)]
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3) + 100 * n for n in range(2)]
    parts = [on_device(bench, np.zeros_like(array), stream) for array, stream in zip(arrays, streams, strict=True)]

    def write(n: int) -> None:
        bench.cuda.memory.array(parts[n].address, (2, 3), np.float32)[...] = arrays[n]

    for n, stream in enumerate(streams):
        bench.cuda.enqueue(stream, functools.partial(write, n))
    bench.cuda.hang(streams[last])
    event = bench.launch(join(parts))
    bench.cuda.run_all()
    assert not event.done(), "the launch overtook a producer"
    bench.cuda.resume(streams[last])
    event.wait()
    out = event.outputs["out"]
    np.testing.assert_array_equal(bench.cuda.memory.array(out.address, (4, 3), np.float32), 2 * np.concatenate(arrays))


def test_only_whole_arrays_of_one_stream_are_put_together() -> None:
    array = DeviceArray(0, (2, 3), (12, 4), np.dtype(np.float32), 0, 7)
    other = DeviceArray(64, (5, 3), (12, 4), np.dtype(np.float32), 0, 7)
    assert joining_kind(array) == joining_kind(other)
    assert joining_kind(array) != joining_kind(DeviceArray(0, (2, 3), (12, 4), np.dtype(np.float32), 0, 8))
    assert joining_kind(array) != joining_kind(np.zeros((2, 3), np.float32))
    assert joining_kind(array[:, :2]) == "apart"


def test_a_part_of_a_librarys_result_is_that_librarys() -> None:
    source = np.arange(12, dtype=np.float32).reshape(4, 3)
    array = DeviceArray(0, (4, 3), (12, 4), source.dtype, 0, source=source)
    assert np.array_equal(array[1:3].source, source[1:3])
    assert array[:, None].source.shape == (4, 1, 3)
