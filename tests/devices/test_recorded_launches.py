"""Steps of decoding are recorded once and replayed, and the answers are the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from fakes.bench import KERNELS, Bench
from fakes.cuda import FakeCuda
from inside.planning import bucket, pad_request
from support.kv_cache import Rows, opened, wait
from test_launch_steps import X, add, cuda_kernels, launch, pack, twice

import gpu_actors as ga
from gpu_actors.devices.interface import Launch
from gpu_actors.devices.recorded import Recordings, recording_key
from gpu_actors.errors import LaunchError, OutOfDeviceMemory

# The service


def generate(device: str, steps: int, **options: Any) -> tuple[list[np.ndarray], Any]:
    """Prefill three sequences, then decode them for some steps, forks and all."""
    rows, outs = Rows(1), []
    dim = 64
    spec = {"num_blocks": 32, "page_size": 8, "kv_heads": 2, "head_dim": dim, "dtype": "float16"}
    with ga.open_context(device, ga.ContextOptions(**options)) as ctx, ctx.kv_cache(**spec) as cache:

        def draw(*shape: int) -> np.ndarray:
            return rows.rng.standard_normal((*shape, dim)).astype(np.float16)

        seqs = [wait(cache.create()) for _ in range(3)]
        ends = np.array([0, 5, 12, 13], np.int32)
        wait(cache.append(seqs, draw(13, 2), draw(13, 2), cu_seqlens=ends))
        for step in range(steps):
            if step == 2:
                seqs.append(wait(cache.fork(seqs[0])))
                wait(cache.free(seqs.pop(1)))
            count = len(seqs)
            q, k, v = draw(count, 1, 4), draw(count, 1, 2), draw(count, 1, 2)
            result = wait(cache.attend(q, seqs, k=k, v=v, num_splits=2, return_lse=True))
            outs += [result.out, result.lse, wait(cache.attend(q, seqs, num_splits=2)).out]
        return outs, ctx.actor(ga.KvCacheActor).recording_stats()


@pytest.mark.parametrize("device", ["mock", "emulated"])
def test_replayed_steps_give_what_fresh_launches_give(device: str) -> None:
    steps = 6
    plain, none = generate(device, steps)
    recorded, stats = generate(device, steps, record_launches=True)
    assert tuple(none) == (0, 0, 0)
    assert stats.recorded + stats.replayed == 2 * steps
    assert stats.replayed >= steps, stats
    for one, other in zip(plain, recorded, strict=True):
        assert one.shape == other.shape
        assert np.array_equal(one, other)


def test_requests_over_pages_of_the_callers_are_recorded_too() -> None:
    rng = np.random.default_rng(2)
    pools = rng.standard_normal((2, 16, 8, 2, 16)).astype(np.float32)
    elsewhere = pools.copy()
    with ga.open_context("mock", ga.ContextOptions(record_launches=True)) as ctx:

        def ask(pool: np.ndarray, batch: int, rows: int = 1) -> Any:
            return wait(
                ctx.flash_attn.paged_forward(
                    np.ones((batch, rows, 2, 16), np.float32),
                    *pool,
                    block_table=np.arange(batch * 2, dtype=np.int32).reshape(batch, 2),
                    cache_seqlens=np.full(batch, 11, np.int32),
                )
            )

        def recorded() -> tuple[int, int]:
            return tuple(ctx.flash_attn.recording_stats())[:2]

        first = ask(pools, 3)
        assert recorded() == (1, 0)
        assert np.array_equal(ask(pools, 4).out[:3], first.out)
        assert recorded() == (1, 1), "3 and 4 sequences are one bucket"
        ask(pools, 5)
        ask(elsewhere, 4)
        assert recorded() == (3, 1), "another bucket, and pages elsewhere"
        ask(pools, 1, rows=9)
        assert recorded() == (3, 1), "a prefill is not recorded"


def test_rotated_rows_and_sharing_launches_go_with_recording() -> None:
    def run(**options: Any) -> list[np.ndarray]:
        rows = Rows(3)
        with opened(ga.ContextOptions(**options), num_blocks=32) as (_, cache):
            seqs = [wait(cache.create()) for _ in range(5)]
            outs = []
            for _ in range(4):
                replies = []
                for seq in seqs:
                    q, (k, v) = rows.q(1, 2), rows.new(1, 2)
                    replies.append(cache.attend(q, [seq], k=k, v=v, rope=ga.Rope(dim=8), num_splits=1))
                outs += [one.out for one in wait(*replies)]
            return outs

    for one, other in zip(run(), run(record_launches=True), strict=True):
        assert np.array_equal(one, other)


# Buckets


def test_buckets_are_powers_of_two() -> None:
    assert [bucket(count) for count in (1, 2, 3, 4, 5, 8, 9, 100)] == [1, 2, 4, 4, 8, 8, 16, 128]


def test_a_padded_request_asks_nothing_more() -> None:
    request = ga.PagedForward(
        q=np.ones((3, 1, 2, 8), np.float32),
        k_cache=np.zeros((4, 8, 2, 8), np.float32),
        v_cache=np.zeros((4, 8, 2, 8), np.float32),
        block_table=np.zeros((3, 3), np.int32),
        cache_seqlens=np.array([1, 2, 3], np.int32),
        alibi_slopes=np.ones((3, 2), np.float32),
        sinks=np.ones(2, np.float32),
    )
    padded = pad_request(request)
    assert (padded.q.shape, padded.block_table.shape, padded.alibi_slopes.shape) == ((4, 1, 2, 8), (4, 4), (4, 2))
    assert padded.cache_seqlens.tolist() == [1, 2, 3, 0]
    assert (padded.block_table[3] == -1).all()
    assert padded.sinks is request.sinks


# The book of records


def test_records_are_used_by_one_launch_at_a_time_and_the_oldest_go() -> None:
    dropped: list[int] = []
    book: Recordings[int] = Recordings(dropped.append)
    assert book.acquire("a") is None
    assert book.acquire("a") is None, "the first is in use"
    book.release("a", 1)
    book.release("a", 2)
    assert {book.acquire("a"), book.acquire("a")} == {1, 2}
    book.release("a", 1)
    for number in range(40):
        book.release(number, 100 + number)
    assert dropped == [1, *range(100, 108)]
    assert tuple(book.stats()) == (2, 2, 9)
    book.close()
    assert len(dropped) == 41
    book.release("a", 7)
    assert dropped[-1] == 7


# On the fake driver


@pytest.fixture(params=["late", "random"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(FakeCuda({**KERNELS, "twice": twice, "add": add}, order=request.param, seed=5))


def step(kernels: Any, x: np.ndarray, pool: Any, **changes: Any) -> Launch:
    return dataclasses.replace(launch(kernels, x, pool, pack), recording="step", **changes)


def calls(bench: Bench, name: str) -> int:
    return bench.cuda.calls.count(name)


def test_cuda_replays_a_graph_over_memory_that_stays(bench: Bench) -> None:
    kernels = cuda_kernels(bench)
    pool = bench.device.allocate((20,), "float32", zero=True)
    total = np.zeros(20, np.float32)
    for number in range(1, 6):
        event = bench.stream.launch(step(kernels, number * X, pool))
        event.wait()
        assert (event.outputs["out"] == 2 * number * X).all()
        total += 2 * number * X
    assert (bench.cuda.memory.at(pool.address, 80).view(np.float32) == total).all()
    assert (calls(bench, "begin_capture"), calls(bench, "launch_graph"), calls(bench, "launch_kernel")) == (1, 5, 2)
    assert tuple(bench.stream.recording_stats()) == (1, 4, 0)


def test_launches_in_flight_at_once_have_records_of_their_own(bench: Bench) -> None:
    kernels = cuda_kernels(bench)
    pool = bench.device.allocate((20,), "float32", zero=True)
    events = [bench.stream.launch(step(kernels, number * X, pool)) for number in (1, 2, 3)]
    for number, event in zip((1, 2, 3), events, strict=True):
        event.wait()
        assert (event.outputs["out"] == 2 * number * X).all()
    assert bench.stream.recording_stats().recorded == 3
    into = np.empty(20, np.float32)
    again = step(kernels, 9 * X, pool)
    again.outputs = {"out": again.outputs["out"]._replace(into=into)}
    event = bench.stream.launch(again)
    event.wait()
    assert event.outputs["out"] is into
    assert (into == 18 * X).all()
    assert bench.stream.recording_stats().replayed == 1


def test_what_lies_elsewhere_is_recorded_anew_and_what_is_the_callers_never(bench: Bench) -> None:
    kernels = cuda_kernels(bench)
    pools = [bench.device.allocate((20,), "float32", zero=True) for _ in range(2)]
    for pool in (*pools, *pools):
        bench.stream.launch(step(kernels, X, pool)).wait()
    assert tuple(bench.stream.recording_stats()) == (2, 2, 0)
    callers = dataclasses.replace(pools[0], stream=bench.cuda.new_stream())
    assert recording_key(step(kernels, X, callers)) is None
    assert recording_key(dataclasses.replace(step(kernels, X, pools[0]), recording=None)) is None


def test_graphs_and_their_memory_go_with_the_stream(bench: Bench) -> None:
    kernels = cuda_kernels(bench)
    pool = bench.device.allocate((20,), "float32", zero=True)
    bench.stream.launch(step(kernels, X, pool)).wait()
    flying = bench.stream.launch(step(kernels, X, pool))
    assert bench.cuda.leaks()["graphs"] == 1
    bench.stream.close()
    bench.cuda.run_all()
    bench.stream.retire()  # type: ignore[attr-defined]
    del flying, pool
    bench.device.close()
    assert bench.cuda.leaks() == {}


@pytest.mark.parametrize(
    ("call", "status", "error"), [("end_capture", 1, LaunchError), ("launch_kernel", 2, OutOfDeviceMemory)]
)
def test_a_capture_that_fails_leaves_nothing_and_the_next_one_works(
    bench: Bench, call: str, status: int, error: type[Exception]
) -> None:
    kernels = cuda_kernels(bench)
    pool = bench.device.allocate((20,), "float32", zero=True)
    held = bench.cuda.leaks()["blocks"]
    bench.cuda.fail(call, status)
    with pytest.raises(error):
        bench.stream.launch(step(kernels, X, pool))
    assert "graphs" not in bench.cuda.leaks()
    assert bench.cuda.leaks()["blocks"] == held
    event = bench.stream.launch(step(kernels, X, pool))
    event.wait()
    assert (event.outputs["out"] == 2 * X).all()


def test_a_lost_device_gives_its_graphs_up(bench: Bench) -> None:
    kernels = cuda_kernels(bench)
    pool = bench.device.allocate((20,), "float32", zero=True)
    bench.stream.launch(step(kernels, X, pool)).wait()
    bench.cuda.fail("launch_graph", 700)
    with pytest.raises(ga.ContextLost):
        bench.stream.launch(step(kernels, X, pool))
    bench.stream.close()
    bench.device.close()
