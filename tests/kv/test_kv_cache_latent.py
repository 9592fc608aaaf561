"""KvCaches of latents: one pool whose first columns are values, appended to by parts and attended to whole."""

from __future__ import annotations

import dataclasses
import pickle
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulated.memory import host_view
from inside.reference import apply_rope, cast_saturating, rope_angles
from inside.testing import cast
from support.kv_cache import outcome, wait
from support.service import comes_true, eventually

import gpu_actors as ga
from gpu_actors.distributed import ShardedKvCache, move_sequence, open_pool
from gpu_actors.remote import InProcess
from gpu_actors.testing import check_output

BF16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
LATENT, ROTARY, SCALE = 24, 8, 0.19
SPEC: dict[str, Any] = {
    "num_blocks": 24, "page_size": 4, "kv_heads": 1, "head_dim": LATENT + ROTARY, "latent_dim": LATENT,
}  # fmt: skip
REFUSALS = (ga.InvalidRequest, ga.Unsupported)
DESCALE = np.array([0.03], np.float32)


class Rows:
    """Random rows. dims: of a latent and of the rotated part beside it."""

    def __init__(self, dims: tuple[int, int] = (LATENT, ROTARY), dtype: Any = BF16, seed: int = 0) -> None:
        self.dims, self.dtype = dims, dtype
        self.rng = np.random.default_rng(seed)

    def new(self, *shape: int) -> dict[str, Any]:
        parts = (cast(self.rng.standard_normal((*shape, 1, dim)), self.dtype.name) for dim in self.dims)
        return dict(zip(("c_kv", "k_pe"), parts, strict=True))

    def q(self, *shape: int, heads: int = 6) -> dict[str, Any]:
        parts = (cast(self.rng.standard_normal((*shape, heads, dim)), self.dtype.name) for dim in self.dims)
        return dict(zip(("q", "q_pe"), parts, strict=True))


def whole(parts: dict[str, Any]) -> Any:
    return np.concatenate(list(parts.values()), axis=-1)


def contents(cache: ga.KvCache, seq: ga.KvSequence) -> Any:
    """The rows of a sequence, read from the pool."""
    opened = cache._find()
    (group,), table = opened.groups, opened.table(seq)
    assert group.v_pool is None
    pool = host_view(group.k_pool)
    return pool[table.groups[0].pages].reshape(-1, *pool.shape[2:])[: table.length]


def bits(array: Any) -> Any:
    return array.view(np.uint8)


def check(result: Any, query: dict[str, Any], keys: list[Any], **options: Any) -> None:
    """Check a batch of the last rows of their sequences. keys: each sequence's rows in the pool."""
    q = whole(query)
    batch, rows, heads, _ = q.shape
    ends_k = np.concatenate([[0], np.cumsum([len(k) for k in keys])]).astype(np.int32)
    joined = np.concatenate(keys)
    lse = result.lse.swapaxes(0, 1).reshape(heads, -1)
    latent = query["q"].shape[-1]
    out = result.out.reshape(batch * rows, heads, latent)
    bounds = {"cu_seqlens_q": np.arange(batch + 1, dtype=np.int32) * rows, "cu_seqlens_k": ends_k, "causal": True}
    args = (out, lse, q.reshape(batch * rows, heads, -1), joined, joined[..., :latent])
    check_output(*args, softmax_scale=SCALE, **bounds, **options)


