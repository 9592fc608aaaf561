"""Biases and masks of packed sequences: each sequence as if it were alone, with its corner of the matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from emulated.contraction import arithmetic

import gpu_actors as ga
from gpu_actors.reference import attention_backward
from gpu_actors.testing import check_gradients, check_output

ROWS, KEYS = (40, 0, 70, 1), (33, 90, 9, 64)
HEADS, HEADS_KV, DIM = 4, 2, 64
LONGEST = 75, 93  # of the matrix, which has room
SHAPES = {
    "own": (4, HEADS, *LONGEST),
    "of sequences": (4, 1, *LONGEST),
    "of heads": (1, HEADS, *LONGEST),
    "of all": (1, 1, *LONGEST),
    "one row": (4, HEADS, 1, LONGEST[1]),
    "one row of all": (1, 1, 1, LONGEST[1]),
}
BESIDE: dict[str, dict[str, Any]] = {
    "own": {"causal": True},
    "of sequences": {"dropout_p": 0.3, "dropout_seed": 7},
    "of heads": {"softcap": 5.0, "causal": True},
    "of all": {"window_size": (20, 4)},
    "one row": {},
    "one row of all": {"sinks": np.array([0.1, -2.0, 0.5, 3.0], np.float32)},
}


@pytest.fixture(scope="module")
def mock() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


def bias_of(kind: str, dtype: str) -> np.ndarray:
    """NaN where no pair of any sequence reads it."""
    rng = np.random.default_rng(len(kind))
    shape = SHAPES[kind]
    bias = rng.standard_normal(shape).astype(np.float32)
    read = np.zeros(shape, bool)
    for b, (rows, keys) in enumerate(zip(ROWS, KEYS, strict=True)):
        read[b % shape[0], :, : rows if shape[2] > 1 else 1, : keys if rows else 0] = True
    if dtype == "bool":
        return np.asarray(read & (bias < 0.5))
    return np.where(read, bias, np.nan).astype(dtype)


def check(ctx: ga.GpuContext, kind: str, dtype: str = "float32", bias_dtype: str = "float32", seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    ends = {f"cu_seqlens_{s}": np.cumsum([0, *n]).astype(np.int32) for s, n in (("q", ROWS), ("k", KEYS))}
    q, dout = (rng.standard_normal((sum(ROWS), HEADS, DIM)).astype(dtype) for _ in range(2))
    k, v = (rng.standard_normal((sum(KEYS), HEADS_KV, DIM)).astype(dtype) for _ in range(2))
    options = {**BESIDE[kind], "bias": bias_of(kind, bias_dtype), **ends}
    answer = ctx.flash_attn.forward(q, k, v, return_lse=True, **options).result(300)
    check_output(answer.out, answer.lse, q, k, v, **options)
    for deterministic in (False, True):
        if deterministic and SHAPES[kind][2] == 1 and bias_dtype != "bool":
            continue  # refused
        found = ctx.flash_attn.backward(dout, q, k, v, *answer, deterministic=deterministic, **options).result(300)
        assert (found.dbias is None) == (bias_dtype == "bool")
        check_gradients(found, dout, q, k, v, out=answer.out, lse=answer.lse, **options)


@pytest.mark.parametrize("kind", SHAPES)
def test_the_oracle_is_that_of_each_sequence_alone(kind: str) -> None:
    rng = np.random.default_rng(3)
    q, dout = (rng.standard_normal((sum(ROWS), HEADS, 8)) for _ in range(2))
    k, v = (rng.standard_normal((sum(KEYS), HEADS_KV, 8)) for _ in range(2))
    beside = {name: value for name, value in BESIDE[kind].items() if not name.startswith("dropout")}
    bias, (ends_q, ends_k) = bias_of(kind, "float32"), (np.cumsum([0, *n]) for n in (ROWS, KEYS))
    whole = attention_backward(dout, q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, bias=bias, **beside)
    assert whole.dbias is not None
    dbias = np.zeros(bias.shape)
    for b, (rows, keys) in enumerate(zip(ROWS, KEYS, strict=True)):
        own_q, own_k = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        at = b % bias.shape[0], slice(None), slice(rows if bias.shape[2] > 1 else 1), slice(keys)
        part = [array[None] for array in (dout[own_q], q[own_q], k[own_k], v[own_k])]
        if not rows:
            assert not whole.dk[own_k].any()
            continue
        alone = attention_backward(*part, bias=bias[at][None], **beside)
        assert alone.dbias is not None
        np.testing.assert_allclose(whole.dq[own_q], alone.dq[0], atol=1e-12)
        np.testing.assert_allclose(whole.dv[own_k], alone.dv[0], atol=1e-12)
        dbias[at] += alone.dbias[0]
    np.testing.assert_allclose(whole.dbias, dbias, atol=1e-12)


def test_sequences_of_other_lengths_do_not_take_turns(mock: ga.GpuContext) -> None:
    """A kernel whose blocks wait for those of other sequences would wait forever for one that has no such tile."""
    q, ends = np.zeros((5, 2, 64), np.float16), np.array([0, 3, 5], np.int32)
    lse, bias = np.zeros((2, 5), np.float32), np.zeros((1, 1, 3, 3), np.float32)
    request = {"q": q, "k": q, "v": q, "dout": q, "out": q, "lse": lse, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
    kernels = {
        deterministic: mock.flash_attn.inspect_key(
            ga.FlashBackward(**request, bias=bias, deterministic=deterministic)
        ).kernel
        for deterministic in (False, True)
    }
    assert kernels == {False: "backward_sm90", True: "backward_simple"}
    own = np.zeros((2, 1, 3, 3), np.float32)
    assert (
        mock.flash_attn.inspect_key(ga.FlashBackward(**request, bias=own, deterministic=True)).kernel == "backward_sm90"
    )


EMULATED = (
    ("own", "float16", "float32"),
    ("own", "bfloat16", "bool"),
    ("of sequences", "bfloat16", "float32"),
    ("of heads", "float16", "float16"),
    ("of all", "float16", "float32"),
    ("one row", "float16", "float32"),
    ("one row of all", "float16", "float32"),
    ("of all", "float32", "float32"),
)


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("case", EMULATED, ids=" ".join)
def test_kernels_add_biases_to_packed_sequences(case: tuple[str, str, str], arch: str) -> None:
    kind, dtype, bias_dtype = case
    emulation = ga.EmulationOptions(delivery="random", schedule="greedy", arithmetic=arithmetic())
    with ga.open_context("emulated", ga.ContextOptions(arch=arch, emulation=emulation)) as ctx:
        check(ctx, kind, dtype, bias_dtype)
