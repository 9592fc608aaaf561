"""The oracle against a second, slower reading of its formulas, and against what holds of any attention."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_actors.errors import InvalidRequest
from gpu_actors.philox import philox4x32
from gpu_actors.reference import attention_forward, attention_forward_low, forward
from gpu_actors.testing.problems import (
    INPUT_KINDS,
    SEQLENS,
    ForwardCase,
    poison_tail,
    poison_unseen,
    random_forward,
)

Array = npt.NDArray[Any]
SMALL = [(1, 1), (5, 9), (9, 5), (7, 7), (6, 1), (8, 13), (1, 17), (3, 0), (0, 4)]


def naive_sequence(
    q: Array, k: Array, v: Array, b: int, options: dict[str, Any]
) -> tuple[Array, Array, Array]:
    """One sequence, one probability at a time, on Python floats: q (Sq, H, D), k and v (Sk, Hk, D)."""
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
    """Spelled as distances from the last row and key, where the oracle compares key indices."""
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
    """Every sequence of a case, put together in the case's layout."""
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
    wanted = {
        "causal",
        "window_size",
        "sink_tokens",
        "softmax_scale",
        "softcap",
        "alibi_slopes",
        "sinks",
        "bias",
    }
    assert met >= wanted | {"dropout_p", "q_descale", "cu_seqlens_q", *INPUT_KINDS}


# What holds of any attention


def draw_case(seed: int, **choices: Any) -> ForwardCase:
    rng = np.random.default_rng(seed)
    seqlens = (int(rng.integers(1, 12)), int(rng.integers(1, 24)))
    return random_forward(seed, **{"dtype": "float64", "seqlens": seqlens, "head_dim": 5, **choices})


seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_an_output_lies_between_the_smallest_and_largest_value(seed: int) -> None:
    case = draw_case(
        seed, features=("causal", "window", "softcap", "alibi", "sinks", "bias"), always=("sinks",)
    )
    result = attention_forward(*case.inputs, **case.options)
    low, high = min(case.v.min(initial=0), 0), max(case.v.max(initial=0), 0)
    assert result.out.min() >= low - 1e-12
    assert result.out.max() <= high + 1e-12


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_the_order_of_keys_is_immaterial_without_a_mask(seed: int) -> None:
    case = draw_case(seed, varlen=False, features=("softcap", "sinks", "scale"))
    order = np.random.default_rng(seed).permutation(case.k.shape[1])
    straight = attention_forward(*case.inputs, **case.options)
    shuffled = attention_forward(case.q, case.k[:, order], case.v[:, order], **case.options)
    assert_same(shuffled.out, straight.out)
    assert_same(shuffled.lse, straight.lse)


@settings(max_examples=40, deadline=None)
@given(seeds, st.floats(-300, 300))
def test_a_constant_added_to_every_score_moves_only_the_lse(seed: int, constant: float) -> None:
    case = draw_case(seed, varlen=False, features=("causal", "window", "softcap", "alibi"), always=("bias",))
    straight = attention_forward(*case.inputs, **case.options)
    case.options["bias"] = case.options["bias"].astype(np.float64) + constant
    shifted = attention_forward(*case.inputs, **case.options)
    assert_same(shifted.out, straight.out, 1e-11)
    assert_same(shifted.lse, straight.lse + constant, 1e-11)


@settings(max_examples=40, deadline=None)
@given(seeds, st.booleans())
def test_a_sequence_in_a_batch_is_bitwise_the_sequence_alone(seed: int, varlen: bool) -> None:
    features = ("causal", "window", "sink_tokens", "scale", "softcap", "sinks")
    case = draw_case(seed, varlen=varlen, batch=3, features=features, alignment="bottom_right")
    together = attention_forward(*case.inputs, **case.options)
    alone = {name: value for name, value in case.options.items() if not name.startswith("cu_seqlens")}
    row = key = 0
    for b, (rows, keys) in enumerate(case.seqlens):
        if varlen:
            part = (
                case.q[None, row : row + rows],
                case.k[None, key : key + keys],
                case.v[None, key : key + keys],
            )
            mine = together.out[None, row : row + rows], together.lse[None, :, row : row + rows]
        else:
            part = case.q[b : b + 1], case.k[b : b + 1], case.v[b : b + 1]
            mine = together.out[b : b + 1], together.lse[b : b + 1]
        single = attention_forward(*part, **alone)
        assert np.array_equal(single.out, mine[0])
        assert np.array_equal(single.lse, mine[1])
        row, key = row + rows, key + keys


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_grouped_heads_are_repeated_heads(seed: int) -> None:
    case = draw_case(seed, heads=(6, 2))
    grouped = attention_forward(*case.inputs, **case.options)
    k, v = (np.repeat(array, 3, axis=-2) for array in (case.k, case.v))
    repeated = attention_forward(case.q, k, v, **case.options)
    assert np.array_equal(grouped.out, repeated.out)
    assert np.array_equal(grouped.lse, repeated.lse)


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_a_window_that_covers_everything_is_no_window(seed: int) -> None:
    case = draw_case(seed, features=("causal", "softcap", "alibi", "sinks"))
    full = attention_forward(*case.inputs, **case.options)
    wide = attention_forward(*case.inputs, window_size=(40, 40), **case.options)
    assert np.array_equal(full.out, wide.out)
    assert np.array_equal(full.lse, wide.lse)


