"""The tolerance rule refuses defects of real attention kernels and accepts a correct one."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from cases.poison import nan_filled
from inside.reference import intermediate_dtype, rounder
from inside.testing import INPUT_KINDS, SEQLENS

from gpu_actors.errors import InvalidRequest
from gpu_actors.reference import ReferenceOutput, attention_forward, attention_forward_low, visible_keys
from gpu_actors.reference.tolerance import Bounds, assert_output_close, check_output, forward_bounds, row_bound
from gpu_actors.testing import ForwardCase, random_forward

Array = npt.NDArray[Any]
TILE = 16
COMPUTE = {"f16": "float16", "bf16": "bfloat16", "tf32": "tf32"}
LOG2_E = 1.4426950408889634


def tiled_attention(
    case: ForwardCase, defect: str = "", compute: str | None = None, weights_dtype: str | None = None
) -> tuple[Array, Array]:
    """Dense attention as a GPU kernel does it, in NumPy: tiles of 16 keys, online softmax in base 2, float32
    accumulators, P and O rounded to the input dtype (8-bit inputs: bfloat16). ``defect`` names one error to make,
    ``compute`` a dtype to round float32 inputs to, ``weights_dtype`` an 8-bit float for 256 P."""
    options = case.options
    dtype = intermediate_dtype(case.q.dtype.name) if compute is None else COMPUTE[compute]
    step = rounder(dtype)
    group = case.q.shape[2] // case.k.shape[2]
    q, k, v = (np.moveaxis(step(x.astype(np.float32)), 2, 1) for x in case.inputs)
    if defect == "kv head is the query head modulo their number":
        k, v = (np.tile(x, (1, group, 1, 1)) for x in (k, v))
    else:
        k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    if defect == "head_dim above 128 is truncated":
        q, k = q[..., :128], k[..., :128]
    seqlen_k = k.shape[2]
    scale = float(options.get("softmax_scale", case.q.shape[-1] ** -0.5))
    visible = tile_mask(case, defect)
    largest = np.full((*q.shape[:3], 1), -np.inf, np.float32)
    total, acc = np.zeros_like(largest), np.zeros((*q.shape[:3], v.shape[-1]), np.float32)
    stop = seqlen_k - seqlen_k % TILE if defect == "the tail of keys is skipped" else seqlen_k
    for start in range(0, stop, TILE):
        keys = slice(start, min(start + TILE, stop))
        scores = tile_scores(q, k[:, :, keys], scale, options, defect)
        scores = np.where(visible[:, keys], scores, np.float32(-np.inf))
        previous, largest = largest, np.maximum(largest, scores.max(axis=-1, keepdims=True))
        if defect == "the old maximum is read after it was overwritten":
            previous = largest
        shift = np.where(np.isneginf(largest), np.float32(0), largest)
        correction = np.where(np.isneginf(previous), np.float32(0), np.exp2(previous - shift))
        weights = np.exp2(scores - shift)
        if defect == "softmax is the identity":
            weights = np.where(visible[:, keys], scores, np.float32(0))
        total = total * correction + weights.sum(axis=-1, keepdims=True)
        if defect != "the accumulator is never rescaled":
            acc = acc * correction
        if weights_dtype is not None:
            weights = rounder(weights_dtype)(weights * np.float32(256)) / np.float32(256)
        weights = step(weights)
        if defect == "P is read from the wrong row":
            weights = np.roll(weights, 1, axis=2)
        acc = acc + weights @ v[:, :, keys]
    divisor = np.where(total == 0, np.float32(1), total)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = acc / (total if defect == "a row without keys divides by zero" else divisor)
        lse = largest / np.float32(LOG2_E) + np.log(total)
    lse = np.where(total == 0, -np.inf, lse)
    return np.moveaxis(step(out), 1, 2), lse[..., 0].astype(np.float32)


def tile_scores(q: Array, k: Array, scale: float, options: dict[str, Any], defect: str) -> Array:
    """Scores in base 2: scale * log2(e) * q k^T, capped."""
    if defect == "scores overflow float16":
        with np.errstate(over="ignore", invalid="ignore"):
            return (q @ k.swapaxes(-1, -2)).astype(np.float16).astype(np.float32) * np.float32(scale * LOG2_E)
    if defect == "the scale is missing":
        scale = 1.0
    if defect == "K is not transposed":
        scores = q @ k.reshape(*k.shape[:2], k.shape[3], k.shape[2])
    else:
        scores = q @ k.swapaxes(-1, -2)
    if (cap := options.get("softcap", 0.0)) and defect != "softcap is left out":
        return np.float32(cap * LOG2_E) * np.tanh(scores * np.float32(scale / cap))
    return scores * np.float32(scale * LOG2_E)


def tile_mask(case: ForwardCase, defect: str) -> Array:
    rows, (seqlen_q, seqlen_k) = np.arange(case.q.shape[1]), case.seqlens[0]
    mask: dict[str, Any] = {k: v for k, v in case.options.items() if k in ("causal", "window_size")}
    if defect == "causal holds by tile only":
        rows = rows // TILE * TILE + TILE - 1
    if defect == "top-left instead of bottom-right":
        mask["alignment"] = "top_left"
    if defect == "the window is one key too wide":
        left, right = mask["window_size"]
        mask["window_size"] = (left + 1, right)
    visible = visible_keys(rows, seqlen_q, seqlen_k, **mask)
    return np.ones((seqlen_q, seqlen_k), bool) if visible is None else visible


def finish(case: ForwardCase, defect: str, out: Array, lse: Array) -> tuple[Array, Array]:
    """Defects of the epilogue."""
    if defect == "max and sum are taken per thread":
        return per_thread_softmax(case), lse
    if defect == "half of the output is never stored":
        stored = nan_filled(out.shape, out.dtype.name)
        stored[..., : out.shape[-1] // 2] = out[..., : out.shape[-1] // 2]
        return stored, lse
    if defect == "the tail of rows is never stored":
        stored = nan_filled(out.shape, out.dtype.name)
        stored[:, : out.shape[1] // TILE * TILE] = out[:, : out.shape[1] // TILE * TILE]
        return stored, lse
    if defect == "heads are swapped":
        return out[:, :, ::-1], lse
    return out, lse


def per_thread_softmax(case: ForwardCase) -> Array:
    """Four threads share a row's keys, each with its own maximum and sum, which are not combined."""
    parts = [
        attention_forward(case.q, case.k[:, lane::4], case.v[:, lane::4], accumulate="float32").out for lane in range(4)
    ]
    return np.asarray(np.mean(parts, axis=0))


