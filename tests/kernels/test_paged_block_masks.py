"""Block masks over caches: lists name keys of a sequence, wherever its pages lie, and hidden pages are not loaded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases.listed_tiles import listed_tiles
from cases.packed_block_masks import (
    BATCH,
    HEADS_KV,
    KEYS,
    KINDS,
    ROWS,
    arrays_of,
    ends,
    explicit,
    mask_of,
    near,
    poisoned,
)
from inside.planning import merge_key
from support.counting import counting

import gpu_actors as ga
from gpu_actors.testing import reference

MOST = 640  # keys that a sequence can have


@pytest.fixture(scope="module")
def hopper() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpu_actors.kernels.forward_sm90.MULTIPROCESSORS", 3)
        with ga.open_context("emulated", ga.ContextOptions(arch="sm_90a")) as ctx:
            yield ctx


def caches_of(arrays: dict[str, Any], page_size: int) -> dict[str, Any]:
    """The keys and values in pages of a shuffled pool, or in a dense cache; NaN where no key lies."""
    dim = arrays["k"].shape[-1]
    lengths = np.array(KEYS, np.int32)
    found: dict[str, Any] = {"q": arrays["q"], "cu_seqlens_q": ends(ROWS), "cache_seqlens": lengths}
    pages = MOST // (page_size or MOST)
    table = np.random.default_rng(5).permutation(BATCH * pages).reshape(BATCH, pages).astype(np.int32)
    if not page_size:
        table = np.arange(BATCH, dtype=np.int32)[:, None]
    for name in "kv":
        pool = np.full((BATCH * pages, page_size or MOST, HEADS_KV, dim), np.nan, arrays[name].dtype)
        for n, start in enumerate(ends(KEYS)[:-1]):
            whole = np.full((MOST, HEADS_KV, dim), np.nan, pool.dtype)
            whole[: KEYS[n]] = arrays[name][start : start + KEYS[n]]
            pool[table[n]] = whole.reshape(pages, -1, HEADS_KV, dim)
        found[f"{name}_cache"] = pool
    return found | ({"block_table": table} if page_size else {})


def check(ctx: ga.GpuContext, page_size: int, causal: bool, modified: bool) -> None:
    arrays = arrays_of()
    mask = mask_of(mask_mod=near if modified else None)
    options: dict[str, Any] = {"softmax_scale": 0.2, "causal": causal, "block_mask": mask, "return_lse": True}
    given = caches_of(poisoned(arrays), page_size)
    assert ctx.flash_attn.inspect_key(ga.PagedForward(**given, **options)).kernel == "forward_sm90"
    found = ctx.flash_attn.paged_forward(**given, **options).result(100.0)
    out, lse = explicit(arrays, causal, modified)
    np.testing.assert_allclose(found.out.astype(np.float64), out, atol=4e-3)
    np.testing.assert_allclose(found.lse, lse, atol=1e-3)


@pytest.mark.parametrize(
    ("page_size", "causal", "modified"),
    [
        (16, True, True),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (
                (16, False, True),
                (64, False, False),
                (128, True, True),
                (640, False, True),
                (8, True, False),
                (0, False, True),
            )
        ),
    ],
)
def test_lists_name_keys_wherever_their_pages_lie(
    hopper: ga.GpuContext, page_size: int, causal: bool, modified: bool
) -> None:
    check(hopper, page_size, causal, modified)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("delivery", "schedule", "fused"),
    [("eager", "lane", True), ("random", "random", False), ("late", "round_robin", True)],
)
def test_pages_in_every_delivery(delivery: Any, schedule: Any, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_actors.kernels.forward_sm90.MULTIPROCESSORS", 3)
    emulation = ga.EmulationOptions(delivery=delivery, schedule=schedule, seed=7, contraction=fused)
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_90a", emulation=emulation)) as ctx:
        check(ctx, 64, True, True)


def test_the_oracle_hides_what_is_not_listed_in_pages() -> None:
    """Requests do not share a launch, because each has lists of its own sequences."""
    arrays = arrays_of()
    given = caches_of(arrays, 16)
    with ga.open_context("mock") as ctx:
        found = ctx.flash_attn.paged_forward(**given, softmax_scale=0.2, block_mask=mask_of(), return_lse=True).result(
            100.0
        )
        decoding = ctx._children.cells["flash_attn"].shared.decoding
        requests = [ga.PagedForward(**given, block_mask=mask) for mask in (mask_of(), None)]
        assert [merge_key(decoding.plan(each), each) is None for each in requests] == [True, False]
    out, lse = explicit(arrays, True, modified=True)
    np.testing.assert_allclose(found.out.astype(np.float64), out, atol=1e-3)
    np.testing.assert_allclose(found.lse, lse, rtol=1e-5)


@pytest.mark.parametrize(
    ("file", "place", "thread", "times"),
    [
        ("forward_sm90/producer.cuh", "ptx::mbarrier_arrive_expect_tx(full, Tile::BYTES);", 0, 2),
        pytest.param(
            *("forward_sm90/consumer.cuh", "const uint64_t q = QBoxes::rows(shared.q(number)), k = ", 128, 1),
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["loads", "products"],
)
def test_hidden_pages_are_neither_loaded_nor_multiplied(
    monkeypatch: pytest.MonkeyPatch, file: str, place: str, thread: int, times: int
) -> None:
    """Only tiles of listed blocks count, without those behind the last row or key of each sequence."""
    count = counting(monkeypatch, file, place, thread)
    request = ga.PagedForward(**caches_of(arrays_of(), 64), causal=False, block_mask=mask_of(mask_mod=None))
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_90a")) as ctx:
        key = ctx.flash_attn.inspect_key(request)
        ctx.flash_attn.submit(request).result(100.0)
    assert count.value == times * listed_tiles(key) > 0


def test_a_kv_cache_takes_lists_of_its_sequences(hopper: ga.GpuContext) -> None:
    """Rows are appended and attend in one launch. Lists may be longer than the sequences so far."""
    arrays = arrays_of()
    chosen = [n for n in range(BATCH) if ROWS[n]]
    kinds = KINDS[chosen]
    wide = np.pad(kinds, ((0, 0), (0, 0), (0, 1), (0, 3)))
    options: dict[str, Any] = {"softmax_scale": 0.2, "causal": True, "return_lse": True}
    with hopper.kv_cache(num_blocks=90, page_size=16, kv_heads=HEADS_KV, head_dim=32, dtype="float16") as cache:
        seqs = [cache.create().result(100.0) for _ in chosen]
        pieces = [slice(ends(KEYS)[n], ends(KEYS)[n + 1]) for n in chosen]
        for seq, piece in zip(seqs, pieces, strict=True):
            before = slice(piece.start, piece.stop - 5)
            cache.append([seq], arrays["k"][None, before], arrays["v"][None, before]).result(100.0)
        new = np.concatenate([np.arange(piece.stop - 5, piece.stop) for piece in pieces])
        found = cache.attend(
            arrays["q"],
            seqs,
            k=arrays["k"][new],
            v=arrays["v"][new],
            cu_seqlens_q=ends([ROWS[n] for n in chosen]),
            cu_seqlens_k_new=ends([5] * len(chosen)),
            block_mask=mask_of(wide, mask_mod=lambda b, h, q, kv: abs(q - kv) * (1 + h) < 900),
            **options,
        ).result(100.0)
        plain = cache.attend(arrays["q"], seqs, cu_seqlens_q=ends([ROWS[n] for n in chosen]), **options).result(100.0)
    h = np.arange(4)[:, None, None]
    out, lse = explicit(arrays, True, lambda q, kv: abs(q - kv) * (1 + h) < 900)
    np.testing.assert_allclose(found.out.astype(np.float64), out, atol=4e-3)
    np.testing.assert_allclose(found.lse, lse, atol=1e-3)
    assert abs(plain.out - found.out).max() > 0.1


def test_a_mask_over_a_kv_cache_has_columns_for_the_pages_that_there_are(hopper: ga.GpuContext) -> None:
    """5 pages of 64 keys: 3 blocks of 128, where a table of 8 pages would have 4."""
    q = np.random.default_rng(5).standard_normal((1, 64, 4, 32)).astype(np.float16)
    k, v = np.random.default_rng(6).standard_normal((2, 1, 320, HEADS_KV, 32)).astype(np.float16)
    counts, indices = np.full((1, 4, 1), 2, np.int32), np.broadcast_to(np.int32([0, 2, 0]), (1, 4, 1, 3)).copy()
    mask = ga.BlockMask(counts, indices, block_size=(128, 128))
    with hopper.kv_cache(num_blocks=12, page_size=64, kv_heads=HEADS_KV, head_dim=32, dtype="float16") as cache:
        seq = cache.create().result(100.0)
        cache.append([seq], k, v).result(100.0)
        found = cache.attend(q, [seq], causal=False, block_mask=mask).result(100.0)
    seen = np.r_[0:128, 256:320]
    wanted = reference.attention_forward(q, k[:, seen], v[:, seen]).out
    np.testing.assert_allclose(found.out.astype(np.float64), wanted, atol=4e-3)


@pytest.mark.parametrize(
    ("arch", "change", "field"),
    [
        ("sm_80", {}, "arch"),
        ("sm_90a", {"q": np.zeros((BATCH, 63, 4, 32), np.float16), "cu_seqlens_q": None}, "seqlen_q"),
        ("sm_90a", {"softcap": 3.0}, "softcap"),
        ("sm_90a", {"bias": np.zeros((1, 1, 300, MOST), np.float16)}, "bias"),
        ("sm_90a", {"k_positions": np.zeros(BATCH, np.int32)}, "k_positions"),
        ("sm_90a", {"cache_leftpad": np.zeros(BATCH, np.int32)}, "cache_leftpad"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_kernel_takes_is_refused(arch: str, change: dict[str, Any], field: str) -> None:
    request = ga.PagedForward(**{**caches_of(arrays_of(), 16), "block_mask": mask_of(), **change})
    with ga.open_context("emulated", ga.ContextOptions(arch=arch)) as ctx, pytest.raises(ga.Unsupported) as caught:
        ctx.flash_attn.inspect_key(request)
    assert caught.value.field == field
