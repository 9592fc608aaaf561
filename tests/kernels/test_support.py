"""Which problems are refused, with which field, reason and nearest value, and which are not."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from typing import Any

import pytest
from inside.attention import ScoreMod
from inside.package import DTYPES, FP8, output_dtype

from gpu_actors import AttentionProblem
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.kernels import support
from gpu_actors.kernels.support import ELEMENTS, check_support, example_problem, find_unsupported, refusals

E4M3, E5M2 = FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")


def problem(dtype: str = "bfloat16", dtype_: str | None = None, **changes: Any) -> AttentionProblem:
    """dtype_: a dtype that no example has."""
    changes |= {} if dtype_ is None else {"dtype": dtype_, "kv_dtype": dtype_}
    return dataclasses.replace(example_problem(dtype, 64), **changes)


def test_requests_and_kernels_agree_on_the_dtypes() -> None:
    assert tuple(ELEMENTS) == DTYPES
    assert {name: element.out for name, element in ELEMENTS.items()} == {name: output_dtype(name) for name in DTYPES}
    assert {name for name, element in ELEMENTS.items() if element.fp8} == set(FP8)


# code -> (problem, arch, field, value, nearest, words of the reason)
REFUSED = {
    "arch.known": (problem(), "sm_75", "arch", "sm_75", "sm_80", "8.0"),
    "dtype.known": (problem(dtype_="int8"), "sm_90a", "dtype", "int8", "float32", "float16"),
    "fp8.backward": (problem(E4M3, direction="backward"), "sm_90a", "dtype", E4M3, "bfloat16", "gradients"),
    "fp8.arch": (problem(E4M3), "sm_89", "dtype", E4M3, "bfloat16", "sm_90a"),
    "kv_dtype.mixed": (problem(kv_dtype=E4M3), "sm_90a", "kv_dtype", E4M3, "bfloat16", "q's dtype"),
    "out_dtype.fixed": (problem(E4M3, out_dtype="float16"), "sm_90a", "out_dtype", "float16", "bfloat16", E4M3),
    "compute.mode": (problem("float16", compute="f32"), "sm_80", "compute", "f32", "f16", "float32"),
    "lse_dtype.wide": (problem(lse_dtype="float64"), "sm_90a", "lse_dtype", "float64", "float32", "hold no more"),
    "head_dim.range": (problem(head_dim=513), "sm_90a", "head_dim", 513, 512, "512"),
    "seqlen.range": (problem(seqlen_k=1 << 30), "sm_90a", "seqlen_k", 1 << 30, (1 << 30) - 1, "2^30"),
    "dropout.fp8": (problem(E4M3, dropout_p=0.1), "sm_90a", "dropout_p", 0.1, 0.0, "inference"),
    "bias.dtype": (problem(bias=("float16", True, False)), "sm_90a", "bias", "float16", "float32", "bfloat16"),
    "bias.row": (
        problem(direction="backward", bias=("float32", True, False), bias_row=True, deterministic=True),
        *("sm_90a", "deterministic", True, False, "any order"),
    ),
    "descales.dtype": (problem(descales=True), "sm_90a", "q_descale", "an array", None, "fp8"),
    "invariant.dropout": (
        problem(invariant=True, dropout_p=0.1),
        *("sm_90a", "dropout_p", 0.1, 0.0, "place in its batch"),
    ),
    "invariant.splits": (
        problem(invariant=True, num_splits=3, layout="paged"),
        *("sm_90a", "num_splits", 3, 1, "length of a sequence"),
    ),
    "invariant.blocks": (
        problem(invariant=True, score_mod=ScoreMod("", block_size=(128, 128))),
        *("sm_90a", "block_mask", (128, 128), None, "order of its block's list"),
    ),
    "float.range": (problem(softmax_scale=-1e38), "sm_90a", "softmax_scale", -1e38, -1e36, "fp32"),
}


def test_each_refusal_has_a_case():
    codes = re.findall(r'yield "([a-z_0-9]+\.[a-z_0-9]+)", ', inspect.getsource(support))
    assert set(codes) == set(REFUSED)


def test_refusals_come_in_one_order_and_go_on_after_the_first():
    given = problem(head_dim=0, seqlen_k=1 << 30, bias=("int8", True, True), layout="paged")
    found = [code for code, _ in refusals(given, "sm_80")]
    assert found == ["head_dim.range", "seqlen.range", "bias.dtype"]


@pytest.mark.parametrize("code", REFUSED)
def test_a_refusal_names_field_value_reason_and_a_nearest_that_is_accepted(code):
    given, arch, field, value, nearest, words = REFUSED[code]
    found = find_unsupported(given, arch)
    assert found is not None
    assert found[0] == code
    with pytest.raises(Unsupported) as refused:
        check_support(given, arch)
    error = refused.value
    assert (error.field, error.value, error.nearest) == (field, value, nearest)
    assert words in error.reason
    assert len(error.reason.split()) >= 5, "a reason is a sentence"
    if code in ("arch.known", "descales.dtype", "invariant.blocks"):
        return
    changes = {field: nearest}
    if field == "dtype":
        changes = {"dtype": nearest, "kv_dtype": nearest, "compute": ELEMENTS[nearest].computes[0]}
        changes["out_dtype"] = ELEMENTS[nearest].out
    if field == "bias":
        changes = {"bias": (nearest, *given.bias[1:])}
    check_support(dataclasses.replace(given, **changes), arch)


ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")


@pytest.mark.parametrize("dtype", [name for name, element in ELEMENTS.items() if not element.fp8])
def test_wide_dtypes_are_accepted_everywhere_with_every_option(dtype):
    options = {"window_size": (0, 0), "softcap": 30.0, "alibi": "batch", "sinks": True, "sink_tokens": 4}
    options |= {"bias": (dtype, True, True), "dropout_p": 0.1, "return_lse": True}
    for arch, causal in itertools.product(ARCHS, (True, False)):
        assert find_unsupported(problem(dtype, causal=causal, **options), arch) is None
    for compute in ELEMENTS[dtype].computes:
        assert find_unsupported(problem(dtype, compute=compute), "sm_80") is None


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_fp8_is_refused_before_hopper_and_accepted_from_there_on(dtype):
    """Over a cache fp8 is widened and needs no Hopper."""
    for arch in ARCHS:
        assert find_unsupported(problem(dtype, descales=True, layout="cache"), arch) is None
        found = find_unsupported(problem(dtype, descales=True), arch)
        assert (found and found[0]) == (None if arch in ARCHS[3:] else "fp8.arch")


@pytest.mark.parametrize(
    ("direction", "arch", "code"), [("forward", "sm_80", "fp8.arch"), ("backward", "sm_90a", "fp8.backward")]
)
def test_fp8_keys_and_values_alone_are_refused_as_fp8(direction, arch, code):
    given = problem("float16", kv_dtype=E4M3, direction=direction)
    found, error = find_unsupported(given, arch)
    assert (found, error.field, error.value, error.nearest) == (code, "kv_dtype", E4M3, "float16")


def test_fp8_keys_of_another_type_than_q_are_refused():
    for dtype, kv_dtype in itertools.permutations((E4M3, E5M2, "bfloat16"), 2):
        assert find_unsupported(problem(dtype, kv_dtype=kv_dtype), "sm_90a")[0] == "kv_dtype.mixed"


def test_head_dims_outside_the_range_are_refused_by_name():
    for field, (dim, nearest) in itertools.product(("head_dim", "head_dim_v"), {0: 1, 513: 512, 576: 512}.items()):
        with pytest.raises(Unsupported) as refused:
            check_support(problem(**{field: dim}), "sm_90a")
        assert (refused.value.field, refused.value.nearest) == (field, nearest)
    for dim in (1, 40, 512):
        assert find_unsupported(problem(head_dim=dim, head_dim_v=513 - dim), "sm_80") is None


def test_an_arch_without_its_suffix_is_refused_with_the_exact_one():
    with pytest.raises(Unsupported) as refused:
        check_support(problem(), "sm_90")
    assert (refused.value.field, refused.value.nearest) == ("arch", "sm_90a")
    with pytest.raises(InvalidRequest):
        check_support(problem(), "H100")


@pytest.mark.parametrize("field", ["softmax_scale", "softcap"])
@pytest.mark.parametrize("value", [1e39, 1e-40])
def test_what_fp32_scores_cannot_hold_is_for_float64_alone(field, value):
    assert find_unsupported(problem("float64", compute="f64", **{field: value}), "sm_90a") is None
    code, error = find_unsupported(problem("float32", compute="f32", **{field: value}), "sm_90a")
    assert (code, error.field) == ("float.range", field)