def test_rows_lie_side_by_side_and_values_are_the_first_columns(mock: ga.GpuContext) -> None:
    rows = Rows()
    with mock.kv_cache(**SPEC) as cache:
        seqs = wait(cache.create(), cache.create())
        ends = np.array([0, 9, 14], np.int32)
        first, new = rows.new(14), rows.new(2, 3)
        assert wait(cache.append(seqs, **first, cu_seqlens=ends)) == [9, 5]
        query = rows.q(2, 3)
        result = wait(cache.attend(**query, seqs=seqs, **new, softmax_scale=SCALE, return_lse=True))
        keys = [np.concatenate((whole(first)[:9], whole(new)[0])), np.concatenate((whole(first)[9:], whole(new)[1]))]
        for seq, expected in zip(seqs, keys, strict=True):
            np.testing.assert_array_equal(contents(cache, seq), expected)
        check(result, query, keys)
        # q may be one array, also for one sequence.
        again = wait(cache.attend(whole(query)[:1], seqs[0], softmax_scale=SCALE, return_lse=True))
        check(again, {name: part[:1] for name, part in query.items()}, keys[:1])
        one = rows.new(2)
        assert wait(cache.append(seqs[1], **one)) == 10
        np.testing.assert_array_equal(contents(cache, seqs[1])[8:], whole(one))


def test_a_fork_writes_to_a_copy_and_prompts_share_pages(mock: ga.GpuContext) -> None:
    rows = Rows(seed=1)
    prompt = list(range(50, 61))
    with mock.kv_cache(**SPEC) as cache:
        seq = wait(cache.create(prompt))
        first = rows.new(11)
        wait(cache.append(seq, **first, tokens=prompt))
        fork = wait(cache.fork(seq))
        mine, other = rows.new(1, 1), rows.new(1, 1)
        query = rows.q(1, 1)
        result = wait(cache.attend(**query, seqs=[fork], **other, softmax_scale=SCALE, return_lse=True))
        wait(cache.append([seq], **mine))
        forked = np.concatenate((whole(first), whole(other)[0]))
        np.testing.assert_array_equal(contents(cache, seq), np.concatenate((whole(first), whole(mine)[0])))
        np.testing.assert_array_equal(contents(cache, fork), forked)
        check(result, query, [forked])
        assert cache.stats().shared_blocks == 2
        alike = wait(cache.create([*prompt, 1]))
        assert alike.cached == 8
        np.testing.assert_array_equal(contents(cache, alike), whole(first)[:8])
        wait(cache.truncate(fork, 3))
        wait(cache.append([fork], **mine))
        np.testing.assert_array_equal(contents(cache, seq)[:11], whole(first))