# The case that shows each defect. One entry for every wrong answer found in real attention kernels.
DEFECTS: dict[str, dict[str, Any]] = {
    "the old maximum is read after it was overwritten": {"kind": "rising"},
    "the accumulator is never rescaled": {"kind": "rising"},
    "max and sum are taken per thread": {"kind": "peaked"},
    "causal holds by tile only": {"always": ("causal",)},
    "the tail of keys is skipped": {"seqlens": (64, 77)},
    "the tail of rows is never stored": {"seqlens": (77, 64)},
    "top-left instead of bottom-right": {"always": ("causal",), "seqlens": (64, 96)},
    "P is read from the wrong row": {},
    "softmax is the identity": {},
    "K is not transposed": {"seqlens": (64, 64)},
    "head_dim above 128 is truncated": {"head_dim": 192},
    "half of the output is never stored": {},
    "a row without keys divides by zero": {"always": ("causal",), "seqlens": (48, 32)},
    "kv head is the query head modulo their number": {"heads": (6, 2)},
    "the window is one key too wide": {"always": ("window",), "seqlens": (64, 96)},
    "softcap is left out": {"always": ("softcap",), "kind": "peaked"},
    "the scale is missing": {},
    "heads are swapped": {},
}


def case_for(defect: str, dtype: str, seed: int = 0) -> ForwardCase:
    choices = {"kind": "gaussian", "seqlens": (64, 128), "head_dim": 64, "heads": (2, 2), "batch": 2}
    return random_forward(seed, dtype=dtype, varlen=False, features=(), **{**choices, **DEFECTS[defect]})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_refused_where_the_correct_kernel_passes(defect: str, dtype: str) -> None:
    case = case_for(defect, dtype)
    correct = tiled_attention(case)
    assert check_output(*correct, *case.inputs, repro=case.repro, **case.options) <= 1.0
    wrong = finish(case, defect, *tiled_attention(case, defect))
    with pytest.raises(AssertionError, match=r"^out is wrong in"):
        check_output(*wrong, *case.inputs, repro=case.repro, **case.options)


def test_scores_that_overflow_half_precision_are_refused() -> None:
    case = random_forward(0, dtype="float32", varlen=False, seqlens=(32, 64), head_dim=64, features=())
    case.q[...] *= 3000
    case.options["softmax_scale"] = 1e-4
    correct = tiled_attention(case, compute="f16")
    assert check_output(*correct, *case.inputs, compute="f16", **case.options) <= 1.0
    with np.errstate(invalid="ignore"):
        wrong = tiled_attention(case, "scores overflow float16", compute="f16")
    with pytest.raises(AssertionError, match="out is wrong in"):
        check_output(*wrong, *case.inputs, compute="f16", **case.options)


