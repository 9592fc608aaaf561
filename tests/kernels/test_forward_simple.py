"""The plain forward kernel on the CPU against the float64 oracle: every option, the edges, addressing, invariance."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulated.far_tensors import far_halves
from emulated.forward import Strided, answer, check, check_case, gaussian, key_of, module_of, problem_of, qkv, run
from emulated.sweeps import SCHEDULES, Sweep, case_of
from inside.devices import Buffer
from inside.emulation import EmulatedBuffer
from inside.testing import poison_unseen

from gpu_actors.kernels.dispatch import program_of
from gpu_actors.kernels.params import pack_forward
from gpu_actors.kernels.variants import kernel_source
from gpu_actors.reference import attention_forward
from gpu_actors.testing import check_output, random_forward

# Every option appears alone or in company, in both layouts and both alignments; shapes vary below.
SWEEPS = (
    Sweep("float32", 64, None, ""),
    Sweep("bfloat16", 40, None, "causal dropout"),
    Sweep("float16", 64, 24, "causal alibi sinks", varlen=True),
    Sweep("float32", 5, 65, "window sink_tokens softcap", varlen=True),
    Sweep("float16", 80, None, "causal window sink_tokens bias scale"),
    Sweep("float64", 96, None, "window bias dropout sinks softcap alibi", top_left=True),
    Sweep("float64", 160, 136, "causal window sink_tokens", varlen=True, top_left=True),
    Sweep("bfloat16", 128, None, "window dropout sinks alibi", varlen=True, top_left=True),
    Sweep("bfloat16", 256, None, "causal softcap bias"),
    Sweep("float8_e4m3fn", 64, None, "causal descales sinks", varlen=True),
    Sweep("float8_e5m2", 48, 17, "window descales bias alibi", top_left=True),
)
SHAPES = ((1, 1), (33, 95), (70, 31), (64, 128), (113, 203), (31, 300), (130, 7))


@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_the_kernel_agrees_with_the_oracle_whatever_the_schedule(sweep):
    for index, seqlens in enumerate(SHAPES):
        # Keys and values that no row of their sequence sees hold NaN.
        case = poison_unseen(case_of(sweep, SWEEPS.index(sweep), index, seqlens))
        check_case(case, schedule=SCHEDULES[index % 4], seed=index)


class TestEdges:
    ENDS = {
        "cu_seqlens_q": np.array([0, 5, 5, 8, 41], np.int32),
        "cu_seqlens_k": np.array([0, 0, 7, 9, 12], np.int32),
    }

    @staticmethod
    def packed() -> list[Any]:
        return [gaussian(n, (rows, heads, 16)) for n, (rows, heads) in enumerate([(41, 2), (12, 1), (12, 1)])]

    def test_sequences_without_rows_or_keys_and_rows_that_see_nothing(self):
        q, k, v = self.packed()
        for causal in (False, True):
            out, lse = answer(q, k, v, causal=causal, **self.ENDS)
            check_output(out, lse, q, k, v, causal=causal, **self.ENDS)
            assert (out[:5] == 0).all(), "five rows of a sequence without keys"
            assert np.isneginf(lse[:, :5]).all()
        assert (out[8:38] == 0).all(), "33 rows over 3 keys: the first 30 end before key 0"
        assert np.isneginf(lse[:, 8:38]).all()
        assert np.isfinite(lse[:, 38:]).all()

    def test_a_row_that_sees_nothing_has_its_sink_as_lse(self):
        q, k, v = self.packed()
        sinks = np.array([0.5, -3.0], np.float32)
        out, lse = answer(q, k, v, causal=True, sinks=sinks, **self.ENDS)
        check_output(out, lse, q, k, v, causal=True, sinks=sinks, **self.ENDS)
        assert (out[:5] == 0).all()
        np.testing.assert_array_equal(lse[:, :5], np.repeat(sinks[:, None], 5, 1))

    def test_a_sink_of_minus_infinity_is_no_sink_and_a_large_one_takes_all(self):
        q, k, v = qkv(3, 40)
        plain, plain_lse = answer(q, k, v)
        out, lse = answer(q, k, v, sinks=np.array([-np.inf, 300.0], np.float32))
        np.testing.assert_allclose(out[:, :, 0], plain[:, :, 0], rtol=1e-6)
        np.testing.assert_allclose(lse[:, 0], plain_lse[:, 0], rtol=1e-6)
        assert (out[:, :, 1] == 0).all()
        assert (lse[:, 1] == 300.0).all()

    def test_sinks_may_have_the_outputs_dtype(self):
        q, k, v = qkv(3, 40, dtype="bfloat16")
        sinks = np.array([0.75, 2.0])
        wide = answer(q, k, v, sinks=sinks.astype(np.float32))
        narrow = answer(q, k, v, sinks=sinks.astype(ml_dtypes.bfloat16))
        for one, other in zip(wide, narrow, strict=True):
            np.testing.assert_array_equal(one, other)

    def test_window_0_0_is_the_rows_own_key(self):
        q, k, v = qkv(40, 40, heads_kv=2)
        out, _ = answer(q, k, v, window_size=(0, 0))
        np.testing.assert_array_equal(out, v)

    def test_sink_tokens_pass_a_window_on_both_sides_but_never_causal(self):
        q, k, v = qkv(70, 100)
        for options in ({"window_size": (2, 1)}, {"window_size": (2, 1), "causal": True}):
            for alignment in ("bottom_right", "top_left"):
                check(q, k, v, sink_tokens=40, alignment=alignment, **options)

    def test_a_bias_of_minus_infinity_hides_and_its_rows_may_be_empty(self):
        q, k, v = qkv(5, 40)
        bias = np.zeros((1, 1, 5, 40), np.float32)
        bias[..., 1, :] = bias[..., :, 33:] = -np.inf
        out, lse = answer(q, k, v, bias=bias)
        check_output(out, lse, q, k, v, bias=bias)
        assert (out[:, 1] == 0).all()
        assert np.isneginf(lse[..., 1]).all()

    def test_a_visible_nan_reaches_the_rows_that_see_it_and_no_others(self):
        for index in range(3):
            operands = qkv(70, 70)
            operands[index][0, 40, :, 3] = np.nan
            for options in ({"causal": True}, {"window_size": (3, 5)}):
                out, lse = answer(*operands, **options)
                check_output(out, lse, *operands, **options)
                assert np.isnan(out).any()
                assert np.isfinite(out[:, :35]).all()

    def test_infinite_values_and_scores_follow_ieee(self):
        q, k, v = qkv(4, 50)
        v[0, 45, 0, 2] = np.inf
        k[0, 3] = 1e30
        q[0, 2] = 1e30
        out, lse = answer(q, k, v)
        reference = attention_forward(q, k, v, accumulate="float32")
        np.testing.assert_array_equal(np.isnan(out), np.isnan(reference.out))
        np.testing.assert_array_equal(np.isinf(out), np.isinf(reference.out))
        np.testing.assert_array_equal(np.isnan(lse), np.isnan(reference.lse))

    @pytest.mark.parametrize("given", [("q",), ("k",), ("v",), ("q", "k", "v")])
    def test_each_fp8_descale_may_be_missing(self, given):
        q, k, v = qkv(20, 40, batch=2, heads=4, heads_kv=2, dtype="float8_e4m3fn")
        factors = {f"{name}_descale": np.abs(gaussian(9 + n, (2, 2))) for n, name in enumerate(given)}
        check(q, k, v, **factors)

    def test_a_sequence_longer_than_its_maximum_is_still_computed_whole(self):
        q, k, v = self.packed()
        problem = problem_of(q, k, v, **self.ENDS)
        operands = {"q": q, "k": k, "v": v, **self.ENDS}
        out, lse = run(dataclasses.replace(problem, seqlen_q=1, seqlen_k=1), operands)
        expected, expected_lse = run(problem, operands)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(lse, expected_lse)


class TestPrecision:
    @pytest.mark.parametrize("compute", ["tf32", "f16", "bf16"])
    def test_float32_inputs_compute_in_less_where_asked(self, compute):
        q, k, v = qkv(40, 100, dim=64)
        exact, _ = answer(q, k, v)
        out, lse = answer(q, k, v, compute=compute)
        check_output(out, lse, q, k, v, compute=compute)
        error = np.abs(out - exact).max()
        assert error > 1e-5, "nothing was rounded"

    def test_f16_keeps_the_range_of_float32(self):
        q, k, v = qkv(4, 40, dim=64)
        v *= 1e6
        out, lse = answer(q, k, v, compute="f16")
        assert np.isfinite(out).all()
        check_output(out, lse, q, k, v, compute="tf32")

    def test_lse_is_float32_and_exact_for_doubles(self):
        q, k, v = qkv(4, 40, dtype="float64")
        out, lse = answer(q, k, v)
        assert lse.dtype == np.float32
        reference = attention_forward(q, k, v)
        np.testing.assert_array_equal(lse, reference.lse.astype(np.float32))
        np.testing.assert_allclose(out, reference.out, rtol=0, atol=1e-14)


class TestAddressing:
    def test_a_transposed_padded_view_is_read_and_written_in_place(self):
        """(batch, heads, rows, dim) storage with NaN between rows, heads and sequences."""
        rows, keys, dim = 37, 70, 16

        def view(seed: int, length: int, heads: int) -> Strided:
            base = np.full((2, heads + 1, length + 2, dim + 3), np.nan, np.float32)
            array = base[:, 1:, 1 : length + 1, 2 : dim + 2].transpose(0, 2, 1, 3)
            array[...] = gaussian(seed, array.shape)
            return Strided(array, base)

        q, k, v, out = view(0, rows, 4), view(1, keys, 2), view(2, keys, 2), view(3, rows, 4)
        out.array[...] = np.nan
        problem = problem_of(q.array, k.array, v.array, causal=True)
        written, lse = run(problem, {"q": q, "k": k, "v": v, "out": out})
        check_output(written, lse, q.array, k.array, v.array, causal=True)
        assert np.isfinite(out.base).sum() == written.size, "only the view was written"

    @pytest.mark.parametrize("axis", [0, 1, 2])
    def test_offsets_past_32_bits_are_followed(self, axis):
        """Two halves of each tensor lie more than 2^32 elements apart; what lies between is not accessible."""
        shape = [2, 2, 2, 16]
        shape[axis] = 1
        arrays = {name: gaussian(n, (2, 2, 2, 16), "float16") for n, name in enumerate("qkv")}
        arrays["bias"] = gaussian(4, (2, 2, 2, 2), "float32")

        def memory_of(half: int) -> dict[str, EmulatedBuffer]:
            parts = {
                name: np.take(array, [half], BIAS_AXES[axis] if name == "bias" else axis)
                for name, array in arrays.items()
            }
            memory = {name: EmulatedBuffer.of(part, name) for name, part in parts.items()}
            memory["out"] = EmulatedBuffer(2 * int(np.prod(shape)), "out")
            memory["lse"] = EmulatedBuffer(4 * 4, "lse")
            return memory

        halves = far_halves(memory_of, apart=17 << 30)  # 2^32 elements of four bytes, and the extent of a half
        problem = problem_of(*(arrays[name] for name in "qkv"), bias=arrays["bias"])
        buffers = {name: far_buffer(name, axis, halves) for name in halves[0]}
        assert all(abs(max(buffer.strides, key=abs)) > 1 << 32 for buffer in buffers.values())
        key = key_of(problem)
        geometry = program_of(problem, key).parts[0].geometry
        module_of(kernel_source(key)).launch(
            "forward_simple",
            geometry.grid,
            geometry.block,
            geometry.shared_bytes,
            pack_forward(problem, buffers),
            [buffer for memory in halves for buffer in memory.values()],
        )
        out_shape = tuple(shape)
        out = np.concatenate([memory["out"].view(np.float16, out_shape) for memory in halves], axis)
        lse_axis = (0, 2, 1)[axis]
        lse_shape = tuple(1 if n == lse_axis else 2 for n in range(3))
        lse = np.concatenate([memory["lse"].view(np.float32, lse_shape) for memory in halves], lse_axis)
        check_output(out, lse, *(arrays[name] for name in "qkv"), bias=arrays["bias"])


# Where batch, rows and heads are in a bias (batch, heads, rows, keys) and in an LSE (batch, heads, rows).
BIAS_AXES = (0, 2, 1)


def far_buffer(name: str, axis: int, halves: list[dict[str, EmulatedBuffer]]) -> Buffer:
    """A tensor of extent 2 on every axis, whose halves along ``axis`` are two buffers."""
    low, high = (memory[name].address for memory in halves)
    dtype = "float32" if name in ("lse", "bias") else "float16"
    shape = {"bias": (2, 2, 2, 2), "lse": (2, 2, 2)}.get(name, (2, 2, 2, 16))
    split = BIAS_AXES[axis] if name in ("lse", "bias") else axis
    half = [1 if n == split else extent for n, extent in enumerate(shape)]
    strides = [int(np.prod(half[n + 1 :])) for n in range(len(half))]
    strides[split] = (high - low) // (4 if dtype == "float32" else 2)
    return Buffer(low, shape, tuple(strides), dtype)


class TestBatchInvariance:
    def test_a_dense_sequence_has_the_same_bits_alone_and_in_a_batch(self):
        q, k, v = qkv(70, 113, batch=3, heads=4, heads_kv=2, dim=40, dtype="bfloat16")
        out, lse = answer(q, k, v, causal=True)
        for index in range(3):
            alone, alone_lse = answer(*(x[index : index + 1] for x in (q, k, v)), causal=True)
            np.testing.assert_array_equal(alone[0], out[index])
            np.testing.assert_array_equal(alone_lse[0], lse[index])

    def test_a_packed_sequence_has_the_same_bits_alone_and_in_a_batch(self):
        ends_q, ends_k = np.array([0, 3, 70, 111], np.int32), np.array([0, 90, 95, 208], np.int32)
        q, k, v = (gaussian(n, (rows, 2, 40)) for n, rows in enumerate((111, 208, 208)))
        out, lse = answer(q, k, v, window_size=(20, 3), cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
        for index in range(3):
            rows, keys = slice(*ends_q[index : index + 2]), slice(*ends_k[index : index + 2])
            ends = {
                "cu_seqlens_q": np.array([0, rows.stop - rows.start], np.int32),
                "cu_seqlens_k": np.array([0, keys.stop - keys.start], np.int32),
            }
            alone, alone_lse = answer(q[rows], k[keys], v[keys], window_size=(20, 3), **ends)
            np.testing.assert_array_equal(alone, out[rows])
            np.testing.assert_array_equal(alone_lse, lse[:, rows])


def test_tf32_rounds_ties_as_the_conversion_instruction_does():
    case = random_forward(8)
    assert case.q.dtype == np.float32
    check_case(case, compute="tf32")