def test_a_rope_rotates_the_columns_behind_the_latent(mock: ga.GpuContext) -> None:
    rows = Rows(dtype=np.dtype(np.float32), seed=2)
    with mock.kv_cache(**SPEC, dtype="float32") as cache:
        seq = wait(cache.create())
        new = rows.new(7)
        wait(cache.append(seq, **new, rope=ga.Rope(dim=ROTARY, interleaved=True)))
        radians = rope_angles(np.arange(7), 10000.0 ** (-np.arange(0, ROTARY, 2) / ROTARY))
        turned = apply_rope(new["k_pe"], np.cos(radians), np.sin(radians), interleaved=True)
        result = contents(cache, seq)
        np.testing.assert_array_equal(result[..., :LATENT], new["c_kv"])
        np.testing.assert_allclose(result[..., LATENT:], turned, atol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_one_factor_quantises_a_row_and_multiplies_it_back(mock: ga.GpuContext, dtype: Any) -> None:
    rows = Rows(seed=3)
    with mock.kv_cache(**SPEC, dtype=FP8, k_descale=DESCALE) as cache:
        seqs = wait(cache.create(), cache.create())
        first, new, query = Rows(dtype=dtype).new(2, 6), rows.new(2, 1), rows.q(2, 1)
        wait(cache.append(seqs, **first))
        result = wait(cache.attend(**query, seqs=seqs, **new, softmax_scale=SCALE, return_lse=True))
        held = [contents(cache, seq) for seq in seqs]
        for index, keys in enumerate(held):
            parts = (whole(first)[index], whole(new)[index])
            expected = np.concatenate([cast_saturating(part, FP8, DESCALE) for part in parts])
            np.testing.assert_array_equal(bits(keys), bits(expected))
        scales = np.broadcast_to(DESCALE, (2, 1))
        check(result, query, held, k_descale=scales, v_descale=scales)


@pytest.mark.parametrize(("length", "kind"), [(0, "bfloat16"), (5, "bfloat16"), (12, "float8_e4m3fn")])
async def test_a_sequence_moves_with_its_bits_and_prefixes(length: int, kind: str) -> None:
    rows, prompt = Rows(seed=5), list(range(length))
    spec = {**SPEC, "dtype": kind} | ({"k_descale": DESCALE} if kind != "bfloat16" else {})
    async with (
        ga.open_context("mock") as one,
        ga.open_context("mock") as other,
        one.kv_cache(**spec) as source,
        other.kv_cache(**spec) as target,
    ):
        await target.append(await target.create(), **rows.new(6))  # so that its pages have other ids
        seq = await source.create(prompt)
        if length:
            await source.append(seq, **rows.new(length), tokens=prompt)
        rows_before = contents(source, seq)
        pages = await source.export_pages(seq)
        assert (pages.head_dim, pages.latent_dim, pages.v) == (LATENT + ROTARY, LATENT, None)
        assert not bits(pages.k[-1:, length % 4 or 4 :]).any()
        moved = await target.import_pages(pickle.loads(pickle.dumps(pages)))
        np.testing.assert_array_equal(bits(contents(target, moved)), bits(rows_before))
        assert (await target.import_pages(pages)).cached == length // 4 * 4
        await source.release(pages)
        again = await move_sequence(source, seq, target)
        np.testing.assert_array_equal(bits(contents(target, again)), bits(rows_before))
        await comes_true(lambda: source.stats().sequences == 0)


def test_pages_that_do_not_fit_are_refused(mock: ga.GpuContext) -> None:
    apart = {**SPEC, "latent_dim": 0, "head_dim_v": LATENT}
    with mock.kv_cache(**SPEC) as cache, mock.kv_cache(**{**SPEC, "latent_dim": 20}) as other:
        seq = wait(cache.create())
        wait(cache.append(seq, **Rows().new(5)))
        pages = wait(cache.export_pages(seq))
        changed = pages.k.copy()
        bits(changed)[1, 0, 0, 3] ^= 1
        for target, field, wrong_pages in (
            (other, "head_dim_v", pages),
            (other, "latent_dim", dataclasses.replace(pages, head_dim_v=20)),
            (cache, "v", dataclasses.replace(pages, v=pages.k[..., :LATENT])),
            (cache, "k", dataclasses.replace(pages, k=pages.k[..., :LATENT])),
            (cache, "checks[1]", dataclasses.replace(pages, k=changed)),
        ):
            with pytest.raises(ga.InvalidRequest) as refused:
                target.import_pages(wrong_pages).result(30.0)
            assert refused.value.field == field
        with mock.kv_cache(**apart) as third, pytest.raises(ga.InvalidRequest, match="that of the cache, 0"):
            third.import_pages(pages).result(30.0)
        eventually(lambda: other.stats().sequences == 0)


PARTS = Rows().new(1, 1)
WHOLE: dict[str, Any] = {"k": np.zeros((1, 1, 1, 32), BF16), "v": np.zeros((1, 1, 1, 24), BF16)}
QUERY = Rows().q(1, 1)


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"latent_dim": 32}, "latent_dim", "[0, 31]"),
        ({"latent_dim": -1}, "latent_dim", "[0, 31]"),
        ({"latent_dim": True}, "latent_dim", "int"),
        ({"head_dim_v": 24}, "head_dim_v", "latent_dim"),
        ({"dtype": FP8, "v_descale": DESCALE}, "v_descale", "k_descale"),
        ({"head_dim": 640, "latent_dim": 512}, "head_dim", "up to 576"),
        ({"head_dim": 570, "latent_dim": 550}, "latent_dim", "512"),
    ],
    ids=lambda value: "",
)
def test_a_contradiction_in_the_layout_is_refused_by_name(
    mock: ga.GpuContext, changes: Any, field: str, words: str
) -> None:
    with (
        pytest.raises(REFUSALS, match=re.escape(words)) as refused,
        mock.kv_cache(**{**SPEC, **changes}),
    ):
        pass
    assert refused.value.field == field


