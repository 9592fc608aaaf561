"""Attention of one long sequence by rows over several workers equals one context's, gradients included."""

from __future__ import annotations

from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import shards

import gpu_actors as ga
from gpu_actors.distributed import ContextPool, context_split, context_split_backward, open_pool, zigzag
from gpu_actors.remote import InProcess
from gpu_actors.testing import FaultPlan


@pytest.mark.parametrize("parts", [1, 4])
async def test_it_equals_one_context(pool: ContextPool, whole: ga.GpuContext, parts: int) -> None:
    for name in shards.CONTEXT if parts > 1 else ("bias and sinks", "varlen, causal"):
        try:
            await shards.check_context_split(pool, whole, name, parts)
        except BaseException as error:
            error.add_note(name)
            raise


async def test_fp8_operands_equal_one_context(pool: ContextPool, whole: ga.GpuContext) -> None:
    factors = np.abs(shards.arrays((2, 2), 5)) + np.float32(0.2)
    operands = shards.operands(dtype=ml_dtypes.float8_e4m3fn)
    request = ga.FlashForward(
        **operands, causal=True, k_descale=factors, v_descale=factors[::-1].copy(), return_lse=True
    )
    result, expected = await context_split(pool, request, parts=3), await whole.flash_attn.submit(request)
    shards.close(result.out, expected.out, "out")
    shards.close(result.lse, expected.lse, "lse")


@pytest.mark.parametrize(("rows", "parts"), [(0, 1), (1, 3), (7, 2), (64, 4), (1000, 7)])
def test_a_zigzag_deals_out_every_row_once_and_work_evenly(rows: int, parts: int) -> None:
    dealt = zigzag(rows, parts)
    result = [row for pair in dealt for block in pair for row in range(rows)[block]]
    assert sorted(result) == list(range(rows))
    work = [sum(row + 1 for block in pair for row in range(rows)[block]) for pair in dealt]
    assert max(work) - min(work) <= 2 * rows  # pairs of row and key, out of rows * rows / 2
    with pytest.raises(ga.InvalidRequest):
        zigzag(-1, parts)
    with pytest.raises(ga.InvalidRequest):
        zigzag(rows, 0)


class Recorder:
    """Stands for a pool, and keeps the requests."""

    def __init__(self, pool: ContextPool) -> None:
        self.dice = pool.dice
        self.requests: list[ga.FlashForward] = []
        self.homes: Counter[str] = Counter()
        self.keys: Counter[str] = Counter()
        self._pool = pool

    async def ask(self, request: Any, *, timeout: float | None, choose: Any) -> Any:
        home = ""

        def noted(members: Any) -> Any:
            nonlocal home
            member = choose(members)
            home = member.name
            self.homes[home] += 1
            return member

        def submitted(ctx: ga.GpuContext) -> Any:
            reply = request(ctx)
            message = reply._call.message
            self.requests.append(message)
            self.keys[home] += message.k.shape[-3]
            return reply

        return await self._pool.ask(submitted, timeout=timeout, choose=noted)


async def test_workers_get_the_keys_that_their_rows_see(pool: ContextPool) -> None:
    async def lengths(**options: Any) -> list[tuple[int, int]]:
        recorder = Recorder(pool)
        request = ga.FlashForward(**shards.operands(48, 48), **options)
        await context_split(recorder, request, parts=3)  # type: ignore[arg-type]
        assert sorted(recorder.homes.values()) == [2, 2, 2]
        if options == {"causal": True}:
            assert list(recorder.keys.values()) == [56, 56, 56]
        return sorted((one.q.shape[1], one.k.shape[1]) for one in recorder.requests)

    assert await lengths() == [(8, 48)] * 6
    assert await lengths(causal=True) == [(8, keys) for keys in (8, 16, 24, 32, 40, 48)]
    assert await lengths(causal=True, window_size=(4, 0)) == [(8, 8), *[(8, 12)] * 5]
    assert await lengths(window_size=(4, 2)) == [(8, 10), (8, 12), *[(8, 14)] * 4]
    assert await lengths(causal=True, window_size=(4, 0), sink_tokens=1) == [
        (8, keys) for keys in (8, 16, 24, 32, 40, 48)
    ]