@settings(max_examples=30, deadline=None)
@given(seeds, st.floats(0, 1))
def test_keys_in_two_parts_merge_by_their_lse(seed: int, fraction: float) -> None:
    case = draw_case(seed, varlen=False, always=("bias",), features=("softcap", "scale"))
    cut, bias = int(fraction * case.k.shape[1]), case.options.pop("bias")
    whole = attention_forward(*case.inputs, bias=bias, **case.options)
    parts = [
        attention_forward(case.q, case.k[:, keys], case.v[:, keys], bias=bias[..., keys], **case.options)
        for keys in (slice(cut), slice(cut, None))
    ]
    lse = np.logaddexp(parts[0].lse, parts[1].lse)
    shares = [np.exp(part.lse - lse).swapaxes(1, 2)[..., None] for part in parts]
    assert_same(sum(part.out * share for part, share in zip(parts, shares, strict=True)), whole.out)
    assert_same(lse, whole.lse)


@pytest.mark.parametrize("seed", range(8))
def test_tiles_of_any_size_give_the_same_result(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_forward(seed, dtype="float32", seqlens=(40, 33), head_dim=8, batch=3)
    whole = attention_forward(*case.inputs, **case.options)
    for size in (1, 3000, 40_000):
        monkeypatch.setattr(forward, "_BLOCK_BYTES", size)
        tiled = attention_forward(*case.inputs, **case.options)
        assert_same(tiled.out, whole.out)
        assert_same(tiled.lse, whole.lse)


@pytest.mark.parametrize("seqlens", SEQLENS)
def test_float32_accumulation_is_float64_to_single_precision(seqlens: tuple[int, int]) -> None:
    case = random_forward(seqlens[0], dtype="float32", seqlens=seqlens, head_dim=40, batch=1, kind="gaussian")
    double = attention_forward(*case.inputs, **case.options)
    single = attention_forward(*case.inputs, **case.options, accumulate="float32")
    assert single.out.dtype == single.lse.dtype == np.float32
    assert_same(single.out, double.out, 2e-5)
    assert_same(single.lse, double.lse, 2e-5)


# Rows and keys that are not there


def three_by_two() -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(1, 3, 2, 4)), rng.normal(size=(1, 2, 2, 4)), rng.normal(size=(1, 2, 2, 4))


def test_a_row_without_keys_is_zero_with_an_lse_of_minus_infinity() -> None:
    q, k, v = three_by_two()
    result = attention_forward(q, k, v, causal=True)
    assert np.all(result.out[:, 0] == 0)
    assert np.all(result.lse[:, :, 0] == -np.inf)
    assert np.all(np.isfinite(result.lse[:, :, 1:]))


def test_a_row_without_keys_has_its_sink_as_lse() -> None:
    q, k, v = three_by_two()
    sinks = np.array([0.5, -np.inf])
    result = attention_forward(q, k, v, causal=True, sinks=sinks)
    assert np.all(result.out[:, 0] == 0)
    assert np.array_equal(result.lse[0, :, 0], sinks)


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


@pytest.mark.parametrize("seed", range(20))
def test_poison_that_no_row_sees_changes_no_bit(seed: int) -> None:
    alignment = ("bottom_right", "top_left")[seed % 2]
    case = random_forward(
        seed,
        seqlens=((5, 14), (14, 5))[seed % 2],
        head_dim=8,
        always=("causal", "window"),
        alignment=alignment,
    )
    poisoned = poison_unseen(case)
    assert np.isnan(poisoned.k.astype(np.float32)).any() == np.isnan(poisoned.v.astype(np.float32)).any()
    clean = attention_forward(*case.inputs, **case.options, with_magnitude=True)
    result = attention_forward(*poisoned.inputs, **poisoned.options, with_magnitude=True)
    assert np.array_equal(result.out, clean.out)
    assert np.array_equal(result.lse, clean.lse)


