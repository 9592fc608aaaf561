"""What every forward kernel guarantees: the same bits in every run, no writes outside its outputs, and refusals.

The rows of `matrix` compare its answers with the oracle.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from cases.many_keys import E4M3
from emulated.forward import OPERANDS, Strided, gaussian, key_of, ml_dtype, problem_of, run
from emulated.sweeps import LAUNCHES, assert_same_bits, case_of, launch_of
from inside.attention import ScoreMod
from matrix import forward_sm90_fp8
from support.gate import kernel_source

import gpu_actors as ga
from gpu_actors.kernels.dispatch import dispatch_key
from gpu_actors.kernels.support import example_problem
from gpu_actors.kernels.tiles import TILES, tile_of
from gpu_actors.reference import attention_forward
from gpu_actors.testing import check_output

Array = Any


class Kernel(NamedTuple):
    name: str
    arch: str
    dtype: str
    dim: int

    def operands(self, rows: int, keys: int, *, batch: int = 1, heads: int = 2) -> list[Array]:
        """q, k and v; of a packed batch if batch is 0."""
        sizes = ((rows, heads), (keys, 2), (keys, 2))
        first = (batch,) if batch else ()
        return [gaussian(n, (*first, *size, self.dim), self.dtype) for n, size in enumerate(sizes)]

    def answer(self, q: Array, k: Array, v: Array, *, blocks: int | None = None, **options: Any) -> tuple[Array, Array]:
        arrays = {name: options[name] for name in OPERANDS if name in options}
        problem = problem_of(q, k, v, **options)
        seed = options.get("dropout_seed", 0)
        return self.run(problem, {"q": q, "k": k, "v": v, **arrays}, multiprocessors=blocks, dropout_seed=seed)

    def run(self, problem: ga.AttentionProblem, operands: dict[str, Array], **launch: Any) -> tuple[Array, Array]:
        return run(problem, operands, kernel=self.name, arch=self.arch, **launch)

    def check(self, q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
        out, lse = self.answer(q, k, v, **options)
        options.pop("blocks", None)
        check_output(out, lse, q, k, v, weights_dtype=E4M3 if self is FP8 else None, **options)
        return out, lse


MMA = Kernel("forward_mma", "sm_86", "float16", 32)
SIMPLE = Kernel("forward_simple", "sm_90a", "float32", 16)
# Of 40 columns one warp multiplies two pairs of chunks and the other one pair.
WIDE = Kernel("forward_wide", "sm_86", "float16", 40)
SM90 = Kernel("forward_sm90", "sm_90a", "float16", 64)
FP8 = Kernel("forward_sm90", "sm_90a", E4M3, 64)
ALL = [pytest.param(kernel, id=f"{kernel.name}-{kernel.dtype}") for kernel in (MMA, SIMPLE, WIDE, SM90, FP8)]
TENSOR_CORES = [ALL[0], *ALL[2:]]
every_kernel = pytest.mark.parametrize("kernel", ALL)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kernel", TENSOR_CORES)
def test_every_delivery_and_schedule_gives_the_same_bits(kernel: Kernel) -> None:
    """More keys than the ring's stages hold, so that every stage is refilled, and more tiles of rows than blocks."""
    rows, keys, dim = {MMA: (70, 300, 32), WIDE: (20, 90, 512), SM90: (200, 600, 128), FP8: (200, 700, 64)}[kernel]
    q, k, v = kernel._replace(dim=dim).operands(rows, keys, heads=4)
    problem = problem_of(q, k, v, causal=True)
    tile = tile_of(key_of(problem, kernel.arch, kernel.name))
    assert tile.stages * tile.block_n < keys
    assert_same_bits(
        [
            kernel.run(
                problem,
                {"q": q, "k": k, "v": v},
                multiprocessors=2,
                seed=seed,
                arithmetic="nearest",
                **launch_of(seed),
            )
            for seed in range(0, len(LAUNCHES), 5)  # each delivery once, and each schedule but one
        ]
    )


@every_kernel
def test_a_dense_sequence_has_the_same_bits_alone_and_in_a_batch(kernel: Kernel) -> None:
    q, k, v = kernel.operands(150, 213, batch=2, heads=4)
    scales = {"q_descale": gaussian(5, (2, 2))} if kernel is FP8 else {}
    out, lse = kernel.answer(q, k, v, causal=True, blocks=2, **scales)
    for n in range(2):
        own = {name: scale[n : n + 1] for name, scale in scales.items()}
        alone, alone_lse = kernel.answer(*(x[n : n + 1] for x in (q, k, v)), causal=True, **own)
        assert_same_bits([(alone[0], alone_lse[0]), (out[n], lse[n])])