async def test_each_packed_sequence_is_cut_by_itself(pool: ContextPool) -> None:
    recorder = Recorder(pool)
    request = ga.FlashForward(**shards.packed((8, 8), (4, 20), (0, 3)), causal=True)
    await context_split(recorder, request, parts=2)  # type: ignore[arg-type]
    ends = [[one.cu_seqlens_q.tolist(), one.cu_seqlens_k.tolist()] for one in recorder.requests]
    assert sorted(ends) == [
        [[0, 2, 3, 3], [0, keys, keys + 16 + keys // 2, keys + 16 + keys // 2]] for keys in (2, 4, 6, 8)
    ]
    assert sorted(recorder.homes.values()) == [2, 2]
    assert list(recorder.keys.values()) == [47, 47]


async def test_no_rows_and_no_keys(pool: ContextPool, whole: ga.GpuContext) -> None:
    nothing = [shards.operands(*lengths) for lengths in ((0, 5), (5, 0), (0, 0))]
    nothing += [shards.packed(*lengths) for lengths in (((0, 5),), ((5, 0), (0, 0)), ((0, 0),))]
    for arguments in nothing:
        request = ga.FlashForward(**arguments, causal=True, return_lse=True)
        result, expected = await context_split(pool, request, parts=2), await whole.flash_attn.submit(request)
        np.testing.assert_array_equal(result.out, expected.out)
        np.testing.assert_array_equal(result.lse, expected.lse)


async def test_a_lost_worker_costs_no_answer(whole: ga.GpuContext) -> None:
    options = ga.ContextOptions(
        fault_plan=FaultPlan().lose_context(launch=2), restart=ga.RestartPolicy(max_restarts=99, backoff=0.0)
    )
    async with open_pool("mock", workers=3, options=options, workplace=InProcess, seed=0, retries=8) as pool:
        await shards.check_context_split(pool, whole, "bias and sinks", 3)
        assert pool.stats().repeated


async def test_what_is_refused(pool: ContextPool) -> None:
    def request(kind: Any = ga.FlashForward, **changed: Any) -> Any:
        return kind(**{**shards.operands(), **changed})

    def varlen(**changed: Any) -> Any:
        return request(**{**shards.packed((9, 9), (5, 12)), **changed})

    for arguments, field in (
        (request(**shards.packed((9, 9), (5, 12)), causal=True, dropout_p=0.5), "dropout_p"),
        (request(out=shards.arrays((2, 22, 4, 6))), "out"),
        (request(**shards.operands(9, 30), causal=True, dropout_p=0.5), "dropout_p"),
        (request(seqused_q=np.array([5, 22], np.int32)), "seqused_q"),
        (request(seqused_k=np.array([1, 2], np.int32), causal=True), "seqused_k"),
    ):
        with pytest.raises(ga.Unsupported) as refused:
            await context_split(pool, arguments, parts=2)
        assert refused.value.field == field
    for arguments, parts, field in (
        (request(), 0, "parts"),
        (request(q=shards.arrays((22, 4, 8))), 2, "q"),
        (request(v=shards.arrays((2, 21, 2, 6))), 2, "v"),
        (request(bias=shards.arrays((1, 4, 22, 21))), 2, "bias"),
        (request(window_size=(-2, 0)), 2, "window_size"),
        (request(k_positions=shards.arrays((2,))), 2, "k_positions"),
        (request(softcap=-1.0), 2, "softcap"),
        ("q", 2, "request"),
        (varlen(), 0, "parts"),
        (varlen(q=shards.arrays((2, 22, 4, 8))), 2, "q"),
        (varlen(v=shards.arrays((20, 2, 6))), 2, "v"),
        (varlen(cu_seqlens_k=None), 2, "cu_seqlens_k"),
        (varlen(cu_seqlens_q=np.array([0, 9, 13], np.int32)), 2, "cu_seqlens_q"),
        (varlen(cu_seqlens_q=np.array([0, 15, 14], np.int32)), 2, "cu_seqlens_q"),
        (varlen(cu_seqlens_q=np.array([0, 9, 14], np.int64)), 2, "cu_seqlens_q"),
        (varlen(cu_seqlens_k=np.array([0, 9, 20, 21], np.int32)), 2, "cu_seqlens_k"),
        (varlen(bias=shards.arrays((3, 4, 9, 12))), 2, "bias"),
        (varlen(bias=shards.arrays((2, 4, 8, 12))), 2, "bias"),
        (varlen(bias=shards.arrays((2, 4, 9, 11))), 2, "bias"),
        (varlen(bias=shards.arrays((2, 3, 9, 12))), 2, "bias"),
        (varlen(bias=shards.arrays((9, 12))), 2, "bias"),
        (varlen(q_positions=np.zeros(3, np.int32)), 2, "q_positions"),
    ):
        with pytest.raises(ga.InvalidRequest) as wrong:
            await context_split(pool, arguments, parts=parts)
        assert wrong.value.field == field, field
    whole_rows = {"out": shards.arrays((2, 22, 4, 6)), "dout": shards.arrays((2, 22, 4, 6))}
    with pytest.raises(ga.InvalidRequest) as wrong:
        await context_split_backward(
            pool, request(ga.FlashBackward, lse=shards.arrays((2, 4, 21)), **whole_rows), parts=2
        )
    assert wrong.value.field == "lse"
    with pytest.raises(ga.InvalidRequest, match="FlashForward"):
        await context_split(pool, request(ga.FlashBackward, lse=shards.arrays((2, 4, 22)), **whole_rows), parts=2)
    assert not any(worker.outstanding for worker in pool.stats().workers.values())
