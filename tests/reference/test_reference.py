"""The oracle against a second, slower implementation of its formulas, and against laws of attention."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from cases.poison import poison_tail, poison_unseen
from inside.attention import philox4x32
from inside.testing import INPUT_KINDS

from gpu_actors.errors import InvalidRequest
from gpu_actors.reference import attention_forward, attention_forward_low, forward
from gpu_actors.reference.low_precision import rounder
from gpu_actors.testing import ForwardCase, random_forward

Array = npt.NDArray[Any]
SMALL = [(1, 1), (5, 9), (9, 5), (7, 7), (6, 1), (8, 13), (1, 17), (3, 0), (0, 4)]


def naive_sequence(q: Array, k: Array, v: Array, b: int, options: dict[str, Any]) -> tuple[Array, Array, Array]:
    """One sequence, one probability at a time, in Python floats: q (Sq, H, D), k and v (Sk, Hk, D)."""
    (seqlen_q, heads, dim), (seqlen_k, heads_kv, dim_v) = q.shape, v.shape
    out, magnitude = np.zeros((2, seqlen_q, heads, dim_v))
    lse = np.zeros((heads, seqlen_q))
    scale = options.get("softmax_scale") or 1 / math.sqrt(dim)
    descale = {name: options.get(f"{name}_descale") for name in "qkv"}
    sinks, threshold = options.get("sinks"), round(options.get("dropout_p", 0.0) * 2**32)
    seed = options.get("dropout_seed", 0)
    for h in range(heads):
        g = h * heads_kv // heads
        factors = {name: 1.0 if d is None else float(d[b, g]) for name, d in descale.items()}
        for i in range(seqlen_q):
            logits: dict[int, float] = {}
            for j in range(seqlen_k):
                if not naive_visible(i, j, seqlen_q, seqlen_k, options):
                    continue
                terms = zip(q[i, h].tolist(), k[j, g].tolist(), strict=True)
                score = scale * factors["q"] * factors["k"] * math.fsum(x * y for x, y in terms)
                logits[j] = naive_bend(score, b, h, i, j, seqlen_q, seqlen_k, options)
            everything = [*logits.values(), *([float(sinks[h])] if sinks is not None else [])]
            if not everything:
                lse[h, i] = -math.inf
                continue
            top = max(everything)
            lse[h, i] = top + math.log(math.fsum(math.exp(s - top) for s in everything))
            for j, logit in logits.items():
                p = math.exp(logit - lse[h, i])
                if threshold:
                    words = philox4x32((j // 4, i, b * heads + h, 0), (seed % 2**32, seed // 2**32))
                    p = p / (1 - options["dropout_p"]) if int(words[j % 4]) >= threshold else 0.0
                value = v[j, g].astype(np.float64) * factors["v"]
                out[i, h] += p * value
                magnitude[i, h] += p * np.abs(value)
    return out, lse, magnitude


def naive_visible(i: int, j: int, seqlen_q: int, seqlen_k: int, options: dict[str, Any]) -> bool:
    """Visibility by distances from the last row and key; the oracle compares key indices."""
    if options.get("alignment", "bottom_right") == "bottom_right":
        ahead = (seqlen_q - 1 - i) - (seqlen_k - 1 - j)
    else:
        ahead = j - i
    if options.get("causal") and ahead > 0:
        return False
    if j < options.get("sink_tokens", 0):
        return True
    left, right = options.get("window_size", (-1, -1))
    return not (0 <= left < -ahead or 0 <= right < ahead)


def naive_bend(
    score: float, b: int, h: int, i: int, j: int, seqlen_q: int, seqlen_k: int, options: dict[str, Any]
) -> float:
    """Softcap, ALiBi and bias."""
    if cap := options.get("softcap", 0.0):
        score = cap * math.tanh(score / cap)
    if (slopes := options.get("alibi_slopes")) is not None:
        slope = float(slopes[h] if slopes.ndim == 1 else slopes[b, h])
        offset = seqlen_k - seqlen_q if options.get("alignment", "bottom_right") == "bottom_right" else 0
        score -= slope * abs(i + offset - j)
    if (bias := options.get("bias")) is not None:
        score += float(bias[b % len(bias), h % bias.shape[1], i, j])
    return score


def naive_forward(case: ForwardCase) -> tuple[Array, Array, Array]:
    """Every sequence of a case, joined in the case's layout."""
    parts = []
    row = key = 0
    for b, (rows, keys) in enumerate(case.seqlens):
        if "cu_seqlens_q" in case.options:
            q, k, v = case.q[row : row + rows], case.k[key : key + keys], case.v[key : key + keys]
        else:
            q, k, v = case.q[b], case.k[b], case.v[b]
        parts.append(naive_sequence(q, k, v, b, case.options))
        row, key = row + rows, key + keys
    out, lse, magnitude = (list(part) for part in zip(*parts, strict=True))
    if "cu_seqlens_q" in case.options:
        return np.concatenate(out), np.concatenate(lse, axis=1), np.concatenate(magnitude)
    return np.stack(out), np.stack(lse), np.stack(magnitude)