SCALED: dict[str, Any] = {**QUERY, "softmax_scale": SCALE}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({**SCALED, **WHOLE}, "k", "k_pe and c_kv"),
    ({**SCALED, "v": WHOLE["v"]}, "v", "k_pe and c_kv"),
    ({**SCALED, "c_kv": PARTS["c_kv"]}, "k_pe", "must be given"),
    ({**SCALED, "k_pe": PARTS["k_pe"]}, "c_kv", "must be given"),
    ({**SCALED, "c_kv": PARTS["k_pe"], "k_pe": PARTS["k_pe"]}, "c_kv", "24"),
    ({**QUERY, **PARTS}, "softmax_scale", "before absorption"),
    ({**SCALED, **PARTS, "q_pe": None}, "q", "head_dim, 32"),
    ({**SCALED, "q_pe": QUERY["q_pe"][..., :3, :]}, "q_pe", "other part"),
    ({**SCALED, **PARTS, "rope": ga.Rope(dim=8)}, "rope", "rotate q_pe and k_pe before"),
    ({**SCALED, "rope": ga.Rope(dim=8)}, "rope", "rotate q_pe and k_pe before"),
    ({**SCALED, "tokens": [1]}, "tokens", "goes with c_kv and k_pe"),
    ({**SCALED, "q": [1.0]}, "q", "must be an array"),
    ({**SCALED, "q_pe": QUERY["q_pe"][0, 0, 0, 0]}, "q_pe", "must be an array"),
]


def test_a_wrong_request_is_refused_by_name(mock: ga.GpuContext) -> None:
    with mock.kv_cache(**SPEC) as cache:
        seq = wait(cache.create())
        for arguments, field, words in WRONG:
            with pytest.raises(REFUSALS, match=words) as refused:
                cache.attend(seqs=[seq], **arguments).result(30.0)
            assert refused.value.field == field
        assert cache.length(seq) == 0


def test_appended_rows_are_refused_by_their_own_names(mock: ga.GpuContext) -> None:
    one = {name: part[0] for name, part in PARTS.items()}
    with mock.kv_cache(**SPEC) as cache, mock.kv_cache(**{**SPEC, "latent_dim": 0}) as apart:
        seq, other = wait(cache.create(), apart.create())
        refusals = [
            (outcome(cache.append(seq, WHOLE["k"][0], WHOLE["v"][0])), "k"),
            (outcome(cache.append(seq)), "k_pe"),
            (outcome(cache.append(seq, **{name: part.astype(np.float64) for name, part in one.items()})), "k_pe"),
            (outcome(cache.append(seq, c_kv=one["c_kv"].astype(np.float16), k_pe=one["k_pe"])), "c_kv"),
            (outcome(cache.append(seq, **one, rope=ga.Rope(dim=10))), "rope.dim"),
            (outcome(apart.append(other, **one)), "k_pe"),
            (outcome(apart.append(other)), "k"),
        ]
        for error, field in refusals:
            assert isinstance(error, REFUSALS), (error, field)
            assert error.field == field
        # The error shows the shapes that the caller gave, without an axis of sequences.
        rows = one["c_kv"].shape[0]
        with pytest.raises(ga.InvalidRequest, match=rf"k_pe='bfloat16\[{rows}, 1, 24\]'.*shape \({rows}, 1, 8\)"):
            cache.append(seq, c_kv=one["k_pe"], k_pe=one["c_kv"]).result(30.0)
        with pytest.raises(ga.InvalidRequest, match="goes with a latent cache"):
            apart.attend(QUERY["q"], [other], q_pe=QUERY["q_pe"])