def test_the_poison_cases_do_hold_poison() -> None:
    cases = (random_forward(seed, seqlens=(5, 14), head_dim=8, always=("window",)) for seed in range(20))
    assert sum(np.isnan(poison_unseen(case).k.astype(np.float32)).any() for case in cases) > 5


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
        # A score of +inf spoils its row as IEEE has it; one of -inf is a key without weight.
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


def test_low_precision_results_lie_on_the_dtypes_grid() -> None:
    for dtype in ("bfloat16", "float16"):
        case = random_forward(5, dtype=dtype, seqlens=(40, 50), head_dim=16, kind="gaussian")
        low = attention_forward_low(*case.inputs, **case.options).out
        assert np.array_equal(low, low.astype(case.q.dtype).astype(np.float32))
        exact = attention_forward(*case.inputs, **case.options).out
        error = np.abs(low - exact).max()
        assert 2.0**-14 < error < 0.05


def test_low_precision_of_double_is_the_oracle() -> None:
    case = random_forward(6, dtype="float64", seqlens=(20, 30), head_dim=8)
    low = attention_forward_low(*case.inputs, **case.options)
    exact = attention_forward(*case.inputs, **case.options)
    assert_same(low.out, exact.out)
    assert_same(low.lse, exact.lse)


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


def varlen_arguments(**changes: Any) -> dict[str, Any]:
    rows = np.zeros((6, 2, 4))
    ends = np.array([0, 2, 6], np.int32)
    return {"q": rows, "k": rows, "v": rows, "cu_seqlens_q": ends, "cu_seqlens_k": ends, **changes}


def dense_arguments(**changes: Any) -> dict[str, Any]:
    return {"q": np.zeros((2, 3, 4, 8)), "k": np.zeros((2, 5, 2, 8)), "v": np.zeros((2, 5, 2, 6)), **changes}


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("q", dense_arguments(q=np.zeros((3, 4, 8)))),
        ("k", dense_arguments(k=np.zeros((2, 5, 2, 7)))),
        ("k", dense_arguments(k=np.zeros((1, 5, 2, 8)), v=np.zeros((1, 5, 2, 6)))),
        ("k", dense_arguments(k=np.zeros((2, 5, 3, 8)), v=np.zeros((2, 5, 3, 6)))),
        ("v", dense_arguments(v=np.zeros((2, 4, 2, 6)))),
        ("alignment", dense_arguments(alignment="middle")),
        ("window_size", dense_arguments(window_size=(-2, 0))),
        ("softcap", dense_arguments(softcap=-1.0)),
        ("sink_tokens", dense_arguments(sink_tokens=-1)),
        ("dropout_p", dense_arguments(dropout_p=1.0)),
        ("dropout_seed", dense_arguments(dropout_p=0.5, dropout_seed=-1)),
        ("sinks", dense_arguments(sinks=np.zeros(2))),
        ("alibi_slopes", dense_arguments(alibi_slopes=np.zeros((3, 4)))),
        ("bias", dense_arguments(bias=np.zeros((2, 2, 3, 5)))),
        ("k_descale", dense_arguments(k_descale=np.zeros((2, 4)))),
        ("cu_seqlens_k", varlen_arguments(cu_seqlens_k=None)),
        ("cu_seqlens_k", varlen_arguments(cu_seqlens_k=np.array([0, 6]))),
        ("cu_seqlens_k", varlen_arguments(cu_seqlens_k=np.array([0, 2, 7]))),
        ("cu_seqlens_q", varlen_arguments(cu_seqlens_q=np.array([1, 2, 6]))),
        ("cu_seqlens_q", varlen_arguments(cu_seqlens_q=np.array([0, 4, 2]))),
        ("cu_seqlens_q", varlen_arguments(cu_seqlens_q=np.array([0.0, 2.0, 6.0]))),
        ("bias", varlen_arguments(bias=np.zeros((2, 2, 4, 4)))),
    ],
)
def test_arguments_that_contradict_each_other_are_refused_by_name(
    field: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        attention_forward(**arguments)
    assert refusal.value.field == field