def assert_same(actual: Array, expected: Array, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", range(60))
def test_every_option_agrees_with_a_loop_over_probabilities(seed: int) -> None:
    alignment = (None, "bottom_right", "top_left")[seed % 3]
    dtype = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")[seed % 6]
    case = random_forward(
        seed,
        dtype=dtype,
        seqlens=SMALL[seed % 9],
        head_dim=(3, 4, 8)[seed % 3],
        head_dim_v=2 + seed % 3,
        alignment=alignment,
    )
    expected = naive_forward(case)
    actual = attention_forward(*case.inputs, **case.options, with_magnitude=True)
    assert actual.magnitude is not None
    for got, want in zip((actual.out, actual.lse, actual.magnitude), expected, strict=True):
        assert got.dtype == np.float64
        assert_same(got, want)


def test_the_loop_met_every_option_and_every_kind_of_input() -> None:
    cases = [random_forward(s, dtype="float8_e4m3fn", seqlens=(2, 2), head_dim=2) for s in range(60)]
    met = {name for case in cases for name in case.options} | {case.kind for case in cases}
    wanted = {"causal", "window_size", "sink_tokens", "softmax_scale", "softcap", "alibi_slopes", "sinks", "bias"}
    assert met >= wanted | {"dropout_p", "q_descale", "cu_seqlens_q", *INPUT_KINDS}


@pytest.mark.parametrize("seed", range(4))
def test_tiles_of_any_size_give_the_same_result(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_forward(seed, dtype="float32", seqlens=(40, 33), head_dim=8, batch=3)
    whole = attention_forward(*case.inputs, **case.options)
    for size in (1, 3000, 40_000):
        monkeypatch.setattr(forward, "_BLOCK_BYTES", size)
        tiled = attention_forward(*case.inputs, **case.options)
        assert_same(tiled.out, whole.out)
        assert_same(tiled.lse, whole.lse)


# Absent rows and keys


def three_by_two() -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(1, 3, 2, 4)), rng.normal(size=(1, 2, 2, 4)), rng.normal(size=(1, 2, 2, 4))


@pytest.mark.parametrize("sink", [-2000.0, 2000.0])
def test_a_sink_far_from_the_scores_neither_overflows_nor_vanishes(sink: float) -> None:
    q, k, v = three_by_two()
    result = attention_forward(q, k, v, sinks=np.array([sink, sink]))
    plain = attention_forward(q, k, v)
    if sink > 0:
        assert np.all(result.out == 0)
        assert np.all(result.lse == sink)
    else:
        assert np.array_equal(result.out, plain.out)
        assert np.array_equal(result.lse, plain.lse)


def test_a_bias_of_minus_infinity_hides_a_key() -> None:
    q, k, v = three_by_two()
    bias = np.zeros((1, 1, 3, 2))
    bias[..., 1] = -np.inf
    hidden = attention_forward(q, k, v, bias=bias)
    alone = attention_forward(q, k[:, :1], v[:, :1])
    assert_same(hidden.out, alone.out)
    bias[..., 0] = -np.inf
    nothing = attention_forward(q, k, v, bias=bias)
    assert np.all(nothing.out == 0)
    assert np.all(nothing.lse == -np.inf)


def test_packed_rows_past_the_last_sequence_are_rows_without_keys() -> None:
    case = random_forward(3, varlen=True, dtype="bfloat16", seqlens=(7, 9), head_dim=8)
    whole = attention_forward(*case.inputs, **case.options)
    padded = attention_forward(*(poison_tail(array, 5) for array in case.inputs), **case.options)
    assert np.array_equal(padded.out[:-5], whole.out)
    assert np.array_equal(padded.lse[:, :-5], whole.lse)
    assert np.all(padded.out[-5:] == 0)
    assert np.all(padded.lse[:, -5:] == -np.inf)


# NaN and infinities


@pytest.mark.parametrize("seed", range(6))
def test_poison_that_no_row_sees_changes_no_bit(seed: int) -> None:
    alignment = ("bottom_right", "top_left")[seed % 2]
    seqlens = ((5, 14), (14, 5))[seed % 2]
    case = random_forward(seed, seqlens=seqlens, head_dim=8, always=("causal", "window"), alignment=alignment)
    poisoned = poison_unseen(case)
    assert np.isnan(poisoned.k.astype(np.float32)).any() == np.isnan(poisoned.v.astype(np.float32)).any()
    clean = attention_forward(*case.inputs, **case.options, with_magnitude=True)
    result = attention_forward(*poisoned.inputs, **poisoned.options, with_magnitude=True)
    assert np.array_equal(result.out, clean.out)
    assert np.array_equal(result.lse, clean.lse)


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_special_value_reaches_exactly_the_rows_that_see_it(which: str, value: float) -> None:
    rng = np.random.default_rng(1)
    q, k, v = rng.normal(size=(3, 1, 9, 2, 4))
    clean = attention_forward(q, k, v, causal=True)
    spoiled = {"k": k.copy(), "v": v.copy()}
    spoiled[which][0, 4, 1, 2] = value
    result = attention_forward(q, spoiled["k"], spoiled["v"], causal=True)
    assert np.array_equal(result.out[:, :4], clean.out[:, :4])
    assert np.array_equal(result.out[:, :, 0], clean.out[:, :, 0])
    assert np.array_equal(result.lse[:, :, :4], clean.lse[:, :, :4])
    if which == "v":
        assert np.array_equal(result.out[0, 4:, 1, 2], np.full(5, value), equal_nan=True)
        assert np.array_equal(result.out[..., 3], clean.out[..., 3])
    elif np.isnan(value):
        assert np.all(np.isnan(result.out[0, 4:, 1]))
        assert np.all(np.isnan(result.lse[0, 1, 4:]))
    else:
        # A score of +inf makes its row NaN, by IEEE's rules; one of -inf is a key without weight.
        up = q[0, 4:, 1, 2] * value > 0
        assert np.array_equal(np.isnan(result.lse[0, 1, 4:]), up)
        assert np.array_equal(np.isnan(result.out[0, 4:, 1]).all(axis=-1), up)


def test_opposite_infinities_and_dead_weights_are_nan() -> None:
    q, k = np.zeros((1, 2, 1, 1)), np.zeros((1, 3, 1, 1))
    v = np.array([np.inf, 1.0, -np.inf]).reshape(1, 3, 1, 1)
    assert np.isnan(attention_forward(q, k, v).out).all()
    assert attention_forward(q, k, v, window_size=(1, 1), alignment="top_left").out[0, 0, 0, 0] == np.inf
    k[0, 0] = -1e4
    q += 1.0
    assert np.isnan(attention_forward(q, k, v, window_size=(1, 0)).out[0, 0]).all()


def test_a_dropped_row_of_nan_stays_nan() -> None:
    q, k, v = three_by_two()
    q[0, 1] = np.nan
    result = attention_forward(q, k, v, dropout_p=0.999999, dropout_seed=1)
    assert np.isnan(result.out[0, 1]).all()
    assert not np.isnan(result.out[0, [0, 2]]).any()


# The same formula in low precision


@pytest.mark.parametrize("seqlens", [(1, 1), (64, 128), (239, 1), (113, 203)])
def test_float32_accumulation_is_float64_to_single_precision(seqlens: tuple[int, int]) -> None:
    case = random_forward(seqlens[0], dtype="float32", seqlens=seqlens, head_dim=40, batch=1, kind="gaussian")
    double = attention_forward(*case.inputs, **case.options)
    single = attention_forward(*case.inputs, **case.options, accumulate="float32")
    assert single.out.dtype == single.lse.dtype == np.float32
    assert_same(single.out, double.out, 2e-5)
    assert_same(single.lse, double.lse, 2e-5)


def test_low_precision_results_lie_on_the_dtypes_grid() -> None:
    for dtype in ("bfloat16", "float16"):
        case = random_forward(5, dtype=dtype, seqlens=(40, 50), head_dim=16, kind="gaussian")
        low = attention_forward_low(*case.inputs, **case.options).out
        assert np.array_equal(low, low.astype(case.q.dtype).astype(np.float32))
        exact = attention_forward(*case.inputs, **case.options).out
        error = np.abs(low - exact).max()
        assert 2.0**-14 < error < 0.05


def test_low_precision_rounds_probabilities_before_they_meet_the_values() -> None:
    bf16 = ml_dtypes.bfloat16
    q, k = np.ones((1, 1, 1, 1), bf16), np.array([0.01, 0.0], bf16).reshape(1, 2, 1, 1)
    v = np.array([1.0, -1.0], bf16).reshape(1, 2, 1, 1)
    share = 1 / (1 + math.exp(-float(k[0, 0, 0, 0])))
    expected = float(bf16(share)) - float(bf16(1 - share))
    assert attention_forward_low(q, k, v).out.item() == expected
    assert abs(attention_forward(q, k, v).out.item() - (2 * share - 1)) < 1e-15
    assert abs(expected - (2 * share - 1)) > 5e-4


def test_low_precision_of_double_is_the_oracle() -> None:
    case = random_forward(6, dtype="float64", seqlens=(20, 30), head_dim=8)
    low = attention_forward_low(*case.inputs, **case.options)
    exact = attention_forward(*case.inputs, **case.options)
    assert_same(low.out, exact.out)
    assert_same(low.lse, exact.lse)


def test_tf32_keeps_eleven_significant_bits_and_rounds_ties_away() -> None:
    given = np.array([1 + 2**-11, 1 + 2**-12, -1 - 2**-11, 3 + 2**-10, 2.0**-130, np.inf, -np.inf, np.nan, 0.0])
    expected = [1 + 2**-10, 1.0, -1 - 2**-10, 3 + 2**-9, 2.0**-130, np.inf, -np.inf, np.nan, 0.0]
    for dtype in (np.float32, np.float64):
        rounded = rounder("tf32")(given.astype(dtype))
        assert rounded.dtype == dtype
        assert np.array_equal(rounded, np.array(expected), equal_nan=True)


def test_eight_bit_inputs_have_bfloat16_intermediates() -> None:
    case = random_forward(
        7, dtype="float8_e4m3fn", varlen=False, seqlens=(20, 30), head_dim=8, features=(), kind="gaussian"
    )
    low = attention_forward_low(*case.inputs, **case.options).out
    assert np.array_equal(low, low.astype(ml_dtypes.bfloat16).astype(np.float32))
    coarse = attention_forward_low(*case.inputs, weights_dtype="float8_e4m3fn", dropout_p=0.5).out
    fine = attention_forward_low(*case.inputs, dropout_p=0.5).out
    exact = attention_forward(*case.inputs, dropout_p=0.5).out
    assert np.abs(coarse - exact).mean() > 3 * np.abs(fine - exact).mean()


# Refusals

PACKED = {name: np.zeros((6, 2, 4)) for name in "qkv"} | {f"cu_seqlens_{side}": [0, 2, 6] for side in "qk"}
DENSE = {"q": np.zeros((2, 3, 4, 8)), "k": np.zeros((2, 5, 2, 8)), "v": np.zeros((2, 5, 2, 6))}
REFUSED: list[tuple[dict[str, Any], str, Any]] = [
    *((DENSE, "q", np.zeros((3, 4, 8))), (DENSE, "k", np.zeros((2, 5, 2, 7))), (DENSE, "v", np.zeros((2, 4, 2, 6)))),
    ({**DENSE, "v": np.zeros((1, 5, 2, 6))}, "k", np.zeros((1, 5, 2, 8))),
    ({**DENSE, "v": np.zeros((2, 5, 3, 6))}, "k", np.zeros((2, 5, 3, 8))),
    *((DENSE, "alignment", "middle"), (DENSE, "window_size", (-2, 0)), (DENSE, "softcap", -1.0)),
    *((DENSE, "sink_tokens", -1), (DENSE, "dropout_p", 1.0), ({**DENSE, "dropout_p": 0.5}, "dropout_seed", -1)),
    *((DENSE, "sinks", np.zeros(2)), (DENSE, "alibi_slopes", np.zeros((3, 4)))),
    *((DENSE, "bias", np.zeros((2, 2, 3, 5))), (DENSE, "k_descale", np.zeros((2, 4)))),
    *((PACKED, "cu_seqlens_k", None), (PACKED, "cu_seqlens_k", [0, 6]), (PACKED, "cu_seqlens_k", [0, 2, 7])),
    *((PACKED, "cu_seqlens_q", [1, 2, 6]), (PACKED, "cu_seqlens_q", [0, 4, 2])),
    *((PACKED, "cu_seqlens_q", [0.0, 2.0, 6.0]), (PACKED, "bias", np.zeros((2, 2, 3, 4)))),
    *((PACKED, "cu_seqlens_k", [0, 2, 2**32]), (PACKED, "v", np.zeros((7, 2, 4)))),
    # Requests refuse these too
    *((DENSE, "softmax_scale", math.nan), (DENSE, "softcap", math.inf), (DENSE, "dropout_seed", 1 << 64)),
    *((DENSE, "dropout_p", 1 - 2**-40), (DENSE, "dropout_first_head", 1), (DENSE, "alibi_signed", "yes")),
    *((DENSE, "attention_chunk", -1), (DENSE, "causal", 1), (DENSE, "v", np.zeros((2, 5, 2, 0)))),
    *((DENSE, "q_positions", np.zeros(3)), (DENSE, "k_positions", np.zeros((2, 3))), (DENSE, "tree_mask", np.zeros(2))),
    *((DENSE, "q_descale", np.zeros((2, 2, 1))), (DENSE, "v_descale", np.zeros(2))),
]


def test_arguments_that_contradict_each_other_are_refused_by_name() -> None:
    for sound, field, value in REFUSED:
        given = {**sound, field: value}
        ends = {name: np.array(given[name]) for name in ("cu_seqlens_q", "cu_seqlens_k") if given.get(name)}
        with pytest.raises(InvalidRequest) as refusal:
            attention_forward(**{**given, **ends})
        assert refusal.value.field == field, value
    with pytest.raises(TypeError, match="return_lse"):
        attention_forward(**DENSE, return_lse=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rounding_to_float16_gives_what_numpy_gives(dtype: str) -> None:
    """Also halfway between subnormal numbers, at the ends of both ranges, and for NaN."""
    halfway = (np.arange(4096) + 0.5) * 2.0**-25
    ends = np.array([0, 2.0**-26, 2.0**-25, 2.0**-14, 65519.99, 65520, np.inf, np.nan, 1e-30, 1e30])
    values = np.concatenate([halfway, np.nextafter(halfway, 1), np.nextafter(halfway, 0), ends]).astype(dtype)
    for given in (values, -values):
        with np.errstate(all="ignore"):
            wanted = given.astype(np.float16).astype(dtype)
        rounded = rounder("float16")(given)
        assert rounded.dtype == dtype
        np.testing.assert_array_equal(rounded, wanted)
        np.testing.assert_array_equal(np.signbit(rounded[:-4]), np.signbit(wanted[:-4]))