async def test_workers_hold_latents_each_and_do_not_deal_them_out() -> None:
    rows = Rows(seed=6)
    async with open_pool("mock", workers=2, workplace=InProcess, seed=0) as pool:
        async with pool.kv_cache(**SPEC) as cache:
            seq = await cache.create()
            first, new, query = rows.new(6), rows.new(1, 1), rows.q(1, 1)
            await cache.append(seq, **first)
            seq = await cache.move(seq)
            result = await cache.attend(seqs=[seq], **query, **new, softmax_scale=SCALE, return_lse=True)
            check(result, query, [np.concatenate((whole(first), whole(new)[0]))])
        with pytest.raises(ga.Unsupported, match="PooledKvCache") as refused:
            ShardedKvCache(pool, **SPEC)
        assert refused.value.field == "latent_dim"


def emulated_steps(arch: str, kv_dtype: Any, dims: tuple[int, int], page: int, **emulation: Any) -> None:
    """A prefill, a fork that writes, steps and a move, over kernels."""
    rows = Rows(dims, seed=page)
    scale = {"k_descale": DESCALE} if kv_dtype == FP8 else {}
    options = ga.ContextOptions(arch=arch, emulation=ga.EmulationOptions(**emulation))
    spec = {"num_blocks": 64 // page + 8, "page_size": page, "kv_heads": 1, "head_dim": sum(dims)}
    with (
        ga.open_context("emulated", options) as ctx,
        ctx.kv_cache(**spec, latent_dim=dims[0], dtype=kv_dtype, **scale) as cache,
    ):
        seqs = wait(cache.create(), cache.create())
        first = rows.new(14)
        wait(cache.append(seqs, **first, cu_seqlens=np.array([0, 13, 14], np.int32)))
        seqs.append(wait(cache.fork(seqs[0])))
        expected = [whole(first)[:13], whole(first)[13:], whole(first)[:13]]
        for count in (3, 1, 1):
            new, query = rows.new(3, count), rows.q(3, count)
            result = wait(cache.attend(**query, seqs=seqs, **new, softmax_scale=SCALE, return_lse=True))
            expected = [np.concatenate((known, more)) for known, more in zip(expected, whole(new), strict=True)]
            held = [contents(cache, seq) for seq in seqs]
            for keys, known in zip(held, expected, strict=True):
                np.testing.assert_array_equal(bits(keys), bits(cast_saturating(known, kv_dtype, DESCALE)))
            factors = np.broadcast_to(DESCALE, (3, 1))
            check(result, query, held, **({"k_descale": factors, "v_descale": factors} if scale else {}))
        moved = wait(cache.import_pages(wait(cache.export_pages(seqs[2]))))
        np.testing.assert_array_equal(bits(contents(cache, moved)), bits(contents(cache, seqs[2])))
        assert ctx.stats()["kv_cache"].failed == 0


@pytest.mark.parametrize(("arch", "kv_dtype"), [("sm_80", BF16), ("sm_90a", FP8)])
def test_kernels_keep_and_read_the_latents(arch: str, kv_dtype: Any) -> None:
    emulated_steps(arch, kv_dtype, (64, 16), 8)


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dims", [(512, 64), (256, 16), (24, 8), (500, 12)], ids=str)
@pytest.mark.parametrize("kv_dtype", [BF16, FP8], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
def test_kernels_keep_and_read_latents_of_any_size(arch: str, kv_dtype: Any, dims: tuple[int, int]) -> None:
    for page, schedule, delivery in ((1, "random", "random"), (5, "lane", "eager"), (16, "round_robin", "late")):
        emulated_steps(arch, kv_dtype, dims, page, schedule=schedule, delivery=delivery, seed=page)
        emulated_steps(arch, kv_dtype, dims, page, schedule=schedule, contraction=True)