@every_kernel
def test_a_packed_sequence_has_the_same_bits_alone_and_in_a_batch(kernel: Kernel) -> None:
    """Of five sequences one has no rows and one no keys."""
    ends_q, ends_k = np.array([0, 3, 3, 170, 180, 211], np.int32), np.array([0, 90, 130, 258, 258, 308], np.int32)
    q, k, v = kernel.operands(211, 308, batch=0)
    out, lse = kernel.answer(q, k, v, causal=True, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, blocks=2)
    assert (out[170:180] == 0).all()
    assert (lse[:, 170:180] == -np.inf).all()
    for n in (0, 2, 4):
        rows, keys = slice(*ends_q[n : n + 2]), slice(*ends_k[n : n + 2])
        ends = {"cu_seqlens_q": ends_q[n : n + 2] - ends_q[n], "cu_seqlens_k": ends_k[n : n + 2] - ends_k[n]}
        alone, alone_lse = kernel.answer(q[rows], k[keys], v[keys], causal=True, **ends)
        assert_same_bits([(alone, alone_lse), (out[rows], lse[:, rows])])


@every_kernel
def test_a_sequence_longer_than_its_maximum_is_still_computed_whole(kernel: Kernel) -> None:
    q, k, v = kernel.operands(700, 700, batch=0)
    ends = {name: np.array([0, 10, 700], np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    problem, operands = problem_of(q, k, v, causal=True, **ends), {"q": q, "k": k, "v": v, **ends}
    lengths = [{"seqlen_q": rows, "seqlen_k": rows} for rows in (1, 700)]
    assert_same_bits([kernel.run(dataclasses.replace(problem, **given), operands) for given in lengths])


@every_kernel
def test_special_values_reach_the_rows_that_see_them_and_no_others(kernel: Kernel) -> None:
    """Rows and keys share a tile: 0, a hidden key's weight, must not be multiplied by NaN. e4m3 has no infinities."""
    for special, index in itertools.product((np.nan, np.inf), range(3)):
        operands = kernel.operands(150, 150)
        operands[index][0, 40, :, 3 :: kernel.dim - 4] = special
        out, _ = kernel.check(*operands, causal=True)
        assert not np.isfinite(out).all()
        assert np.isfinite(out[:, :40]).all()


PADDED = [(kernel, padding, None) for kernel, padding in ((SIMPLE, 3), (WIDE, 8), (WIDE, 3), (SM90, 8))]
PADDED += [(MMA, 8, None), (MMA, 2, None), (MMA, 3, None), (MMA, 1, "tf32"), (MMA, 3, "tf32")]


@pytest.mark.parametrize(("kernel", "padding", "compute"), PADDED)
def test_a_transposed_padded_view_is_read_and_written_in_place(
    kernel: Kernel, padding: int, compute: str | None
) -> None:
    """NaN fills the gaps between rows, heads and sequences. 8 aligns rows to 16 bytes, as copies need; 3 does not."""
    dtype = "float32" if compute else kernel.dtype

    def view(seed: int, length: int, heads: int) -> Strided:
        base = np.full((2, heads + 1, length + 2, kernel.dim + 2 * padding), np.nan, dtype)
        array = base[:, 1:, 1 : length + 1, padding : padding + kernel.dim].transpose(0, 2, 1, 3)
        array[...] = gaussian(seed, array.shape)
        return Strided(array, base)

    q, k, v, out = view(0, 137, 4), view(1, 170, 2), view(2, 170, 2), view(3, 137, 4)
    out.array[...] = np.nan
    problem = problem_of(q.array, k.array, v.array, causal=True, compute=compute)
    written, lse = kernel.run(problem, {"q": q, "k": k, "v": v, "out": out})
    check_output(written, lse, q.array, k.array, v.array, causal=True, compute=compute)
    assert np.isfinite(out.base).sum() == written.size, "only the view was written"


# Precision


@pytest.mark.parametrize(
    ("kernel", "compute"), [(MMA, "tf32"), (MMA, "f16"), (MMA, "bf16"), (SIMPLE, "f16"), (SIMPLE, "bf16")]
)
def test_float32_computes_in_less_where_asked_and_keeps_its_range(kernel: Kernel, compute: str) -> None:
    q, k, v = kernel._replace(dtype="float32").operands(40, 100)
    exact, _ = SIMPLE.answer(q, k, v, causal=True)
    out, _ = kernel.answer(q, k, v, causal=True, compute=compute)
    assert np.abs(out - exact).max() > 1e-5, "nothing was rounded"
    large, lse = kernel.answer(q, k, v * np.float32(1e6), causal=True, compute=compute)
    if compute == "f16":  # has as many digits as tf32
        check_output(large, lse, q, k, v * np.float32(1e6), compute="tf32", causal=True)
    assert np.isfinite(large).all()


def test_lse_is_float32_and_exact_for_doubles() -> None:
    q, k, v = SIMPLE._replace(dtype="float64").operands(4, 40)
    out, lse = SIMPLE.answer(q, k, v)
    reference = attention_forward(q, k, v)
    np.testing.assert_array_equal(lse, reference.lse.astype(np.float32))
    np.testing.assert_allclose(out, reference.out, rtol=0, atol=1e-14)


def test_infinite_values_and_scores_follow_ieee() -> None:
    q, k, v = SIMPLE.operands(4, 50)
    v[0, 45, 0, 2] = np.inf
    k[0, 3] = q[0, 2] = 1e30
    reference = attention_forward(q, k, v, accumulate="float32")
    for found, wanted in zip(SIMPLE.answer(q, k, v), (reference.out, reference.lse), strict=True):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
        np.testing.assert_array_equal(np.isinf(found), np.isinf(wanted))


def test_sinks_may_have_the_outputs_dtype() -> None:
    q, k, v = SIMPLE._replace(dtype="bfloat16").operands(3, 40)
    dtypes = (np.float32, ml_dtypes.bfloat16)
    assert_same_bits([SIMPLE.answer(q, k, v, sinks=np.array([0.75, 2.0]).astype(dtype)) for dtype in dtypes])


@pytest.mark.parametrize("fused", [False, True])
def test_a_context_fuses_products_if_it_is_asked_to(fused: bool) -> None:
    """forward_simple sums products in fp32, whose last bits differ if products are fused."""
    q, k, v = SIMPLE.operands(16, 40)
    options = ga.ContextOptions(emulation=ga.EmulationOptions(contraction=fused))
    with ga.open_context("emulated", options) as ctx:
        out = ctx.flash_attn.forward(q, k, v).result(120).out
    check_output(out, None, q, k, v)
    assert np.array_equal(out, SIMPLE.answer(q, k, v)[0]) == (not fused)


# forward_sm90 alone


def test_the_number_of_blocks_does_not_matter() -> None:
    q, k, v = SM90.operands(300, 200, batch=2, heads=4)
    assert_same_bits([SM90.answer(q, k, v, causal=True, blocks=blocks) for blocks in (None, 1, 7)])


def test_v_has_a_factor_of_its_own_and_the_lse_none_of_it() -> None:
    operands = FP8.operands(150, 200, heads=4)
    options: dict[str, Any] = {"causal": True, "k_descale": np.array([[0.5, 2.0]], np.float32)}
    out, lse = FP8.check(*operands, **options)
    scaled, scaled_lse = FP8.check(*operands, v_descale=np.array([[-4.0, 0.0]], np.float32), **options)
    assert_same_bits([(scaled[:, :, :2], scaled_lse), (-4 * out[:, :, :2], lse)])
    assert (scaled[:, :, 2:] == 0).all()


def test_every_e5m2_number_of_v_is_one_of_the_output() -> None:
    """A row that sees one key has that key's value exactly, also NaN and infinity."""
    q, k, v = (array.astype(ml_dtypes.float8_e5m2) for array in FP8.operands(150, 150, heads=4))
    v[:, 0] = np.arange(128, dtype=np.uint8).view(v.dtype).reshape(1, 2, 64)  # infinity and NaN among them
    out, _ = FP8.check(q, k, v, causal=True, k_descale=np.array([[0.5, 2.0]], np.float32))
    np.testing.assert_array_equal(out[0, 0, ::2].astype(np.float64), v[0, 0].astype(np.float64))


def test_the_service_answers_8_bit_floats_with_it() -> None:
    q, k, v = FP8.operands(150, 200, batch=2, heads=4)
    descales = {f"{name}_descale": np.full((2, 2), 0.5 + n, np.float32) for n, name in enumerate("qkv")}
    # Gaps between rows and heads.
    padded = np.full((2, 200, 3, 80), np.nan, ml_dtype(E4M3))
    padded[:, :, :2, 16:] = v
    with ga.open_context("emulated") as ctx:
        assert ctx.flash_attn.inspect_key(ga.FlashForward(q, k, v, **descales)).kernel == "forward_sm90"
        apart = padded[:, :, :2, 16:]
        result = ctx.flash_attn.forward(q, k, apart, causal=True, return_lse=True, **descales).result(60)
        check_output(result.out, result.lse, q, k, v, causal=True, weights_dtype=E4M3, **descales)


def test_every_tile_of_8_bit_floats_is_swept() -> None:
    problems = []
    for sweep in forward_sm90_fp8.SWEEPS:
        case = case_of(sweep, 0, 0, (1, 1))
        problems.append(problem_of(*case.inputs, **case.options))
    found = {tile_of(key_of(problem, "sm_90a", "forward_sm90")) for problem in problems}
    assert found == {row.tile for row in TILES if row.kernel == "forward_sm90" and E4M3 in (row.dtypes or ())}


def test_tiles_of_block_masks_divide_the_blocks_of_wide_heads() -> None:
    problem = example_problem("bfloat16", 512, score_mod=ScoreMod("", block_size=(128, 128)))
    for arch in ("sm_80", "sm_86", "sm_90a"):
        macros = kernel_source(dispatch_key(problem, arch)).macros
        assert 128 % int(macros["BLOCK_M"]) == 128 % int(macros["BLOCK_N"]) == 0
