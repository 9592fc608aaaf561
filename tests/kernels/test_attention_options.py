"""Masks as an operand, a bias of one row, ALiBi with a sign and outputs in float32, in kernels."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from emulated.mask_probe import module_of
from inside.emulation import EmulatedBuffer
from support.gate import code_faults, code_of, kernel_source, register_limit

import gpu_actors as ga
from gpu_actors import KernelSource
from gpu_actors.kernels.dispatch import dispatch_key, program_of
from gpu_actors.kernels.key_checks import check_key
from gpu_actors.kernels.support import example_problem
from gpu_actors.kernels.variants import block_threads
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


def arrays() -> list[np.ndarray]:
    """q, k, v and dout."""
    rng = np.random.default_rng(1)
    shapes = ((2, ROWS, 4), (2, KEYS, 2), (2, KEYS, 2), (2, ROWS, 4))
    return [rng.standard_normal((*shape, 64)).astype(np.float16) for shape in shapes]


def run(ctx: ga.GpuContext, options: dict[str, Any], backward: bool = True) -> Any:
    """The answer to a forward request, which is compared with the oracle, as are its gradients."""
    q, k, v, dout = arrays()
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


def test_what_is_refused() -> None:
    q, k, v, dout = arrays()
    lse = np.zeros((2, 4, ROWS), np.float32)
    refused: list[tuple[Any, str]] = [
        (ga.FlashForward(q, k, v, out_dtype="bfloat16"), "out_dtype"),
        (ga.FlashForward(*(x.astype(np.float64) for x in (q, k, v)), out_dtype="float32"), "out_dtype"),
        (ga.FlashForward(q, k, v, out_dtype="float32", out=np.empty_like(q)), "out"),
        (ga.FlashForward(q, k, v, out_dtype="float32", sinks=np.zeros(4, np.float16)), "sinks"),
        (ga.FlashBackward(q=q, k=k, v=v, out=q, dout=dout, lse=lse, out_dtype="float32"), "out_dtype"),
    ]
    with ga.open_context("mock") as ctx:
        for request, field in refused:
            with pytest.raises(ga.RequestError) as caught:
                ctx.flash_attn.inspect_key(request)
            assert caught.value.field == field


def test_causal_rows_see_no_key_after_their_own_so_that_slopes_have_no_sign() -> None:
    given: dict[str, Any] = dict(zip("qkv", arrays(), strict=False)) | {"alibi_slopes": SLOPES, "causal": True}
    with ga.open_context("mock") as ctx:
        plain, signed = (
            ctx.flash_attn.inspect_key(ga.FlashForward(**given, alibi_signed=sign)) for sign in (False, True)
        )
    assert plain == signed


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
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_outputs_in_float32(arch: str) -> None:
    """Outputs of a batch, of rows over a cache, of merged splits, and of more rows than cached keys."""
    q, k, v, _ = arrays()
    options: dict[str, Any] = {"out_dtype": "float32", "return_lse": True}
    with ga.open_context("emulated", ga.ContextOptions(arch=arch)) as ctx:
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
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_variants_pass_the_gate(arch: str) -> None:
    features: list[dict[str, Any]] = [
        {"bias": ("bool", False, True)}, {"alibi": "heads", "alibi_signed": True}, {"out_dtype": "float32"},
        {"bias": ("bool", True, True), "direction": "backward"},
        {"alibi": "heads", "alibi_signed": True, "direction": "backward"},
        {"out_dtype": "float32", "layout": "cache", "seqlen_q": 1, "total_q": 1},
        {"attention_chunk": 128, "causal": True}, {"attention_chunk": 128, "causal": True, "direction": "backward"},
        {"attention_chunk": 128}, {"attention_chunk": 128, "direction": "backward"},
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


def test_floats_are_stored_wherever_they_lie() -> None:
    problem = example_problem("bfloat16", 64, layout="cache", seqlen_q=1, total_q=1, out_dtype="float32")
    source = kernel_source(dispatch_key(problem, "sm_80"))
    module = module_of(KernelSource("probe.cu", STORES, ("stores",), source.headers, source.macros))
    for begin in range(5):
        result = EmulatedBuffer.of(np.zeros(20, np.float32), "out")
        module.launch("stores", 1, 1, 0, struct.pack("<Qi4x", result.address, begin), [result])
        found = result.view(np.float32, (20,))
        wanted = np.zeros(20, np.float32)
        wanted[begin : begin + 12] = np.arange(12, dtype=np.float32) + np.float32(1.0009765625)
        wanted[begin + 12] = np.nan
        np.testing.assert_array_equal(found, wanted)
