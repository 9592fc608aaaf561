"""KvCache on mock: rows are written to the right places, and pages are shared, copied and kept."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.kv_cache import DIM, HEADS, PAGE, Rows, attention, contents, holds, opened, spec, wait
from support.service import eventually

import gpu_actors as ga
from gpu_actors.kv.sequences import GroupPages, PageTable, block_table, table_width
from gpu_actors.testing import reference


def test_attention_and_append_are_one_launch_and_a_list_may_be_one_sequence() -> None:
    rows = Rows(2)
    with opened() as (ctx, cache):
        seq = wait(cache.create())
        first = rows.new(5)
        assert wait(cache.append(seq, *first)) == 5
        q, (k, v) = rows.q(1, 4), rows.new(1, 4)
        launched = ctx.stats()["kv_cache"].launched
        result = wait(cache.attend(q, seq, k=k, v=v, return_lse=True))
        assert (result.out.shape, result.lse.shape) == ((1, 4, 4, DIM), (1, 4, 4))
        assert ctx.stats()["kv_cache"].launched == launched + 1
        whole = [np.concatenate([old, new[0]]) for old, new in zip(first, (k, v), strict=True)]
        assert holds(cache, seq, *whole)
        np.testing.assert_allclose(result.out[0], attention(q[0], *whole), rtol=1e-5, atol=1e-6)
        wait(cache.truncate(seq, 6))
        assert holds(cache, seq, *(side[:6] for side in whole))
        assert (cache.length(seq), cache.stats().free_blocks) == (6, 7)
        wait(cache.truncate(seq, 0))
        assert cache.stats().free_blocks == 8


def test_fp8_pools_quantise_what_comes_and_descale_what_is_read() -> None:
    rows = Rows(5)
    scales = {"k_descale": np.array([0.5, 2.0], np.float32), "v_descale": np.array([0.25, 1.5], np.float32)}
    with opened(dtype=ml_dtypes.float8_e4m3fn, **scales) as (_, cache):
        seq = wait(cache.create())
        k, v = (array.astype(ml_dtypes.bfloat16) for array in rows.new(20))
        wait(cache.append(seq, k, v))
        stored = contents(cache, seq)
        for array, name, held in ((k, "k_descale", stored[0]), (v, "v_descale", stored[1])):
            expected = (array.astype(np.float32) / scales[name][:, None]).astype(ml_dtypes.float8_e4m3fn)
            assert np.array_equal(held.view(np.uint8), expected.view(np.uint8))
        q = rows.q(1, 1).astype(ml_dtypes.bfloat16)
        read = [
            held.astype(np.float64) * scales[name][:, None]
            for held, name in zip(stored, ("k_descale", "v_descale"), strict=True)
        ]
        result = wait(cache.attend(q, seq))
        np.testing.assert_allclose(result.out[0].astype(float), attention(q[0], *read), rtol=2**-8, atol=2**-9)


def test_fp8_queries_attend_to_an_fp8_pool() -> None:
    rows, dtype = Rows(7), ml_dtypes.float8_e5m2
    with opened(dtype=dtype) as (_, cache):
        seqs = wait(cache.create(), cache.create())
        k, v = ((array * 2).astype(dtype) for array in rows.new(2, 9))
        q, scale = rows.q(2, 3).astype(dtype), np.array([[0.5, 2.0], [1.0, -0.25]], np.float32)
        result = wait(cache.attend(q, seqs, k=k, v=v, q_descale=scale, causal=False))
        assert result.out.dtype.name == "bfloat16"
        for index in range(2):
            scaled = q[index].astype(np.float64) * np.repeat(scale[index], 2)[:, None]
            kept = (x[index : index + 1].astype(np.float64) for x in (k, v))
            expected = reference.attention_forward(scaled[None], *kept).out[0]
            np.testing.assert_allclose(result.out[index].astype(float), expected, rtol=2**-8, atol=2**-9)
        turned = cache.attend(q, seqs, k=k, v=v, rope=ga.Rope(dim=8))
        with pytest.raises(ga.Unsupported, match="fp8 already cannot be rotated"):
            wait(turned)


@pytest.mark.parametrize(("how", "interleaved"), [("places", False), ("positions", True), ("tables", False)])
def test_keys_and_queries_are_rotated_on_the_way(how: str, interleaved: bool) -> None:
    rows = Rows(6)
    positions = {"places": np.arange(5, 8), "positions": np.array([4, 40, 0]), "tables": np.arange(5, 8)}[how]
    base = ga.Rope(dim=8, base=100.0, interleaved=interleaved)
    angles = positions[:, None] * np.array(base.frequencies)
    arguments: dict[str, Any] = {"rope": base}
    if how == "positions":
        arguments["positions"] = positions.astype(np.int32)
    if how == "tables":
        everywhere = np.arange(16)[:, None] * np.array(base.frequencies)
        arguments = {"rope": ga.Rope(dim=8, interleaved=interleaved, table_rows=16)}
        arguments |= {
            "rope_cos": np.cos(everywhere).astype(np.float32),
            "rope_sin": np.sin(everywhere).astype(np.float32),
        }

    def rotated(x: np.ndarray) -> np.ndarray:
        """By complex numbers, unlike the oracle."""
        pairs = x[..., :8].reshape(*x.shape[:-1], *((4, 2) if interleaved else (2, 4))).astype(np.float64)
        real, imaginary = (pairs[..., 0], pairs[..., 1]) if interleaved else (pairs[..., 0, :], pairs[..., 1, :])
        turned = (real + 1j * imaginary) * np.exp(1j * angles)[:, None]
        parts = np.stack([turned.real, turned.imag], -1 if interleaved else -2)
        return np.concatenate([parts.reshape(*x.shape[:-1], 8), x[..., 8:]], -1).astype(np.float32)

    with opened() as (_, cache):
        seq = wait(cache.create())
        k, v = rows.new(5)
        wait(cache.append(seq, k, v))
        q, (k_new, v_new) = rows.q(1, 3), rows.new(1, 3)
        result = wait(cache.attend(q, seq, k=k_new, v=v_new, **arguments))
        keys = np.concatenate([k, rotated(k_new[0])])
        np.testing.assert_allclose(contents(cache, seq)[0], keys, rtol=1e-5, atol=1e-5)
        expected = attention(rotated(q[0]), keys, np.concatenate([v, v_new[0]]))
        np.testing.assert_allclose(result.out[0], expected, rtol=1e-4, atol=1e-5)


# Pages


def test_forks_share_pages_until_one_of_them_writes() -> None:
    rows = Rows(7)
    with opened() as (_, cache):
        seq = wait(cache.create())
        k, v = rows.new(13)
        wait(cache.append(seq, k, v))
        forks = [wait(cache.fork(seq)) for _ in range(2)]
        assert [fork.cached for fork in forks] == [13, 13]
        assert (cache.stats().free_blocks, cache.stats().shared_blocks, cache.stats().sequences) == (6, 2, 3)
        added = [rows.new(2), rows.new(4)]
        wait(cache.append(forks[0], *added[0]))
        assert (cache.stats().free_blocks, cache.stats().shared_blocks) == (5, 2)
        wait(cache.append(seq, *added[1]))
        assert (cache.stats().free_blocks, cache.stats().shared_blocks) == (3, 1), "the last one need not copy"
        assert holds(cache, forks[0], np.concatenate([k, added[0][0]]), np.concatenate([v, added[0][1]]))
        assert holds(cache, seq, np.concatenate([k, added[1][0]]), np.concatenate([v, added[1][1]]))
        assert holds(cache, forks[1], k, v)
        wait(cache.free(seq), cache.free(forks[0]))
        assert holds(cache, forks[1], k, v)
        wait(cache.free(forks[1]))
        assert cache.stats()[:4] == (8, 8, 0, 0)


def test_two_forks_that_append_in_one_request_both_copy() -> None:
    rows = Rows(8)
    with opened() as (_, cache):
        seq = wait(cache.create())
        k, v = rows.new(5)
        wait(cache.append(seq, k, v))
        fork = wait(cache.fork(seq))
        more = rows.new(2, 1)
        assert wait(cache.append([seq, fork], *more)) == [6, 6]
        for index, one in enumerate((seq, fork)):
            assert holds(cache, one, np.concatenate([k, more[0][index]]), np.concatenate([v, more[1][index]]))
        assert (cache.stats().free_blocks, cache.stats().shared_blocks) == (6, 0)


def prompt(tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array(tokens, np.float32)[:, None, None]
    k = np.cumsum(np.sin(ids + np.arange(HEADS * DIM).reshape(HEADS, DIM)), axis=0).astype(np.float32)
    return k, -k


def fill(cache: ga.KvCache, tokens: list[int], named: bool = True) -> ga.KvSequence:
    """A sequence of a prompt; only rows that are not cached yet are appended."""
    seq = wait(cache.create(tokens))
    k, v = prompt(tokens)
    rest = slice(seq.cached, None)
    wait(cache.append(seq, k[rest], v[rest], tokens=tokens[rest] if named else None))
    assert holds(cache, seq, k, v)
    return seq


def test_prompts_that_begin_alike_share_whole_pages() -> None:
    with opened(num_blocks=16) as (_, cache):
        tokens = list(range(20))
        assert fill(cache, tokens).cached == 0
        assert fill(cache, tokens).cached == 16
        assert fill(cache, tokens[:17]).cached == 16
        assert fill(cache, tokens[:16]).cached == 8, "the last token is always asked for"
        assert fill(cache, [*tokens[:8], 99, *tokens[9:]]).cached == 8
        assert fill(cache, [99, *tokens[1:]]).cached == 0, "a page is known by all that comes before it"
        assert (cache.stats().shared_blocks, cache.stats().prefix_hits) == (2, 6)


def test_sharing_is_by_tokens_that_were_given_and_ends_where_they_do() -> None:
    with opened() as (_, cache):
        tokens = list(range(20))
        fill(cache, tokens, named=False)
        assert fill(cache, tokens).cached == 0
        seq = wait(cache.create(tokens))
        assert seq.cached == 16
        k, v = prompt(tokens)
        wait(cache.append(seq, k[16:18], v[16:18]))  # of unknown tokens, so pages from here on have no name
        wait(cache.append(seq, *prompt(list(range(50, 60))), tokens=list(range(50, 60))))
        wait(cache.free(seq))
        assert wait(cache.create([*tokens[:18], *range(50, 60)])).cached == 16


def test_pages_of_prompts_are_kept_until_they_are_needed_the_least_recently_used_first() -> None:
    with opened() as (_, cache):
        old, new = list(range(25)), list(range(100, 125))
        for tokens in (old, new, old):
            wait(cache.free(fill(cache, tokens)))
        assert (cache.stats().free_blocks, cache.stats().prefix_blocks) == (8, 6)
        big = wait(cache.create())
        wait(cache.append(big, *Rows().new(4 * PAGE)))
        assert cache.stats().evicted == 2, "two pages had never been named"
        assert wait(cache.create(new)).cached == 8
        assert wait(cache.create(old)).cached == 24


def test_a_page_with_a_name_is_never_written_again() -> None:
    with opened() as (_, cache):
        tokens = list(range(17))
        seq = fill(cache, tokens)
        wait(cache.truncate(seq, 12))
        wait(cache.append(seq, *Rows().new(2)))
        assert wait(cache.create(tokens)).cached == 16
        other = fill(cache, tokens)
        assert other.cached == 16


def test_pages_behind_a_truncation_are_known_by_the_rows_that_replaced_others() -> None:
    with opened(num_blocks=16) as (_, cache):
        tokens = list(range(25))
        seq = fill(cache, tokens[:16])
        wait(cache.truncate(seq, 12))
        for more in ([90, 91, 92, 93], tokens[16:24]):
            wait(cache.append(seq, *prompt(more), tokens=more))
        assert wait(cache.create(tokens)).cached == 16


# A full cache


def test_cache_full_leaves_everything_as_it_was() -> None:
    rows = Rows(9)
    with opened() as (ctx, cache):
        seqs = wait(cache.create(), cache.create())
        kept = [rows.new(20), rows.new(13)]
        for seq, (k, v) in zip(seqs, kept, strict=True):
            wait(cache.append(seq, k, v))
        fork = wait(cache.fork(seqs[0]))
        before, launched = cache.stats(), ctx.stats()["kv_cache"].launched
        with pytest.raises(ga.CacheFull, match="5 pages are needed, and 3 of 8 are free"):
            wait(cache.append([seqs[1], fork], *rows.new(2, 16)))
        with pytest.raises(ga.CacheFull):
            wait(cache.attend(rows.q(1, 40), fork, k=rows.new(1, 40)[0], v=rows.new(1, 40)[1]))
        assert (cache.stats(), ctx.stats()["kv_cache"].launched) == (before, launched)
        assert [cache.length(seq) for seq in (*seqs, fork)] == [20, 13, 20]
        for seq, (k, v) in zip((*seqs, fork), (*kept, kept[0]), strict=True):
            assert holds(cache, seq, k, v)
        wait(cache.append(seqs[1], *rows.new(3)))
        wait(cache.append(fork, *rows.new(12)))
        assert cache.stats().free_blocks == 1


def test_a_copy_of_a_shared_page_needs_room_too() -> None:
    rows = Rows(10)
    with opened(num_blocks=1) as (_, cache):
        seq = wait(cache.create())
        wait(cache.append(seq, *rows.new(3)))
        fork = wait(cache.fork(seq))
        with pytest.raises(ga.CacheFull):
            wait(cache.append(seq, *rows.new(1)))
        wait(cache.free(fork))
        assert wait(cache.append(seq, *rows.new(1))) == 4


async def test_a_sequence_that_nobody_got_to_know_is_freed() -> None:
    async with ga.open_context("mock") as ctx, ctx.kv_cache(**spec()) as cache:

        async def begin(reply: ga.Reply[ga.KvSequence]) -> ga.KvSequence:
            return await reply

        known = await cache.create()
        await cache.append(known, *Rows(1).new(3))
        for ask in (cache.create, lambda: cache.fork(known)):
            with cache._find().tables._lock:
                reply = ask()
                task = asyncio.ensure_future(begin(reply))
                await asyncio.sleep(0)
            eventually(reply.done)  # the loop is blocked, so that the task does not know yet
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert cache.stats().sequences == 2, "who has the reply may still ask it"
            del reply, task
            await asyncio.to_thread(eventually, lambda: cache.stats().sequences == 1)

            made = ctx.stats()["kv_cache"].submitted
            ask()  # and drops the reply
            await asyncio.to_thread(eventually, lambda made=made: ctx.stats()["kv_cache"].completed == made + 2)
            assert cache.stats().sequences == 1
        sequence = cache.create()
        assert await sequence == await sequence
        assert cache.stats().shared_blocks == 0
        assert cache.stats().sequences == 2


@pytest.mark.parametrize(
    ("pages", "most", "width"),
    [(0, 99, 1), (1, 99, 1), (2, 99, 2), (3, 99, 4), (9, 99, 16), (16, 99, 16), (9, 0, 9), (9, 12, 12), (0, 0, 1)],
)
def test_a_growing_sequence_keeps_its_block_tables_width(pages: int, most: int, width: int) -> None:
    assert table_width(pages, most) == width
    held = array("i", range(5, 5 + pages))
    made = block_table([PageTable(1, [GroupPages(held)])], 0, most)
    assert made.shape == (1, width)
    assert made[0].tolist() == [*held, *[-1] * (width - pages)]
