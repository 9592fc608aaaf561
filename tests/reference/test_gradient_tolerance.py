"""The rule for gradients refuses defects of real backward kernels and accepts a correct one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cases.poison import poison_unseen_backward
from inside.reference import GradientSums, GradientTile, Incoming, gradient_tiles, identity, pose, rounder

from gpu_actors.reference import ReferenceGradients, attention_backward
from gpu_actors.reference.gradient_tolerance import check_gradients, gradient_bounds, gradient_row_bound
from gpu_actors.reference.tolerance import COMPUTE
from gpu_actors.testing import BackwardCase, random_backward

Array = npt.NDArray[Any]
TILE = 16


def kernel_like(case: BackwardCase, defect: str = "", compute: str | None = None) -> ReferenceGradients:
    """Backward as a kernel does it: forward's rounded results, float32 sums, P and dS rounded before products, and
    gradients rounded at the end. ``defect`` names one error to make."""
    dtype = case.forward.q.dtype.name if compute is None else COMPUTE[compute]
    step = rounder(dtype)
    dout, q, k, v = (step(array.astype(np.float32)) for array in case.arguments)
    options = {name: value for name, value in case.options.items() if defect != f"{name} is forgotten"}
    arguments = pose(q, k, v, **options)
    incoming = Incoming(dout, case.out, case.lse)
    sums = GradientSums(arguments, np.dtype(np.float32))
    with np.errstate(all="ignore"):
        for tile in gradient_tiles(arguments, incoming, np.dtype(np.float32), identity):
            scores, weights = spoil(tile, defect)
            q, k, dout = tile.q, tile.operands.k, tile.dout
            sums.add(tile, step(scores), step(weights), q, k, dout, scale=arguments.problem.softmax_scale)
            delta = -tile.delta if defect == "the sinks' sign" else tile.delta
            sums.add_reduced(tile, tile.dbias, delta)
    return as_given(case, sums.gradients(), defect)


def spoil(tile: GradientTile, defect: str) -> tuple[Array, Array]:
    scores, weights = tile.dscores.copy(), tile.weights.copy()
    match defect:
        case "the last keys get nothing":
            scores[..., -TILE:], weights[..., -TILE:] = 0, 0
        case "the last row gives nothing":
            scores[..., -1, :], weights[..., -1, :] = 0, 0
        case "delta is left out":
            scores = scores + tile.probabilities * tile.delta * (1 if tile.slope is None else tile.slope)
        case "the softcap's factor is left out":
            scores = tile.dbias
        case "one query head of a group is missing in dk":
            scores[:, :, 0] = 0
        case "probabilities are normalised twice":
            weights = weights / weights.sum(axis=-1, keepdims=True)
    return scores, weights


def as_given(case: BackwardCase, gradients: ReferenceGradients, defect: str) -> ReferenceGradients:
    like = {"dq": case.forward.q, "dk": case.forward.k, "dv": case.forward.v}
    like |= {f"d{name}": case.options[name] for name in ("bias", "sinks") if name in case.options}
    rounded = {name: getattr(gradients, name).astype(array.dtype) for name, array in like.items()}
    if defect == "dq is zeros":
        rounded["dq"][...] = 0
    if defect == "one element is not written":
        rounded["dk"].reshape(-1)[-1] = np.nan
    if defect == "dbias is not summed over heads":
        rounded["dbias"] = (rounded["dbias"] / np.float32(case.forward.q.shape[2])).astype(rounded["dbias"].dtype)
    return ReferenceGradients(**rounded)


def check(case: BackwardCase, gradients: ReferenceGradients, **choices: Any) -> float:
    return check_gradients(gradients, *case.arguments, repro=case.repro, **choices, **case.options)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.sweep) for n in range(3, 24))])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_correct_kernel_passes_with_room(dtype: str, seed: int) -> None:
    case = random_backward(seed, dtype=dtype, seqlens=(50, 70), head_dim=(40, 64)[seed % 2])
    gradients = kernel_like(case)
    assert check(case, gradients) < 0.9
    assert check(case, gradients, out=case.out, lse=case.lse) < 0.9


@pytest.mark.parametrize(("compute", "seed"), [("tf32", 0), ("f16", 1), ("bf16", 2)])
def test_a_kernel_that_multiplies_float32_in_less_passes_by_that_rule(compute: str, seed: int) -> None:
    case = random_backward(seed, compute=compute, dtype="float32", seqlens=(50, 70), head_dim=40)
    gradients = kernel_like(case, compute=compute)
    assert check(case, gradients, compute=compute) < 0.9
    with pytest.raises(AssertionError, match="is wrong in"):
        check(case, gradients)


DEFECTS: dict[str, tuple[str, ...]] = {
    "the last keys get nothing": (),
    "the last row gives nothing": (),
    "delta is left out": (),
    "the softcap's factor is left out": ("softcap",),
    "one query head of a group is missing in dk": (),
    "probabilities are normalised twice": ("sinks", "causal"),
    "the sinks' sign": ("sinks",),
    "dq is zeros": (),
    "one element is not written": (),
    "dbias is not summed over heads": ("bias",),
    "causal is forgotten": ("causal",),
    "window_size is forgotten": ("window",),
    "alibi_slopes is forgotten": ("alibi",),
    "dropout_seed is forgotten": ("dropout",),
}


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 3), marks=pytest.mark.sweep)], ids=["one", "more"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("defect", DEFECTS)
def test_gradients_with_a_defect_are_refused(defect: str, dtype: str, seeds: range) -> None:
    always = DEFECTS[defect]
    choices: dict[str, Any] = {"kind": "gaussian", "varlen": False, "heads": (6, 2), "head_dim": 64}
    for seed in seeds:
        case = random_backward(seed, dtype=dtype, seqlens=(60, 90), features=always, always=always, **choices)
        if "softcap" in always:
            case.options["softcap"] = 1.5
        if "bias" in always:
            case.options["bias"] = case.options["bias"][:1, :1]
        case = dataclasses.replace(case, **forward_results(case))
        check(case, kernel_like(case))
        with pytest.raises(AssertionError, match="is wrong in") as refusal:
            check(case, kernel_like(case, defect))
        assert case.repro in str(refusal.value)


def forward_results(case: BackwardCase) -> dict[str, Array]:
    from gpu_actors.reference import attention_forward

    result = attention_forward(*case.forward.inputs, **case.options)
    return {"out": result.out.astype(case.out.dtype), "lse": result.lse.astype(np.float32)}


def test_gradients_much_smaller_than_the_shift_are_not_excused_from_being_right() -> None:
    reference = np.random.default_rng(0).normal(size=(2, 8)) * 1e-3
    bound = gradient_row_bound(reference, reference, "bfloat16")
    assert 0 < bound.max() < 1e-4
    assert (gradient_row_bound(300 * reference, 300 * reference, "bfloat16") > 30 * bound).all()


def test_a_gradient_too_few_or_too_many_is_refused() -> None:
    case = random_backward(0, dtype="float32", varlen=False, seqlens=(5, 6), head_dim=40, features=(), always=("bias",))
    gradients = kernel_like(case)
    with pytest.raises(AssertionError, match="dbias is missing"):
        check(case, dataclasses.replace(gradients, dbias=None))
    with pytest.raises(AssertionError, match="dsinks is there unasked"):
        check(case, dataclasses.replace(gradients, dsinks=np.zeros(6, np.float32)))
    with pytest.raises(AssertionError, match="dk has shape"):
        check(case, dataclasses.replace(gradients, dk=gradients.dk[:, :-1]))


@pytest.mark.parametrize("seed", range(4))
def test_a_poisoned_problem_has_the_clean_ones_gradients(seed: int) -> None:
    case = random_backward(
        seed,
        dtype="float32",
        seqlens=((5, 14), (14, 5))[seed % 2],
        head_dim=40,
        always=("causal", "window"),
        features=("dropout", "sink_tokens", "softcap"),
    )
    poisoned = poison_unseen_backward(case)
    results = [
        attention_backward(*each.arguments, out=each.out, lse=each.lse, **each.options) for each in (case, poisoned)
    ]
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(results[0], name), getattr(results[1], name), err_msg=poisoned.repro)


def test_the_poisoned_problems_do_hold_poison() -> None:
    cases = [
        poison_unseen_backward(random_backward(seed, dtype="float32", seqlens=(14, 5), head_dim=40, always=("causal",)))
        for seed in range(8)
    ]
    assert sum(np.isnan(case.dout).any() for case in cases) >= 4


def test_a_repro_line_rebuilds_its_case() -> None:
    case = random_backward(3, dtype="bfloat16", seqlens=(9, 11), always=("causal",))
    again = eval(case.repro, {"random_backward": random_backward})
    for name in ("dout", "out", "lse"):
        assert getattr(again, name).tobytes() == getattr(case, name).tobytes()
    for array, other in zip(case.arguments, again.arguments, strict=True):
        assert array.tobytes() == other.tobytes()


def test_bounds_are_shaped_like_the_gradients() -> None:
    case = random_backward(1, dtype="bfloat16", varlen=False, seqlens=(7, 9), head_dim=40, always=("bias", "sinks"))
    bounds = gradient_bounds(*case.arguments, **case.options)
    assert bounds.dq.shape == case.forward.q.shape
    assert bounds.dk.shape == case.forward.k.shape
    assert bounds.dbias is not None
    assert bounds.dbias.shape == case.options["bias"].shape


@pytest.mark.parametrize(("off", "passes"), [(1e-12, True), (1e-9, False)])
def test_a_row_of_one_key_may_be_off_by_the_errors_of_two_factors_that_are_0(off: float, passes: bool) -> None:
    """Its dS and the slope of a softcap that is reached are 0. Kernels compute neither exactly."""
    q, k, v = np.full((1, 1, 1, 4), 8.0, np.float32), np.full((1, 1, 1, 4), 8.0, np.float32), np.ones((1, 1, 1, 4))
    arguments, options = (np.ones_like(q), q, k, v.astype(np.float32)), {"softcap": 1.0}
    gradients = attention_backward(*arguments, **options)
    assert not gradients.dq.any()
    shifted = dataclasses.replace(gradients, dq=gradients.dq + off)
    if passes:
        check_gradients(shifted, *arguments, **options)
    else:
        with pytest.raises(AssertionError, match="dq is wrong"):
            check_gradients(shifted, *arguments, **options)
