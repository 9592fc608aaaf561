"""Biases and masks over pages, caches and pointers: each sequence as if it were alone, with its part of the matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cases.finite_masks import hide_keys
from emulated.contraction import arithmetic
from inside.arrays import DeviceArray
from inside.testing import cast

import gpu_actors as ga
from gpu_actors.testing import check_output

ROWS, KEYS = (5, 3, 1, 5), (77, 30, 0, 96)
HEADS, HEADS_KV, DIM, PAGE = 4, 2, 64, 16
WIDTH = 101
# batch, heads, whether rows have one for all
KINDS = {
    "own": (4, HEADS, False),
    "of sequences": (4, 1, False),
    "of heads": (1, HEADS, True),
    "of all": (1, 1, False),
    "of one row": (4, 1, True),
}


@pytest.fixture(scope="module")
def mock() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


def bias_of(kind: str, rows: tuple[int, ...], dtype: str) -> np.ndarray:
    """NaN where no pair of any sequence reads it. One of every matrix hides keys by large numbers."""
    batch, heads, one_row = KINDS[kind]
    shape = (batch, heads, 1 if one_row else max(rows), WIDTH)
    rng = np.random.default_rng(len(kind))
    bias = 2 * rng.standard_normal(shape)
    if kind == "own" and dtype != "bool":
        bias = hide_keys(bias.astype(dtype), 1)
    read = np.zeros(shape, bool)
    for b, (count, keys) in enumerate(zip(rows, KEYS, strict=True)):
        read[b % batch, :, : 1 if one_row else count, :keys] = True
    return read & (bias < 1) if dtype == "bool" else np.where(read, bias, np.nan).astype(dtype)


def answer_of(ctx: ga.GpuContext, layout: str, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """The answer to a request over a cache in this layout. q, k, v: of each sequence, (rows, heads, dim)."""
    lengths = np.array(KEYS, np.int32)
    if layout == "pointers":
        caches = [[np.ascontiguousarray(_filled(one, 112).swapaxes(0, 1)) for one in side] for side in (k, v)]
        bias = options["bias"][:, :, 0]
        return ctx.flash_attn.decode(np.concatenate(q), *caches, lengths, **{**options, "bias": bias}).result(300)
    if layout == "cache":
        caches = [np.stack([_filled(one, 112) for one in side]) for side in (k, v)]
        return ctx.flash_attn.paged_forward(np.stack(q), *caches, cache_seqlens=lengths, **options).result(300)
    if layout == "attend":
        spec: dict[str, Any] = {"num_blocks": 40, "page_size": PAGE, "kv_heads": HEADS_KV, "head_dim": DIM}
        with ctx.kv_cache(**spec, dtype=str(q[0].dtype)) as cache:
            return _attended(cache, q, k, v, options)
    pages = -(-max(KEYS) // PAGE)
    table = np.random.default_rng(0).permutation(len(KEYS) * pages).astype(np.int32).reshape(len(KEYS), pages)
    pools = []
    for side in (k, v):
        pool = np.full((table.size, PAGE, HEADS_KV, DIM), np.nan, np.float32).astype(side[0].dtype)
        for own, one in zip(table, side, strict=True):
            pool[own] = _filled(one, pages * PAGE).reshape(pages, PAGE, HEADS_KV, DIM)
        pools.append(pool)
    given: dict[str, Any] = {"block_table": table, "cache_seqlens": lengths, **options}
    if layout == "packed":
        given["cu_seqlens_q"] = np.cumsum([0, *map(len, q)]).astype(np.int32)
        return ctx.flash_attn.paged_forward(np.concatenate(q), *pools, **given).result(300)
    return ctx.flash_attn.paged_forward(np.stack(q), *pools, **given).result(300)


def _attended(cache: ga.KvCache, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """Of the sequences that have keys, whose last rows the request appends."""
    rows, present = len(q[0]), [b for b, keys in enumerate(KEYS) if keys]
    seqs = [cache.create().result(60) for _ in present]
    for seq, b in zip(seqs, present, strict=True):
        cache.append(seq, k[b][:-rows], v[b][:-rows]).result(60)
    bias = options["bias"] if len(options["bias"]) == 1 else options["bias"][present]
    new = {name: np.stack([side[b][-rows:] for b in present]) for name, side in (("k", k), ("v", v))}
    return cache.attend(np.stack([q[b] for b in present]), seqs, **{**options, **new, "bias": bias}).result(300)


def _filled(rows: Any, length: int) -> Any:
    rest = np.full((length - len(rows), *rows.shape[1:]), np.nan, np.float32)
    return np.concatenate([rows, rest.astype(rows.dtype)])


def check(ctx: ga.GpuContext, layout: str, kind: str, dtype: str = "float16", bias_dtype: str = "float32") -> None:
    rng = np.random.default_rng(1)
    rows = {"packed": ROWS, "pointers": (1,) * 4}.get(layout, (5,) * 4)
    q = [cast(rng.standard_normal((count, HEADS, DIM)), dtype) for count in rows]
    k, v = ([cast(rng.standard_normal((keys, HEADS_KV, DIM)), dtype) for keys in KEYS] for _ in range(2))
    bias = bias_of(kind, rows, bias_dtype)
    options: dict[str, Any] = {"bias": bias, "return_lse": True}
    if layout in ("paged", "attend"):
        options["causal"] = kind != "of all"
    else:
        options |= {"softcap": 4.0} if layout == "packed" else {}
        options |= {} if layout == "pointers" else {"causal": False}
    answer = answer_of(ctx, layout, q, k, v, options)
    at = row = 0
    for b, (count, keys) in enumerate(zip(rows, KEYS, strict=True)):
        if layout == "attend" and not keys:
            continue
        if layout == "packed":
            out, lse = answer.out[None, row : row + count], answer.lse[None, :, row : row + count]
        elif layout == "pointers":
            out, lse = answer.out[None, b : b + 1], answer.lse[b : b + 1, :, None]
        else:
            out, lse = answer.out[at : at + 1], answer.lse[at : at + 1]
        corner = bias[b % len(bias)][None, :, : count if bias.shape[2] > 1 else 1, :keys]
        own = {name: value for name, value in options.items() if name in ("softcap", "causal")}
        check_output(out, lse, q[b][None], k[b][None], v[b][None], bias=corner, **own)
        at, row = at + 1, row + count


def _paged(**changes: Any) -> ga.PagedForward:
    pool, q = np.zeros((4, 16, 2, 64), np.float16), np.zeros((2, 1, 4, 64), np.float16)
    table, lengths = np.arange(4, dtype=np.int32).reshape(2, 2), np.array([20, 30], np.int32)
    return ga.PagedForward(q=q, k_cache=pool, v_cache=pool, block_table=table, cache_seqlens=lengths, **changes)


def _decode(**changes: Any) -> ga.BatchedDecode:
    cache, q = np.zeros((2, 2, 32, 64), np.float16), np.zeros((2, 4, 64), np.float16)
    return ga.BatchedDecode(q=q, k_caches=cache, v_caches=cache, seq_lens=np.array([20, 30], np.int32), **changes)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (_paged(bias=np.zeros((2, 4, 1, 29), np.float16)), "at least the keys of the longest sequence, 30"),
        (_paged(bias=np.zeros((2, 4, 2, 30), np.float16)), r"shape \(2, 4, 1, 30\)"),
        (_paged(bias=np.zeros((2, 3, 1, 30), np.float16)), r"shape \(2, 4, 1, 30\)"),
        (_paged(bias=np.zeros((3, 1, 1, 30), np.float16)), r"shape \(2, 4, 1, 30\)"),
        (_paged(bias=np.zeros((2, 4, 30), np.float16)), r"shape \(2, 4, 1, 30\)"),
        (_paged(bias=np.zeros((1, 1, 1, 30), np.float64)), "float16 or float32 or bool"),
        (_decode(bias=np.zeros((2, 4, 29), np.float16)), "at least the keys of the longest sequence, 30"),
        (_decode(bias=np.zeros((2, 4, 1, 30), np.float16)), r"shape \(2, 4, 30\)"),
        (_decode(bias=np.zeros((2, 2, 30), bool)), r"shape \(2, 4, 30\)"),
    ],
)  # fmt: skip
def test_what_is_no_bias_of_a_cache_is_refused(mock: ga.GpuContext, request_: Any, reason: str) -> None:
    with pytest.raises(ga.InvalidRequest, match=reason) as refused:
        mock.flash_attn.submit(request_).result(10)
    assert refused.value.field == "bias"


def test_lengths_on_the_device_need_all_keys(mock: ga.GpuContext) -> None:
    from inside.validation import check_bias, paged_problem

    lengths = DeviceArray(1 << 20, (2,), (4,), np.dtype(np.int32), 0)
    for keys, sound in ((31, False), (32, True)):
        request = _paged(bias=np.zeros((1, 1, 1, keys), np.float16))
        request.cache_seqlens = lengths
        problem = paged_problem(request)
        if sound:
            check_bias(problem, request)
            continue
        with pytest.raises(ga.InvalidRequest, match=r"all 32 keys .* where cache_seqlens lies on the device"):
            check_bias(problem, request)


def test_a_sequence_may_not_outgrow_its_bias(mock: ga.GpuContext) -> None:
    """Not by the rows that the request appends itself, and then nothing is appended."""
    rows, q = np.zeros((1, 4, 2, 64), np.float16), np.zeros((1, 4, 4, 64), np.float16)
    with mock.kv_cache(num_blocks=8, page_size=PAGE, kv_heads=2, head_dim=64, dtype="float16") as cache:
        seq = cache.create().result(10)
        cache.attend(q, [seq], k=rows, v=rows, bias=np.zeros((1, 1, 4, 4), np.float16)).result(10)
        with pytest.raises(ga.InvalidRequest, match="keys of the longest sequence, 8"):
            cache.attend(q, [seq], k=rows, v=rows, bias=np.zeros((1, 1, 4, 7), np.float16)).result(10)
        bias = np.zeros((1, 1, 4, 8), np.float16)
        cache.attend(q, [seq], k=rows, v=rows, bias=bias, expect_length=[4]).result(10)


def test_rows_of_a_request_before_count(mock: ga.GpuContext) -> None:
    """Which may not have been launched yet when a request is looked at."""
    rows, q = np.zeros((1, 4, 2, 64), np.float16), np.zeros((1, 4, 4, 64), np.float16)
    with mock.kv_cache(num_blocks=8, page_size=PAGE, kv_heads=2, head_dim=64, dtype="float16") as cache:
        seq = cache.create().result(10)
        before = [cache.attend(q, [seq], k=rows, v=rows) for _ in range(3)]
        late = cache.attend(q, [seq], k=rows, v=rows, bias=np.zeros((1, 1, 4, 15), np.float16))
        with pytest.raises(ga.InvalidRequest, match="keys of the longest sequence"):
            late.result(10)
        assert [reply.result(10).out.shape for reply in before] == [q.shape] * 3
        assert cache.length(seq) == 12


def test_the_kernel_of_a_bias_is_decode_mma(mock: ga.GpuContext) -> None:
    """Also of as many rows as decode_sm90 is for, which has no code for it."""
    q = np.zeros((2, 32, 4, 64), np.float16)
    kernels = []
    for bias in (None, np.zeros((1, 1, 32, 40), np.float16)):
        request = _paged(bias=bias)
        request.q = q
        kernels.append(mock.flash_attn.inspect_key(request).kernel)
    assert kernels == ["decode_sm90", "decode_mma"]


USUAL = (
    ("paged", "own", "float16", "float32"),
    ("paged", "own", "float16", "bool"),
    ("packed", "of one row", "float16", "float32"),
    ("cache", "own", "float16", "float32"),
    ("pointers", "own", "float16", "float16"),
    ("paged", "own", "float32", "float32"),
)
SWEPT = (
    ("paged", "of heads", "bfloat16", "bool"),
    ("packed", "own", "bfloat16", "bfloat16"),
    ("cache", "of sequences", "float16", "float32"),
    ("pointers", "of heads", "bfloat16", "bool"),
    ("attend", "own", "float16", "float32"),
    ("attend", "of all", "float16", "float32"),
    ("packed", "of one row", "float64", "float64"),
    ("cache", "of sequences", "float32", "bool"),
    ("pointers", "own", "float64", "float32"),
    ("attend", "of heads", "float32", "float32"),
)
EMULATED = [
    pytest.param(
        case, arch, marks=[] if case in USUAL and arch == "sm_80" else pytest.mark.sweep, id=" ".join((*case, arch))
    )
    for case in USUAL + SWEPT
    for arch in ("sm_80", "sm_90a")
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("case", "arch"), EMULATED)
def test_kernels_add_biases_over_caches(case: tuple[str, str, str, str], arch: str) -> None:
    emulation = ga.EmulationOptions(delivery="random", schedule="greedy", arithmetic=arithmetic())
    with ga.open_context("emulated", ga.ContextOptions(arch=arch, emulation=emulation)) as ctx:
        check(ctx, *case)