def check_correct_kernel(seed: int, dtype: str, kind: Any) -> None:
    features = ("causal", "window", "scale", "softcap")
    case = random_forward(
        seed, dtype=dtype, kind=kind, varlen=False, seqlens=SEQLENS[seed], batch=1, heads=(2, 1), features=features
    )
    out, lse = tiled_attention(case)
    assert check_output(out, lse, *case.inputs, repro=case.repro, **case.options) <= 1.0


DTYPES = ("bfloat16", "float16", "float32")


@pytest.mark.parametrize("seed", range(len(SEQLENS)))
def test_a_correct_kernel_passes(seed: int) -> None:
    check_correct_kernel(seed, DTYPES[seed % 3], INPUT_KINDS[seed % len(INPUT_KINDS)])


@pytest.mark.sweep
@pytest.mark.parametrize("kind", INPUT_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(len(SEQLENS)))
def test_a_correct_kernel_passes_on_the_whole_grid_with_every_kind(seed: int, dtype: str, kind: Any) -> None:
    check_correct_kernel(seed, dtype, kind)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("seed", range(4))
def test_every_option_and_layout_has_bounds_that_single_precision_meets(seed: int, dtype: str) -> None:
    case = random_forward(seed, dtype=dtype, seqlens=SEQLENS[seed % 10], head_dim=40, alignment="top_left")
    accumulate: Any = "float64" if dtype == "float64" else "float32"
    result = attention_forward(*case.inputs, **case.options, accumulate=accumulate)
    out = result.out.astype(ml_dtypes.bfloat16 if dtype.startswith("float8") else case.q.dtype)
    assert check_output(out, result.lse, *case.inputs, repro=case.repro, **case.options) <= 1.0


@pytest.mark.parametrize(
    ("compute", "kind"), [*(("tf32", kind) for kind in INPUT_KINDS), ("f16", "gaussian"), ("bf16", "peaked")]
)
def test_reduced_compute_passes_only_where_it_was_asked_for(compute: str, kind: Any) -> None:
    case = random_forward(
        2, dtype="float32", kind=kind, varlen=False, seqlens=(64, 128), head_dim=64, features=("causal",)
    )
    out, lse = tiled_attention(case, compute=compute)
    assert check_output(out, lse, *case.inputs, compute=compute, repro=case.repro, **case.options) <= 1.0
    with pytest.raises(AssertionError, match="out is wrong in"):
        check_output(out, None, *case.inputs, repro=case.repro, **case.options)


@pytest.mark.parametrize(
    ("weights_dtype", "kind"), [*(("float8_e4m3fn", kind) for kind in INPUT_KINDS), ("float8_e5m2", "gaussian")]
)
def test_eight_bit_weights_pass_only_where_they_were_announced(weights_dtype: str, kind: Any) -> None:
    case = random_forward(
        4, dtype="float8_e4m3fn", kind=kind, varlen=False, seqlens=(113, 203), head_dim=64, features=("causal",)
    )
    out, lse = tiled_attention(case, weights_dtype=weights_dtype)
    arguments: dict[str, Any] = {"repro": case.repro, **case.options}
    assert check_output(out, lse, *case.inputs, weights_dtype=weights_dtype, **arguments) <= 1.0
    if kind == "gaussian":
        with pytest.raises(AssertionError, match="out is wrong in"):
            check_output(out, lse, *case.inputs, **arguments)
    wrong = tiled_attention(case, "P is read from the wrong row", weights_dtype=weights_dtype)
    with pytest.raises(AssertionError, match="out is wrong in"):
        check_output(*wrong, *case.inputs, weights_dtype=weights_dtype, **arguments)


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_on_eight_bit_weights_is_their_root_mean_square(seed: int) -> None:
    always = [("softcap",), ("sinks", "bias"), ("alibi", "window"), ("dropout",), ("descales",), ("scale", "causal")]
    case = random_forward(
        seed, dtype="float8_e4m3fn", varlen=False, seqlens=(6, 9), head_dim=8, features=(), always=always[seed]
    )
    exact = attention_forward(*case.inputs, **case.options, with_magnitude=True)
    plain = forward_bounds(*case.inputs, **case.options).out
    with_weights = forward_bounds(*case.inputs, weights_dtype="float8_e4m3fn", **case.options).out
    # One key at a time: its weight times its value is the output if all other values are zero.
    variance = np.zeros_like(exact.out)
    for j in range(9):
        alone = np.zeros_like(case.v)
        alone[:, j] = case.v[:, j]
        variance += attention_forward(case.q, case.k, alone, **case.options).out ** 2
    assert exact.magnitude is not None
    floor = 2.0**-8 * (exact.magnitude + np.abs(exact.out)) + 2.5 / 16 * np.sqrt(variance)
    assert np.all(with_weights >= floor * (1 - 1e-9))
    low = attention_forward_low(*case.inputs, weights_dtype="float8_e4m3fn", **case.options).out
    rows = row_bound(exact.out, low, "bfloat16", 3.0 if "softcap" in case.options else 2.0)
    np.testing.assert_allclose(with_weights, np.maximum(floor, rows), rtol=1e-9)
    assert np.median(with_weights) > 1.5 * np.median(plain)


