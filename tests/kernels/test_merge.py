"""The merge of partials on the device: against the oracle, over what may not be read, and what ptxas makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated.append import dtype_of
from emulated.merge import merge_problem, run_merge
from inside.emulation import EmulatedModule, EmulationFault, build_module
from inside.package import StableText
from support.gate import ARCHS, code_faults, code_of, with_bug

import gpu_actors as ga
from gpu_actors import KernelSource
from gpu_actors.kernels.keys import check_key
from gpu_actors.kernels.merge.merge import MergeKey, merge_key, merge_variants
from gpu_actors.kernels.variants import kernel_source
from gpu_actors.partial import Partial, empty, merge

_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
FIELDS = ("arch", "dtype", "lse_dtype", "out_dtype", "sinks")
REGISTERS = 102  # five blocks of 128 threads a multiprocessor


def partials_of(
    count: int, dtype: str = "bfloat16", shape: tuple[int, ...] = (2, 3, 4, 40), spread: float = 3.0, seed: int = 0
) -> list[Partial]:
    rng = np.random.default_rng(seed)
    *outer, rows, heads, _ = shape
    made = []
    for _ in range(count):
        lse = (rng.standard_normal((*outer, heads, rows)) * spread).astype(np.float32)
        made.append(Partial(rng.standard_normal(shape).astype(dtype_of(dtype)), lse))
    return made


def check(
    partials: list[Partial], sinks: Any = None, out_dtype: str | None = None, build: Any = None, **launch: Any
) -> None:
    """Raise AssertionError where the kernel differs from the merge in float64 by more than the rounding of its sums."""
    got = run_merge(partials, sinks, out_dtype, **({} if build is None else {"build": build}), **launch)
    wanted = merge(partials, sinks=sinks, out_dtype="float64")
    u, sums = _ROUNDOFF[got.out.dtype.name], 2.0**-21 if got.lse.dtype == np.float32 else 2.0**-49
    largest = max(
        float(np.abs(np.where(np.isfinite(p.out.astype(float)), p.out.astype(float), 0)).max()) for p in partials
    )
    bound = u * np.abs(wanted.out) + sums * largest
    out = got.out.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(wanted.out), "out is NaN elsewhere")
    with np.errstate(invalid="ignore"):
        assert np.all((np.abs(out - wanted.out) <= bound) | ~np.isfinite(wanted.out)), "out differs"
    np.testing.assert_array_equal(np.isneginf(got.lse), np.isneginf(wanted.lse), "lse is -inf elsewhere")
    seen = np.isfinite(wanted.lse)
    limit = 2.0**-20 if got.lse.dtype == np.float32 else 1e-12
    scale = np.maximum(1.0, np.abs(wanted.lse[seen]))
    assert np.all(np.abs(got.lse[seen] - wanted.lse[seen]) <= limit * scale), "lse differs"


def with_empty_rows(partials: list[Partial]) -> list[Partial]:
    """Rows without keys hold NaN; a row of two heads has no keys in any partial, and one partial is empty."""
    for index, partial in enumerate(partials):
        partial.lse[..., (0, 3), 1] = -np.inf
        partial.lse[..., index % 4, 2] = -np.inf
    partials[1].lse[...] = -np.inf
    for partial in partials:
        partial.out[np.isneginf(np.swapaxes(partial.lse, -1, -2))] = np.nan
    return partials


def strided(partial: Partial) -> Partial:
    """The same numbers in heads of heads-first memory, which begins at an odd element."""
    *outer, rows, heads, columns = partial.out.shape
    memory = np.zeros((*outer, heads, rows, columns + 3), partial.out.dtype)
    out = np.swapaxes(memory, -2, -3)[..., 1 : columns + 1]
    out[...] = partial.out
    return Partial(out, np.asfortranarray(partial.lse))


SINKS = np.array([0.5, -3.0, 2.0, -np.inf], np.float32)
CASES: dict[str, tuple[list[Partial], Any, str | None]] = {
    "plain": (partials_of(3), None, None),
    "one": (partials_of(1), None, None),
    "many": (partials_of(40), SINKS, None),
    "empty": (with_empty_rows(partials_of(4)), None, None),
    "empty, sinks": (with_empty_rows(partials_of(4)), SINKS, None),
    "nothing": ([empty((2, 3, 4, 40), dtype="bfloat16")] * 2, None, None),
    "packed": (partials_of(3, shape=(7, 4, 40)), SINKS, None),
    "cut columns": (partials_of(3, shape=(2, 3, 4, 21)), None, None),
    "strided": ([strided(p) for p in partials_of(3)], None, None),
    "far apart": (partials_of(3, spread=800.0), SINKS, None),
    "more blocks": (partials_of(2, shape=(3, 17, 4, 72)), None, None),
}
DTYPES: dict[str, tuple[list[Partial], Any, str | None]] = {
    "float16": (with_empty_rows(partials_of(4, "float16")), SINKS.astype(np.float16), None),
    "float32": (with_empty_rows(partials_of(4, "float32")), SINKS, None),
    "float32 to bfloat16": (with_empty_rows(partials_of(4, "float32")), None, "bfloat16"),
    "float16 to float32": (partials_of(4, "float16", (2, 3, 4, 21)), SINKS, "float32"),
    "bfloat16 to float16": (partials_of(4), None, "float16"),
    "float64": (with_empty_rows(partials_of(4, "float64", (2, 3, 4, 21))), SINKS.astype(np.float64), None),
    "float64 to float32": (partials_of(3, "float64"), None, "float32"),
    "float32 to float64": (partials_of(3, "float32"), None, "float64"),
}
USUAL = ("float32 to bfloat16", "float64")


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_merges_as_the_oracle_does(name: str) -> None:
    for schedule in ("greedy", "lane"):
        check(*CASES[name], schedule=schedule)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.sweep) for name in DTYPES]
)
def test_the_kernel_merges_every_dtype(name: str) -> None:
    check(*DTYPES[name])


def test_a_wide_lse_stays_wide() -> None:
    partials = [Partial(p.out, p.lse.astype(np.float64)) for p in partials_of(3, "float32")]
    check(partials)
    assert run_merge(partials).lse.dtype == np.float64


def test_what_a_partial_saw_stays_nan_or_infinite_however_small_its_weight() -> None:
    partials = partials_of(2)
    partials[0].lse[...] = 0.0
    partials[1].lse[...] = -90.0
    partials[0].out[0, 0, 0, 0] = np.inf
    partials[1].out[0, 1, 0, 3] = np.nan
    partials[1].out[1, 0, 0, 5] = -np.inf
    got, wanted = run_merge(partials), merge(partials)
    for index in ((0, 0, 0, 0), (0, 1, 0, 3), (1, 0, 0, 5)):
        assert str(got.out[index]) == str(wanted.out[index])
        assert not np.isfinite(float(got.out[index]))
    check(partials)


def test_the_order_of_the_list_is_the_order_of_the_sums() -> None:
    """Three terms of weight 1 whose sum depends on its order."""
    big = [np.full((1, 1, 1, 8), x, np.float32) for x in (2.0**24, 1.0, 1.0)]
    terms = [Partial(x, np.zeros((1, 1, 1), np.float32)) for x in big]
    first = run_merge(terms).out[0, 0, 0, 0]
    last = run_merge(terms[::-1]).out[0, 0, 0, 0]
    assert first == np.float32(2.0**24) / np.float32(3)
    assert last == np.float32(2.0**24 + 2) / np.float32(3)
    assert first != last


# What ptxas makes of it


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=() if arch in ("sm_80", "sm_90a") else pytest.mark.sweep) for arch in ARCHS]
)
def test_the_variants_pass_the_gate(arch: str) -> None:
    keys = merge_variants(arch)
    keys += [merge_key(merge_problem(*DTYPES[name]), arch) for name in ("float16", "float64")]
    for key in keys:
        assert check_key(key) is key
        code = code_of(kernel_source(key), "merge")
        assert code_faults(code, REGISTERS) == [], key
        if key.dtype != "float64":
            assert code.count(r"\bLDG\.E\.\S*128\b") != 0, key
            assert code.count(r"\bSTG\.E\.128\b") != 0, key


def test_a_key_is_checked() -> None:
    key = merge_variants("sm_80")[0]
    assert isinstance(key, StableText)
    for field, value, kind in (
        ("dtype", "int8", ga.InvalidRequest),
        ("lse_dtype", "float16", ga.InvalidRequest),
        ("sinks", 1, ga.InvalidRequest),
        ("arch", "sm_75", ga.Unsupported),
    ):
        wrong = MergeKey(**{**{name: getattr(key, name) for name in FIELDS}, field: value})
        with pytest.raises(kind) as caught:
            check_key(wrong)
        assert caught.value.field == field
    with pytest.raises(ga.Unsupported) as caught:
        check_key(MergeKey(arch="sm_80", dtype="float64", lse_dtype="float32", out_dtype="float16", sinks=False))
    assert (caught.value.field, caught.value.nearest) == ("out_dtype", "float32")


# Seeded bugs


MUTANTS = {
    "an empty row is read": ("if (lse == -INFINITY) continue;", "", "empty"),
    "weights are relative to nothing": ("exp_of(lse - top)", "exp_of(lse)", "far apart"),
    "rows without keys divide by 0": ("if (top == -INFINITY) top = Real(0);", "", "empty, sinks"),
    "the sum is not divided": ("sums[i] / total", "sums[i]", "plain"),
    "a sink counts twice": ("total += exp_of(sink - top)", "total += 2 * exp_of(sink - top)", "many"),
    "a sink is not in the maximum": ("Real top = sink;", "Real top = -INFINITY;", "far apart"),
    "every head has the first sink": ("head * params.sinks_stride", "0", "packed"),
    "the last term is left out": ("n < params.count; n++) {", "n + 1 < params.count; n++) {", "many"),
    "lse is not logarithmic": ("top + log_of(total)", "top + total", "plain"),
    "lse has base 2": ("top + log_of(total)", "top + log_of(total) * Real(1.4426950408889634)", "plain"),
    "cut columns are stored whole": ("if (i < columns) to[i]", "to[i]", "cut columns"),
    "cut columns are read whole": ("i < columns ? Real(to_real(from[i])) : Real(0)", "to_real(from[i])", "cut columns"),
    "alignment is taken for granted": ("columns == VECTOR && is_aligned(from)", "columns == VECTOR", "strided"),
    "all rows are the first": ("rows % params.rows", "0", "packed"),
    "sequences are not told apart": ("rows / params.rows,", "0,", "plain"),
    "the last block writes past the end": ("if (index >= params.units) return;", "", "more blocks"),
    "every group writes lse late": ("if (group == 0) {", "if (group == 1 && total > Real(2)) {", "plain"),
    "values are not weighted": ("sum + weight * value : sum + value", "sum + value : sum + value", "plain"),
}  # fmt: skip
SAMPLED = ("an empty row is read", "a sink counts twice")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutants")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLED else pytest.mark.sweep) for name in MUTANTS]
)
def test_a_seeded_bug_is_caught(name: str, cache: Path) -> None:
    old, new, case = MUTANTS[name]

    def build(source: KernelSource) -> EmulatedModule:
        bad = with_bug(source, source.name, old, new)
        return build_module(bad.source, dict(bad.macros), dict(bad.headers), cache_dir=cache, entries=bad.entry_points)

    with pytest.raises((AssertionError, EmulationFault)):
        check(*CASES[case], build=build)
