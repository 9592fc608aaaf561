"""Biases and masks over pages, caches and pointers: each sequence answers as alone, with its part of the matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated.contraction import arithmetic
from inside.arrays import DeviceArray
from inside.validation import check_bias, paged_problem
from properties.doors import answer_of, ask_of, check, check_unharmed, send
from properties.problems import Spec, problem_of

import gpu_actors as ga

POOL, PAGE = {"num_blocks": 8, "page_size": 16, "kv_heads": 2, "head_dim": 64, "dtype": "float16"}, 16


def _paged(**changes: Any) -> ga.PagedForward:
    pool, q = np.zeros((4, 16, 2, 64), np.float16), np.zeros((2, 1, 4, 64), np.float16)
    table, lengths = np.arange(4, dtype=np.int32).reshape(2, 2), np.array([20, 30], np.int32)
    arguments = {"q": q, "k_cache": pool, "v_cache": pool, "block_table": table, "cache_seqlens": lengths, **changes}
    return ga.PagedForward(**arguments)


def _decode(bias: Any) -> ga.BatchedDecode:
    cache, q = np.zeros((2, 2, 32, 64), np.float16), np.zeros((2, 4, 64), np.float16)
    return ga.BatchedDecode(q=q, k_caches=cache, v_caches=cache, seq_lens=np.array([20, 30], np.int32), bias=bias)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (_paged(bias=np.zeros((2, 4, 1, 29), np.float16)), "at least the keys of the longest sequence, 30"),
        (_paged(bias=np.zeros((2, 4, 1, 0), np.float16)), "keys of the longest sequence, and one where all are empty"),
        (_paged(bias=np.zeros((2, 4, 2, 30), np.float16)), r"shape \(2, 4, 1, 30\)"),
        (_paged(bias=np.zeros((2, 3, 1, 30), np.float16)), r"shape \(2, 4, 1, 30\)"),
        (_paged(bias=np.zeros((3, 1, 1, 30), np.float16)), r"shape \(2, 4, 1, 30\)"),
        (_paged(bias=np.zeros((1, 1, 1, 30), np.float64)), "float16 or float32 or bool"),
        (_decode(np.zeros((2, 4, 29), np.float16)), "at least the keys of the longest sequence, 30"),
        (_decode(np.zeros((2, 2, 30), bool)), r"shape \(2, 4, 30\)"),
    ],
)
def test_what_is_no_bias_of_a_cache_is_refused(mock: ga.GpuContext, request_: Any, reason: str) -> None:
    with pytest.raises(ga.InvalidRequest, match=reason) as refused:
        mock.flash_attn.submit(request_).result(10)
    assert refused.value.field == "bias"


def test_lengths_on_the_device_need_all_keys() -> None:
    lengths = DeviceArray(1 << 20, (2,), (4,), np.dtype(np.int32), 0)
    short, whole = (_paged(bias=np.zeros((1, 1, 1, keys), "f2"), cache_seqlens=lengths) for keys in (31, 32))
    check_bias(paged_problem(whole), whole)
    with pytest.raises(ga.InvalidRequest, match=r"all 32 keys .* where cache_seqlens lies on the device"):
        check_bias(paged_problem(short), short)


def test_a_sequence_may_not_outgrow_its_bias(mock: ga.GpuContext) -> None:
    """Neither rows that the request appends, which are then not appended, nor those of an earlier request may do so.

    The earlier request may not be launched yet when this one is checked.
    """
    rows, q = np.zeros((1, 4, 2, 64), np.float16), np.zeros((1, 4, 4, 64), np.float16)
    new = {"k": rows, "v": rows}
    with mock.kv_cache(**POOL) as cache:
        seq = cache.create().result(10)
        cache.attend(q, [seq], **new, bias=np.zeros((1, 1, 4, 4), np.float16)).result(10)
        with pytest.raises(ga.InvalidRequest, match="keys of the longest sequence, 8"):
            cache.attend(q, [seq], **new, bias=np.zeros((1, 1, 4, 7), np.float16)).result(10)
        fits = np.zeros((1, 1, 4, 8), np.float16)
        before = [cache.attend(q, [seq], **new, bias=fits, expect_length=[4]), cache.attend(q, [seq], **new)]
        late = cache.attend(q, [seq], **new, bias=np.zeros((1, 1, 4, 15), np.float16))
        with pytest.raises(ga.InvalidRequest, match="keys of the longest sequence"):
            late.result(10)
        assert [reply.result(10).out.shape for reply in before] == [q.shape] * 2
        assert cache.length(seq) == 12


def test_the_kernel_of_a_bias_is_decode_mma(mock: ga.GpuContext) -> None:
    """decode_sm90 has no code for a bias, so decode_mma also takes its numbers of rows."""
    q = np.zeros((2, 32, 4, 64), np.float16)
    requests = [_paged(q=q, bias=bias) for bias in (None, np.zeros((1, 1, 32, 40), np.float16))]
    kernels = [mock.flash_attn.inspect_key(request).kernel for request in requests]
    assert kernels == ["decode_sm90", "decode_mma"]


# The dtype of q, and a bias: its dtype, whether it has sequences, heads and rows, and whether it hides keys.
USUAL: tuple[tuple[str, str, Any], ...] = (
    ("paged", "float16", ("bool", True, True, True, False)),
    ("packed", "float16", ("float32", True, False, False, False)),
    ("pointers", "float16", ("", True, True, True, True)),
)
SWEPT: tuple[tuple[str, str, Any], ...] = (
    ("paged", "bfloat16", ("bool", False, True, False, False)),
    ("packed", "bfloat16", ("", True, True, True, True)),
    ("cache", "float16", ("float32", True, True, True, True)),
    ("pointers", "bfloat16", ("bool", False, True, True, False)),
    ("attend", "float16", ("float32", True, True, True, True)),
    ("attend", "float16", ("float32", False, False, True, False)),
    ("packed", "float64", ("", True, False, False, False)),
    ("cache", "float32", ("bool", True, False, True, False)),
    ("pointers", "float64", ("float32", True, True, True, True)),
)
EMULATED = [
    pytest.param(*case, arch, marks=[] if case in USUAL and arch == "sm_80" else pytest.mark.sweep)
    for case in USUAL + SWEPT
    for arch in ("sm_80", "sm_90a")
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("layout", "dtype", "bias", "arch"), EMULATED)
def test_kernels_add_biases_over_caches(layout: str, dtype: str, bias: Any, arch: str) -> None:
    rows = {"packed": (5, 3, 1, 5), "pointers": (1,) * 4}.get(layout, (5,) * 4)
    options: dict[str, Any] = {"bias": bias} | ({"softcap": 4.0} if layout == "packed" else {})
    options |= {"causal": True} if layout in ("paged", "attend") else {}
    how = {"return_lse": True, "page_size": PAGE, "spare": (0, 5), "new": layout == "attend"}
    door = {"packed": "paged", "attend": "kv_cache"}.get(layout, layout)
    spec = Spec(
        door=door, dtype=dtype, rows=rows, keys=(77, 30, 0, 96), heads=(4, 2), dims=(64, 64), options=options, how=how
    )
    emulation = ga.EmulationOptions(delivery="random", schedule="greedy", arithmetic=arithmetic())
    with ga.open_context("emulated", ga.ContextOptions(arch=arch, emulation=emulation)) as ctx:
        asked = ask_of(spec, problem_of(spec))
        check(asked, answer_of(asked, send(ctx, asked)), kernels=True)
        check_unharmed(asked)
