"""Masks as an operand, a bias of one row, ALiBi with a sign and outputs in float32: the oracle, then kernels."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated.mask_probe import built_with_bug, module_of
from inside.emulation import EmulatedBuffer, EmulationFault
from support.gate import code_faults, code_of, register_limit, with_bug

import gpu_actors as ga
from gpu_actors import KernelSource
from gpu_actors.kernels import variants
from gpu_actors.kernels.dispatch import dispatch_key, program_of
from gpu_actors.kernels.keys import check_key
from gpu_actors.kernels.support import example_problem
from gpu_actors.kernels.variants import block_threads, kernel_source
from gpu_actors.testing import check_gradients, check_output

RNG = np.random.default_rng(0)
ROWS, KEYS = 70, 90
MASK = RNG.random((2, 4, ROWS, KEYS)) < 0.6
MASK[0, 1, 5] = MASK[:, :, :, 3] = MASK[:, :, 60:] = False
ROW = RNG.standard_normal((1, 4, 1, KEYS)).astype(np.float32)
SLOPES = np.array([0.1, 0.2, 0.01, 0.3], np.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "mask": {"bias": MASK},
    "mask of one row": {"bias": MASK[:1, :, :1], "causal": True},
    "mask, dropout and softcap": {"bias": MASK[:, :1], "dropout_p": 0.3, "dropout_seed": 5, "softcap": 8.0},
    "bias of one row": {"bias": ROW},
    "narrow bias of one row": {"bias": ROW.astype(np.float16), "causal": True},
    "signed ALiBi": {"alibi_slopes": SLOPES, "alibi_signed": True},
    "signed ALiBi of a shard": {
        "alibi_slopes": SLOPES, "alibi_signed": True, "q_positions": np.array([[30, 2], [0, 1]], np.int32),
    },
}  # fmt: skip


def arrays(dtype: Any = np.float16, dim: int = 64) -> list[np.ndarray]:
    """q, k, v and dout."""
    rng = np.random.default_rng(1)
    shapes = ((2, ROWS, 4), (2, KEYS, 2), (2, KEYS, 2), (2, ROWS, 4))
    return [rng.standard_normal((*shape, dim)).astype(dtype) for shape in shapes]


def run(ctx: ga.GpuContext, options: dict[str, Any], dtype: Any = np.float16, backward: bool = True) -> Any:
    """The answer to a forward request, held against the oracle with its gradients."""
    q, k, v, dout = arrays(dtype)
    answer = ctx.flash_attn.forward(q, k, v, return_lse=True, **options).result(300)
    check_output(answer.out, answer.lse, q, k, v, **options)
    bias = options.get("bias")
    for deterministic in (False, True) if backward else ():
        if deterministic and bias is not None and bias.shape[2] == 1 and bias.dtype != np.bool_:
            continue
        found = ctx.flash_attn.backward(dout, q, k, v, *answer, deterministic=deterministic, **options).result(300)
        assert (found.dbias is not None) == (bias is not None and bias.dtype != np.bool_)
        check_gradients(found, dout, q, k, v, out=answer.out, lse=answer.lse, **options)
    return answer


# The oracle


def test_a_mask_hides_what_a_bias_of_minus_infinity_hides() -> None:
    q, k, v, dout = arrays(np.float32)
    bias = np.where(MASK, 0, -np.inf).astype(np.float32)
    with ga.open_context("mock") as ctx:
        masked = ctx.flash_attn.forward(q, k, v, bias=MASK, return_lse=True).result(30)
        biased = ctx.flash_attn.forward(q, k, v, bias=bias, return_lse=True).result(30)
        np.testing.assert_array_equal(masked.out, biased.out)
        assert (masked.out[:, 60:] == 0).all()
        assert np.isneginf(masked.lse[:, :, 60:]).all()
        assert np.isneginf(masked.lse[0, 1, 5])
        found = ctx.flash_attn.backward(dout, q, k, v, *masked, bias=MASK).result(30)
        wanted = ctx.flash_attn.backward(dout, q, k, v, *biased, bias=bias).result(30)
    assert found.dbias is None
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)
    assert (found.dq[:, 60:] == 0).all()
    assert (found.dk[:, 3] == 0).all()


def test_a_bias_of_one_row_is_that_of_all_rows_and_its_gradient_their_sum() -> None:
    q, k, v, dout = arrays(np.float32)
    whole = np.ascontiguousarray(np.broadcast_to(ROW, (1, 4, ROWS, KEYS)))
    with ga.open_context("mock") as ctx:
        one, all_rows = (ctx.flash_attn.forward(q, k, v, bias=b, return_lse=True).result(30) for b in (ROW, whole))
        np.testing.assert_array_equal(one.out, all_rows.out)
        found = ctx.flash_attn.backward(dout, q, k, v, *one, bias=ROW).result(30)
        wanted = ctx.flash_attn.backward(dout, q, k, v, *one, bias=whole).result(30)
    assert found.dbias.shape == ROW.shape
    np.testing.assert_allclose(found.dbias, wanted.dbias.sum(axis=2, keepdims=True), atol=1e-5)


def test_signed_alibi_is_a_bias_that_goes_on_after_the_row() -> None:
    q, k, v, _ = arrays(np.float32)
    distance = np.arange(ROWS)[:, None] + KEYS - ROWS - np.arange(KEYS)
    bias = (-SLOPES[:, None, None] * distance).astype(np.float32)[None]
    with ga.open_context("mock") as ctx:
        wanted = ctx.flash_attn.forward(q, k, v, bias=bias).result(30)
        found = ctx.flash_attn.forward(q, k, v, alibi_slopes=SLOPES, alibi_signed=True).result(30)
        np.testing.assert_allclose(found.out, wanted.out, atol=1e-6)
        keys = [
            ctx.flash_attn.inspect_key(ga.FlashForward(q, k, v, alibi_slopes=SLOPES, causal=True, alibi_signed=signed))
            for signed in (False, True)
        ]
    assert keys[0] == keys[1], "causal rows see no key after their own"


def test_an_output_in_float32_is_the_same_unrounded() -> None:
    q, k, v, _ = arrays()
    sinks = np.zeros(4, np.float32)
    with ga.open_context("mock") as ctx:
        wide = ctx.flash_attn.forward(q, k, v, sinks=sinks, out_dtype="float32").result(30)
        narrow = ctx.flash_attn.forward(q, k, v, sinks=sinks).result(30)
        paged = ctx.flash_attn.paged_forward(q, k, v, cache_seqlens=KEYS, causal=False, out_dtype="float32").result(30)
        into = np.empty((2, ROWS, 4, 64), np.float32)
        written = ctx.flash_attn.forward(q, k, v, sinks=sinks, out=into, out_dtype="float32").result(30)
    assert wide.out.dtype == paged.out.dtype == np.float32
    assert (wide.out.astype(np.float16) == narrow.out).mean() > 0.999, "but for those that are rounded twice"
    assert (wide.out != narrow.out).any()
    assert written.out is into
    np.testing.assert_array_equal(into, wide.out)


def test_what_is_refused() -> None:
    q, k, v, dout = arrays()
    lse = np.zeros((2, 4, ROWS), np.float32)
    refused: list[tuple[Any, str]] = [
        (ga.FlashForward(q, k, v, out_dtype="bfloat16"), "out_dtype"),
        (ga.FlashForward(*(x.astype(np.float64) for x in (q, k, v)), out_dtype="float32"), "out_dtype"),
        (ga.FlashForward(q, k, v, out_dtype="float32", out=np.empty_like(q)), "out"),
        (ga.FlashForward(q, k, v, out_dtype="float32", sinks=np.zeros(4, np.float16)), "sinks"),
        (ga.FlashBackward(q=q, k=k, v=v, out=q, dout=dout, lse=lse, out_dtype="float32"), "out_dtype"),
        (ga.FlashBackward(q=q, k=k, v=v, out=q, dout=dout, lse=lse, bias=ROW, deterministic=True), "deterministic"),
        (ga.FlashForward(q, k, v, bias=MASK[:, :, :2]), "bias"),
        (ga.FlashForward(q, k, v, bias=MASK.astype(np.int8)), "bias"),
        (ga.FlashForward(q, k, v, alibi_slopes=SLOPES, alibi_signed=1), "alibi_signed"),  # type: ignore[arg-type]
    ]
    with ga.open_context("mock") as ctx:
        for request, field in refused:
            with pytest.raises(ga.RequestError) as caught:
                ctx.flash_attn.inspect_key(request)
            assert caught.value.field == field


# Kernels


@pytest.mark.timeout(600)
def test_a_mask_in_kernels() -> None:
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80")) as ctx:
        answer = run(ctx, OPTIONS["mask"], backward=False)
    assert (answer.out[:, 60:] == 0).all()
    assert np.isneginf(answer.lse[:, :, 60:]).all()


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("options", OPTIONS)
def test_forward_and_its_gradients(options: str, arch: str) -> None:
    with ga.open_context("emulated", ga.ContextOptions(arch=arch)) as ctx:
        run(ctx, OPTIONS[options])


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", OPTIONS)
def test_forward_on_cuda_cores(options: str) -> None:
    with ga.open_context("emulated", ga.ContextOptions(arch="sm_80")) as ctx:
        given = {name: x for name, x in OPTIONS[options].items() if name != "bias" or x.dtype != np.float16}
        run(ctx, given, np.float32, backward=False)


def wide_outputs(ctx: ga.GpuContext) -> None:
    """Outputs in float32 of a batch, of rows over a cache, splits merged, and of a sequence longer than its cache."""
    q, k, v, _ = arrays()
    options: dict[str, Any] = {"out_dtype": "float32", "return_lse": True}
    answer = ctx.flash_attn.forward(q, k, v, causal=True, **options).result(300)
    assert answer.out.dtype == np.float32
    check_output(answer.out, answer.lse, q, k, v, causal=True)
    for splits, lengths in ((1, [80, 0]), (3, [80, 17])):
        counts = np.array(lengths, np.int32)
        given = {**options, "cache_seqlens": counts, "num_splits": splits}
        found = ctx.flash_attn.paged_forward(q[:, :3], k, v, **given).result(300)
        assert found.out.dtype == np.float32
        for n, length in enumerate(lengths):
            own = (q[n : n + 1, :3], k[n : n + 1, :length], v[n : n + 1, :length])
            check_output(found.out[n : n + 1], found.lse[n : n + 1], *own, causal=True)


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_outputs_in_float32(arch: str) -> None:
    with ga.open_context("emulated", ga.ContextOptions(arch=arch)) as ctx:
        wide_outputs(ctx)


@pytest.mark.sweep
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_variants_pass_the_gate(arch: str) -> None:
    features: list[dict[str, Any]] = [
        {"bias": ("bool", False, True)}, {"alibi": "heads", "alibi_signed": True}, {"out_dtype": "float32"},
        {"bias": ("bool", True, True), "direction": "backward"},
        {"alibi": "heads", "alibi_signed": True, "direction": "backward"},
        {"out_dtype": "float32", "layout": "cache", "seqlen_q": 1, "total_q": 1},
    ]  # fmt: skip
    for fields in features:
        problem = example_problem("bfloat16", 64, **fields)
        for key in program_of(problem, dispatch_key(problem, arch)).keys:
            code = code_of(kernel_source(key), key.kernel)
            assert code_faults(code, register_limit(block_threads(key))) == [], key
        check_key(dispatch_key(problem, arch))


STORES = """
#include "decode/output.cuh"
struct Arguments { float* out; int begin; };
template <int COUNT>
DEVICE void store_from(float* out, float first) {
  float values[COUNT];
  for (int i = 0; i < COUNT; i++) values[i] = first + i;
  store_neighbours(out, values);
}
extern "C" __global__ void stores(const __grid_constant__ Arguments a) {
  store_from<8>(a.out + a.begin, 1.0009765625f);
  store_from<4>(a.out + a.begin + 8, 9.0009765625f);
  store_nan(a.out[a.begin + 12]);
}
"""


def stores(build: Any = module_of) -> None:
    """Raise AssertionError where neighbours are not stored as they are, wherever the first one lies."""
    problem = example_problem("bfloat16", 64, layout="cache", seqlen_q=1, total_q=1, out_dtype="float32")
    source = kernel_source(dispatch_key(problem, "sm_80"))
    module = build(KernelSource("probe.cu", STORES, ("stores",), source.headers, source.macros))
    for begin in range(5):
        result = EmulatedBuffer.of(np.zeros(20, np.float32), "out")
        module.launch("stores", 1, 1, 0, struct.pack("<Qi4x", result.address, begin), [result])
        found = result.view(np.float32, (20,))
        wanted = np.zeros(20, np.float32)
        wanted[begin : begin + 12] = np.arange(12, dtype=np.float32) + np.float32(1.0009765625)
        wanted[begin + 12] = np.nan
        np.testing.assert_array_equal(found, wanted)


def test_floats_are_stored_wherever_they_lie() -> None:
    stores()


# Seeded bugs

SCORE, OUTPUT, SUMS = "common/score.cuh", "decode/output.cuh", "backward/scores.cuh"
MUTANTS: dict[str, tuple[str, str, str, str]] = {
    "a mask is read the other way round": (SCORE, "bias ? score :", "!bias ? score :", "mask"),
    "hidden keys have score 0": (SCORE, "score : Real(-INFINITY)", "score : Real(0)", "mask"),
    "a mask hides nothing": (SCORE, "return bias ? score : Real(-INFINITY);", "return score;", "mask"),
    "a mask is that of row 0": (SCORE, "bias[row * bias_row_stride + key]", "bias[key]", "mask"),
    "a mask is one key off": (SCORE, "* bias_row_stride + key]", "* bias_row_stride + (key ? key - 1 : 0)]", "mask"),
    "a mask is that of sequence 0": (
        SCORE,
        "params.bias_strides, sequence, 0, head",
        "params.bias_strides, 0, 0, head",
        "mask",
    ),
    "a mask is that of head 0": (
        SCORE,
        "params.bias_strides, sequence, 0, head",
        "params.bias_strides, sequence, 0, 0",
        "mask",
    ),
    "a mask has a gradient": ("common/defaults.cuh", "(BIAS && !BIAS_HIDES)", "BIAS", "mask"),
    "a bias of one row has many": (SCORE, "row * bias_row_stride", "row * (bias_row_stride + 1)", "bias of one row"),
    "its gradient has many rows": (
        SUMS,
        "dbias + row * strides.row",
        "dbias + row * (strides.row + 1)",
        "bias of one row",
    ),
    "its gradient is that of every other key": (
        SUMS,
        "work.key(r, e / 2), ds",
        "work.key(r, 0), ds",
        "bias of one row",
    ),
    "a broken sequence has output 0": (OUTPUT, "as_float(0x7fffffffu)", "as_float(0u)", "stores"),
    "its sums are not rounded": (
        "backward/finish.cuh",
        "n < params.dbias_size",
        "n + 1 < params.dbias_size",
        "narrow bias of one row",
    ),
    "distances have no sign": (SCORE, "ALIBI_SIGNED ? before : abs(before)", "abs(before)", "signed ALiBi"),
    "distances have the other sign": (SCORE, "ALIBI_SIGNED ? before :", "ALIBI_SIGNED ? -before :", "signed ALiBi"),
    "distances of a shard are indices": (
        SCORE,
        "positions.row(row) - positions.key(key)",
        "row - key",
        "signed ALiBi of a shard",
    ),
    "floats are stored as pairs": (OUTPUT, "i += 4", "i += 8", "stores"),
    "all places are taken for wide": (OUTPUT, "reinterpret_cast<uint64_t>(out) % 16 == 0;", "true;", "stores"),
    "the first neighbour is the second": (
        OUTPUT,
        "{ptx::as_bits(values[i]),",
        "{ptx::as_bits(values[i + 1]),",
        "stores",
    ),
    "the last neighbour is the third": (
        OUTPUT,
        "ptx::as_bits(values[i + 3])}",
        "ptx::as_bits(values[i + 2])}",
        "stores",
    ),
    "wide stores begin at the first": (
        OUTPUT,
        "store_global_v4(out + i, words)",
        "store_global_v4(out, words)",
        "stores",
    ),
    "narrow stores begin at the first": (OUTPUT, "out[i + k] = values", "out[k] = values", "stores"),
    "narrow stores leave one out": (OUTPUT, "k < 4; k++) out[i + k]", "k < 3; k++) out[i + k]", "stores"),
    "a neighbour is cut to the bits of a half": (
        OUTPUT,
        "as_bits(values[i + 2])",
        "as_bits(values[i + 2]) & 0xffffe000u",
        "stores",
    ),
}


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_seeded_bug_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old, new, options = MUTANTS[name]
    if options == "stores":
        with pytest.raises((AssertionError, EmulationFault)):
            stores(built_with_bug(file, old, new, tmp_path))
        return
    sound = variants.asset_source

    def seeded(*args: Any, **given: Any) -> KernelSource:
        source = sound(*args, **given)
        return with_bug(source, file, old, new) if old in source.headers.get(file, "") else source

    monkeypatch.setattr(variants, "asset_source", seeded)
    kernel_source.cache_clear()
    try:
        with ga.open_context("emulated", ga.ContextOptions(arch="sm_80", cache_dir=str(tmp_path))) as ctx:
            with pytest.raises((AssertionError, EmulationFault, ga.GpuActorsError)) as caught:
                run(ctx, OPTIONS[options])
            assert not isinstance(caught.value, ga.RequestError | ga.CompileError)
    finally:
        kernel_source.cache_clear()
