"""The gradient of a merge on the device: against float64, over what may not be read, and what ptxas makes of it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated.append import dtype_of
from emulated.merge import merge_problem, run_merge_gradients
from inside.emulation import EmulatedModule, EmulationFault, build_module
from inside.package import StableText
from support.gate import ARCHS, code_faults, code_of, with_bug
from test_merge import CASES, SINKS, partials_of, strided, with_empty_rows

import gpu_actors as ga
from gpu_actors import KernelSource
from gpu_actors.kernels.keys import check_key
from gpu_actors.kernels.merge.gradients import MergeGradientKey, merge_gradient_keys
from gpu_actors.kernels.variants import kernel_source
from gpu_actors.partial import Partial, oracle_merge, oracle_merge_gradients

_SUBNORMAL = {"float16": 2.0**-25}
_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
FIELDS = ("arch", "dtype", "lse_dtype", "out_dtype", "sinks", "sum_sinks")
REGISTERS = 128  # four blocks of 128 threads a multiprocessor


def gradients_of(partials: list[Partial], dtype: str | None, into_lse: bool, seed: int = 5) -> tuple[Any, Any]:
    """dout, strided like nothing else, and dlse or None."""
    rng = np.random.default_rng(seed)
    out, lse = partials[0]
    dout = rng.standard_normal(out.shape).astype(dtype_of(dtype or out.dtype.name))
    wide = "float64" in (dout.dtype.name, lse.dtype.name)
    dlse = rng.standard_normal(lse.shape).astype(np.float64 if wide else np.float32) if into_lse else None
    return (strided(Partial(dout, lse)).out if seed % 2 == 0 else dout), dlse


def check(
    partials: list[Partial],
    sinks: Any = None,
    dtype: str | None = None,
    into_lse: bool = True,
    seed: int = 5,
    build: Any = None,
    **launch: Any,
) -> None:
    """Raise AssertionError where the kernel differs from float64 by more than the rounding of its sums."""
    dout, dlse = gradients_of(partials, dtype, into_lse, seed)
    got = run_merge_gradients(partials, dout, dlse, sinks, **({} if build is None else {"build": build}), **launch)
    wanted = oracle_merge_gradients(partials, dout, dlse, sinks)
    narrow = "float64" not in (dout.dtype.name, partials[0].out.dtype.name, partials[0].lse.dtype.name)
    unit = 2.0**-20 if narrow else 2.0**-48
    wide = dout.astype(np.float64)
    # What a sum of products is made of, in rows of every head: its rounding is relative to this.
    made = [np.abs(wide * np.nan_to_num(p.out.astype(float), posinf=0, neginf=0)).sum(-1) for p in partials]
    largest = np.max(made, axis=0) + (0 if dlse is None else np.abs(np.swapaxes(dlse, -1, -2)))
    for index, (mine, theirs) in enumerate(zip(got.partials, wanted.partials, strict=True)):
        u = _ROUNDOFF[mine.out.dtype.name]
        bound = (u + 4 * unit) * np.abs(theirs.out) + _SUBNORMAL.get(mine.out.dtype.name, 0)
        close(mine.out, theirs.out, bound, f"dout.{index}")
        u = _ROUNDOFF[mine.lse.dtype.name]
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.nan_to_num(np.abs(theirs.out / wide)).max(-1)
        bound = u * np.abs(theirs.lse) + np.swapaxes(8 * unit * shares * largest, -1, -2)
        close(mine.lse, theirs.lse, bound, f"dlse.{index}")
    if sinks is None:
        assert got.dsinks is None
    else:
        lse = oracle_merge(partials, sinks).lse
        shares = np.swapaxes(np.exp(sinks.astype(float)[:, None] - np.maximum(lse, -1e9)), -1, -2)
        lost = (8 * unit * shares * largest).reshape(-1, sinks.size).sum(axis=0)
        close(got.dsinks, wanted.dsinks, 2.0**-23 * np.abs(wanted.dsinks) + lost, "dsinks")


def close(mine: Any, wanted: Any, bound: Any, name: str) -> None:
    found = mine.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted), f"{name} is NaN elsewhere")
    with np.errstate(invalid="ignore"):
        # Weights of float32 that are subnormal lose digits, and vanish.
        assert np.all((np.abs(found - wanted) <= bound + 2.0**-126) | ~np.isfinite(wanted)), f"{name} differs"
    np.testing.assert_array_equal(found[~np.isfinite(wanted)], wanted[~np.isfinite(wanted)], f"{name} differs")


MORE: dict[str, tuple[list[Partial], Any, str | None, bool, int]] = {
    "without dlse": (partials_of(3), SINKS, None, False, 5),
    "strided dout": (partials_of(3, shape=(2, 3, 4, 72)), None, None, True, 4),
    "wide rows": (partials_of(2, shape=(2, 3, 4, 520)), SINKS, None, True, 5),
    "one column": (partials_of(2, shape=(2, 3, 4, 1)), None, None, True, 5),
    "a merge of float32": (with_empty_rows(partials_of(4)), SINKS, "float32", True, 5),
}
DTYPES: dict[str, tuple[list[Partial], Any, str | None]] = {
    "float16": (with_empty_rows(partials_of(4, "float16")), SINKS.astype(np.float16), None),
    "float32": (with_empty_rows(partials_of(4, "float32")), SINKS, None),
    "float32 to bfloat16": (with_empty_rows(partials_of(4, "float32")), None, "bfloat16"),
    "float64": (with_empty_rows(partials_of(4, "float64", (2, 3, 4, 21))), SINKS.astype(np.float64), None),
    "float64 from bfloat16": (partials_of(3, "float64"), None, "bfloat16"),
    "float32 from float64": (partials_of(3, "float32"), None, "float64"),
}
# A variant that other tests build too, and one whose sums are wider than its LSE.
USUAL = ("float64",)


@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_the_kernel_differentiates_as_the_oracle_does(name: str) -> None:
    case: tuple[Any, ...] = CASES.get(name) or MORE[name]
    check(*case)
    check(*case, schedule="lane")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.sweep) for name in DTYPES]
)
def test_the_kernel_differentiates_every_dtype(name: str) -> None:
    check(*DTYPES[name])


@pytest.mark.sweep
def test_a_wide_lse_stays_wide() -> None:
    partials = [Partial(p.out, p.lse.astype(np.float64)) for p in partials_of(3, "float32")]
    check(partials, SINKS)


def test_what_a_partial_saw_stays_nan_however_small_its_weight() -> None:
    partials = partials_of(2)
    partials[0].lse[...] = 0.0
    partials[1].lse[...] = -90.0
    partials[1].out[0, 1, 0, 3] = np.nan
    partials[1].out[1, 0, 0, 5] = -np.inf
    dout, _ = gradients_of(partials, None, False)
    got = run_merge_gradients(partials, dout)
    for row, head in ((1, 0),):
        assert np.isnan(got.partials[0].lse[0, head, row])
        assert np.isfinite(got.partials[0].out[0, row, head].astype(float)).all()
    assert not np.isfinite(got.partials[0].lse[1, 0, 0])
    seen = np.isfinite(got.partials[0].lse)
    assert np.count_nonzero(~seen) == 2


# What ptxas makes of it


def keys_of(arch: str) -> list[MergeGradientKey]:
    cases = [DTYPES["float32"], DTYPES["float64"], CASES["plain"], DTYPES["float32 to bfloat16"]]
    return [key for case in cases for key in merge_gradient_keys(merge_problem(*case), arch)]


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=() if arch == "sm_90a" else pytest.mark.sweep) for arch in ARCHS]
)
def test_the_variants_pass_the_gate(arch: str) -> None:
    for key in keys_of(arch):
        assert check_key(key) is key
        code = code_of(kernel_source(key), "merge_gradients")
        assert code_faults(code, REGISTERS) == [], key
        if "float64" not in (key.dtype, key.out_dtype) and not key.sum_sinks:
            assert code.count(r"\bLDG\.E\.\S*128\b") != 0, key
            assert code.count(r"\bSTG\.E\.128\b") != 0, key


def test_a_key_is_checked() -> None:
    key = keys_of("sm_80")[0]
    assert isinstance(key, StableText)
    for field, value, kind, named in (
        ("dtype", "int8", ga.InvalidRequest, "dtype"),
        ("lse_dtype", "float16", ga.InvalidRequest, "lse_dtype"),
        ("sum_sinks", 1, ga.InvalidRequest, "sum_sinks"),
        ("arch", "sm_75", ga.Unsupported, "arch"),
    ):
        wrong = MergeGradientKey(**{**{name: getattr(key, name) for name in FIELDS}, field: value})
        with pytest.raises(kind) as caught:
            check_key(wrong)
        assert caught.value.field == named
    options: dict[str, Any] = {"arch": "sm_80", "lse_dtype": "float32", "sinks": False}
    with pytest.raises(ga.InvalidRequest) as caught:
        check_key(MergeGradientKey(dtype="float32", out_dtype="float32", sum_sinks=True, **options))
    assert caught.value.field == "sum_sinks"
    with pytest.raises(ga.Unsupported) as refused:
        check_key(MergeGradientKey(dtype="float16", out_dtype="float64", **options))
    assert (refused.value.field, refused.value.nearest) == ("dout", "float32")


# Seeded bugs

_LOOP = "n < params.count; n++) {\n    const GradientTerm& term = params.terms[n];\n    const Real "
MUTANTS = {
    "an empty row is read": (
        "const bool seen = lse_of(term, row.place) != -INFINITY;",
        "const bool seen = true;",
        "empty",
    ),
    "weights are relative to nothing": (
        "const Real weight = exp_of(lse_of(term.seen, place) - top)",
        "const Real weight = exp_of(lse_of(term.seen, place))",
        "far apart",
    ),
    "rows without keys divide by 0": ("if (total == Real(0)) total = Real(1);", "", "nothing"),
    "rows without keys have no maximum": ("if (top == -INFINITY) top = Real(0);", "", "nothing"),
    "the gain is not divided": ("taken /= total;", "", "plain"),
    "shares are not divided": (
        "lse_of(term.seen, place) - top) / total;\n    Real gain",
        "lse_of(term.seen, place) - top);\n    Real gain",
        "plain",
    ),
    "the mean is not taken off": ("share * (gain - taken)", "share * gain", "plain"),
    "dlse is added": ("taken -= Real(", "taken += Real(", "plain"),
    "dlse is not read": ("if (params.dlse != nullptr) taken", "if (false) taken", "plain"),
    "dlse that is not there is read": ("if (params.dlse != nullptr) taken", "taken", "without dlse"),
    "a sink is not in the sum": ("if constexpr (SINKS) total += exp_of(sink - top);", "", "many"),
    "a sink is not in the maximum": ("Real top = sink;", "Real top = -INFINITY;", "far apart"),
    "a sink gains": ("-share * taken;", "share * taken;", "many"),
    "rows of a sink are left out": ("part < count; part += THREADS", "part + 1 < count; part += THREADS", "many"),
    "threads of a sink are left out": (
        "for (int thread = 1; thread < THREADS",
        "for (int thread = 2; thread < THREADS",
        "many",
    ),
    "heads of sinks are mixed up": (
        "int64_t(place.head) * (params.results / params.heads) + rows",
        "int64_t(rows) * params.heads + place.head",
        "many",
    ),
    "the last term is left out": (f"{_LOOP}weight", "n + 1 < " + f"{_LOOP}weight"[4:], "many"),
    "the last term has no gradient": (f"{_LOOP}share", "n + 1 < " + f"{_LOOP}share"[4:], "plain"),
    "lanes of other rows are added": ("for (int step = lanes / 2; step > 0", "for (int step = 16; step > 0", "plain"),
    "half the lanes are added": ("for (int step = lanes / 2; step > 0", "for (int step = lanes / 4; step > 0", "plain"),
    "only the first groups are added": (
        "first < columns; first += lanes * VECTOR",
        "first < lanes * VECTOR; first += lanes * VECTOR",
        "wide rows",
    ),
    "only the first groups are stored": (
        "first < params.columns; first += params.lanes * VECTOR",
        "first < params.lanes * VECTOR; first += params.lanes * VECTOR",
        "wide rows",
    ),
    "the last block writes past the end": (
        "const bool stores = index < params.results;",
        "const bool stores = true;",
        "more blocks",
    ),
    "dlse lies like out": (
        "(int64_t(place.sequence) * params.heads + place.head) * params.rows + place.row",
        "int64_t(result)",
        "plain",
    ),
    "every lane stores its own gain": ("KEPT && stores && lane == 0", "KEPT && stores && lane == 1", "plain"),
    "dout is taken to be whole": (
        "place.in<const OUT_ELEMENT>(params.dout, params.dout_strides)",
        "static_cast<const OUT_ELEMENT*>(params.dout) + int64_t(result) * params.columns",
        "strided dout",
    ),
    "cut columns are stored whole": (
        "return columns - first < VECTOR ? columns - first : VECTOR;",
        "return VECTOR;",
        "cut columns",
    ),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutants")


@pytest.mark.sweep
@pytest.mark.parametrize("name", MUTANTS)
def test_a_seeded_bug_is_caught(name: str, cache: Path) -> None:
    old, new, case = MUTANTS[name]

    def build(source: KernelSource) -> EmulatedModule:
        bad = with_bug(source, source.name, old, new)
        return build_module(bad.source, dict(bad.macros), dict(bad.headers), cache_dir=cache, entries=bad.entry_points)

    given: tuple[Any, ...] = CASES.get(case) or MORE[case]
    with pytest.raises((AssertionError, EmulationFault)):
        functools.partial(check, build=build)(*given)