# The rule, number by number


def test_the_row_bound_is_twice_the_low_precision_error_plus_twice_the_shift() -> None:
    reference = np.array([[0.1, 1.0, -2.0], [0.0, 0.5, 0.25]])
    low = reference + np.array([[0.0, -0.125, 0.0625], [0.0, 0.0, np.inf]])
    bf16 = ml_dtypes.bfloat16
    shifts = []
    for row in reference:
        rounded = [bf16(x) for x in row]
        back = [bf16(float(bf16(float(x) + 0.3)) - 0.3) for x in rounded]
        shifts.append(max(abs(float(y) - float(x)) for x, y in zip(rounded, back, strict=True)))
    assert min(shifts) > 0
    for factor in (2.0, 3.0):
        expected = [[factor * 0.125 + 2 * shifts[0]], [2 * shifts[1]]]
        assert row_bound(reference, low, "bfloat16", factor).tolist() == expected
    assert row_bound(reference, low, "float64", 2.0).tolist() == [[0.25], [0.0]]


@pytest.mark.parametrize(("dtype", "u"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_the_rounding_bound_holds_where_low_precision_makes_no_error(dtype: str, u: float) -> None:
    case = random_forward(1, dtype=dtype, varlen=False, seqlens=(4, 1), head_dim=40, features=(), heads=(6, 6))
    bounds = forward_bounds(*case.inputs)
    value = np.abs(np.broadcast_to(case.v.astype(np.float64), bounds.out.shape))
    shift = row_bound(value, value, dtype, 2.0)
    assert np.all(bounds.out >= u * 2 * value)
    assert np.all(bounds.out <= np.maximum(u * 2 * value, 2 * shift + 2.0**-9))
    assert np.all(bounds.lse == 1e-3)


def test_softcap_allows_three_times_the_low_precision_error() -> None:
    case = random_forward(1, dtype="bfloat16", varlen=False, seqlens=(9, 20), head_dim=40, features=(), kind="peaked")
    options: dict[str, Any] = {"softcap": 20.0}
    reference = attention_forward(*case.inputs, **options, with_magnitude=True)
    low = attention_forward_low(*case.inputs, **options).out
    expected = row_bound(reference.out, low, "bfloat16", 3.0)
    bounds = forward_bounds(*case.inputs, reference=reference, **options)
    floor = 2.0**-8 * (reference.magnitude + np.abs(reference.out))
    assert np.array_equal(bounds.out, np.maximum(expected, floor))


def correct_output() -> tuple[ForwardCase, Array, Array, tuple[ReferenceOutput, Bounds]]:
    case = random_forward(
        11, dtype="bfloat16", varlen=False, seqlens=(20, 12), head_dim=8, features=("causal",), always=("causal",)
    )
    reference = attention_forward(*case.inputs, **case.options, with_magnitude=True)
    bounds = forward_bounds(*case.inputs, reference=reference, **case.options)
    return case, reference.out.astype(np.float32), reference.lse.astype(np.float32), (reference, bounds)


def test_a_failure_names_the_worst_row_its_error_the_bound_and_the_repro() -> None:
    case, out, lse, known = correct_output()
    assert assert_output_close(out, lse, *known, case.repro) < 0.01
    out[0, 13, 2, 5] += 1.0
    out[0, 14, 2, 5] += 0.5
    with pytest.raises(AssertionError) as failure:
        assert_output_close(out, lse, *known, case.repro)
    message = str(failure.value)
    assert f"out is wrong in 2 of {out[..., 0].size} rows" in message
    assert "row (0, 13, 2), element 5" in message
    assert "an error of 1 where" in message
    assert message.endswith(case.repro)


@pytest.mark.parametrize(("before", "after"), [(0.0, np.nan), (-np.inf, -1e30), (-np.inf, np.nan), (1.0, 1.0011)])
def test_the_lse_is_held_to_a_thousandth_and_to_its_infinities(before: float, after: float) -> None:
    case, out, lse, known = correct_output()
    assert np.isneginf(lse[0, 0, 0])
    if np.isneginf(before):
        lse[0, 0, 0] = after
    else:
        lse[0, 0, 15] += after - before
    with pytest.raises(AssertionError, match="lse is wrong in 1 of"):
        assert_output_close(out, lse, *known, case.repro)


def test_an_element_that_was_not_written_shows() -> None:
    case, out, lse, known = correct_output()
    unwritten = nan_filled(out.shape, "bfloat16")
    unwritten[:, :, :, 1:] = out[:, :, :, 1:].astype(ml_dtypes.bfloat16)
    with pytest.raises(AssertionError, match="element 0: nan instead of"):
        assert_output_close(unwritten, lse, *known, case.repro)


def test_nan_is_expected_where_the_oracle_has_it_and_nowhere_else() -> None:
    case, *_ = correct_output()
    case.v[0, 3, 0, 0] = np.nan
    reference = attention_forward(*case.inputs, **case.options, with_magnitude=True)
    bounds = forward_bounds(*case.inputs, reference=reference, **case.options)
    assert np.isnan(reference.out).any()
    assert assert_output_close(reference.out, None, reference, bounds, case.repro) == 0.0
    with pytest.raises(AssertionError, match="instead of nan"):
        assert_output_close(np.nan_to_num(reference.out), None, reference, bounds, case.repro)


def test_an_output_of_another_shape_is_refused() -> None:
    _, out, lse, known = correct_output()
    with pytest.raises(AssertionError, match="out has shape"):
        assert_output_close(out[:, :-1], lse, *known)
    with pytest.raises(AssertionError, match="lse has shape"):
        assert_output_close(out, lse.swapaxes(1, 2), *known)


def test_descales_have_no_single_precision_bounds() -> None:
    case = random_forward(0, dtype="float32", varlen=False, batch=1, heads=(6, 6), seqlens=(4, 4), features=())
    with pytest.raises(InvalidRequest, match="k_descale"):
        forward_bounds(*case.inputs, k_descale=np.ones((1, 6), np.float32))


def e4m3_row(size: float) -> tuple[Array, Array, Array]:
    """One row whose score with the first of two keys is ``size`` at head dim 64, and 0 with the other."""
    q = np.zeros((1, 1, 1, 64), ml_dtypes.float8_e4m3fn)
    k = np.zeros((1, 2, 1, 64), ml_dtypes.float8_e4m3fn)
    q[..., :16], k[:, 0, :, :16] = 4.0, size * 8.0 / 64.0
    return q, k, np.ones((1, 2, 1, 64), ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(("size", "allowed"), [(1.0, 1.5e-3), (8.0, 1e-2), (64.0, 8e-2)])
def test_scores_of_eight_bit_products_may_be_cut_off_but_not_wrong(size: float, allowed: float) -> None:
    """The bits that Hopper's tensor cores cut off grow with the score; a larger error of the LSE is refused."""
    q, k, v = e4m3_row(size)
    reference = attention_forward(q, k, v)
    bounds = forward_bounds(q, k, v, weights_dtype="float8_e4m3fn", reference=reference)
    bound = float(np.max(bounds.lse))
    assert 1e-3 <= bound <= allowed
    assert_output_close(reference.out, reference.lse + 0.9 * bound, reference, bounds)
    with pytest.raises(AssertionError, match="lse is wrong"):
        assert_output_close(reference.out, reference.lse + 1.1 * bound, reference, bounds)


def test_scores_of_sixteen_bit_products_keep_the_whole_rule() -> None:
    q, k, v = (array.astype(ml_dtypes.bfloat16) for array in e4m3_row(64.0))
    assert forward_bounds(q, k, v, reference=attention_forward(q, k, v)).lse == 1e-3


def test_an_lse_may_be_off_by_what_float32_cannot_hold_of_it() -> None:
    """A large number hides all keys of a row."""
    case = random_forward(1, dtype="float16", varlen=False, seqlens=(1, 9), head_dim=40, features=(), heads=(6, 6))
    bounds = forward_bounds(*case.inputs, bias=np.full((1, 1, 1, 9), -1e9, np.float32))
    np.testing.assert_allclose(bounds.lse, 1e9 * 2.0**-22, rtol=1e-6)
