"""Seeds bugs into what forward_sm90 has for 8-bit floats, and shows that the comparison with the oracle catches each.

scripts/mutants hopper_fp8            every mutant, some eight seconds each; writes docs/reports/mutation_hopper_fp8.md
scripts/mutants hopper_fp8 NAME...    only these, and writes nothing
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from cases.many_keys import check_many_keys, many_keys
from emulated import forward as emulated_forward
from emulated.forward import gaussian, key_of, problem_of, run, run_case
from mutation.forward import seeded
from mutation.forward_mutants import Mutant
from mutation.hopper_fp8_mutants import MUTANTS
from mutation.run import kernel_and_name, probes_of, run_mutants

from gpu_actors.compiling.assets import kernel_file
from gpu_actors.devices.emulation import EmulatedBuffer
from gpu_actors.kernels.hopper.transpose_v import TRANSPOSED
from gpu_actors.kernels.program import NO_VALUES
from gpu_actors.kernels.tiles import tile_of
from gpu_actors.kernels.variants import kernel_source
from gpu_actors.testing.problems import ForwardCase, poison_unseen, random_forward
from gpu_actors.testing.tolerance import check_output

KERNEL = "forward_sm90"
E4M3 = "float8_e4m3fn"
REPORT = Path(__file__).resolve().parents[3] / "docs" / "reports" / "mutation_hopper_fp8.md"
LAUNCHES = (("late", "greedy", 0), ("eager", "lane", 1), ("random", "random", 2), ("late", "lane", 1))

# Problems by name: more tiles of keys than stages, more tiles of rows than the two blocks. Besides, "neighbours" is
# `check_neighbours`, "many keys" `check_sums`, "transposed" and "transposed varlen" are `check_transposed_v`.
_SHAPE: dict[str, Any] = {
    "dtype": E4M3,
    "head_dim": 64,
    "varlen": False,
    "batch": 1,
    "heads": (2, 1),
    "features": (),
    "kind": "gaussian",
}
_CAUSAL = ("causal", "descales")
PROBES: dict[str, dict[str, Any]] = {
    "causal": {"seqlens": (300, 600), "always": _CAUSAL, "kind": "rising"},
    "odd": {"seqlens": (130, 301)},
    "batch": {"seqlens": (150, 200), "batch": 2, "heads": (3, 3), "always": _CAUSAL},
    "varlen": {"seqlens": (130, 300), "varlen": True, "batch": 4, "always": _CAUSAL},
    "wide tile": {"head_dim": 128, "seqlens": (130, 700), "always": ("descales",)},
    "beside": {"head_dim": 128, "seqlens": (130, 500), "always": _CAUSAL},
    "wide head": {"head_dim": 256, "seqlens": (130, 500), "always": ("descales",), "kind": "rising"},
    "faint": {"seqlens": (70, 601), "heads": (1, 1)},
    "e5m2": {"dtype": "float8_e5m2", "seqlens": (130, 300), "always": _CAUSAL},
    "e5m2 faint": {"dtype": "float8_e5m2", "seqlens": (70, 601), "heads": (1, 1)},
    "nonfinite": {"seqlens": (200, 200), "always": _CAUSAL},
    "negative": {"seqlens": (300, 300), "always": _CAUSAL},
    "zero": {"seqlens": (150, 200), "always": _CAUSAL},
    "nan": {"seqlens": (200, 70), "always": _CAUSAL},
    "capped": {"seqlens": (70, 70), "always": ("softcap", "descales")},
}
_Q_DESCALE = {"negative": -1.5, "zero": 0.0, "nan": np.nan, "capped": np.inf}


def case_of(name: str) -> ForwardCase:
    case = poison_unseen(random_forward(len(name), **{**_SHAPE, **PROBES[name]}))
    if name == "nonfinite":
        case.v[0, 100, :, 3] = np.nan
    if name in ("faint", "e5m2 faint"):  # one key of the largest weight, and many that e4m3 would round to 0
        arrays = {part: np.zeros(array.shape) for part, array in zip("qkv", case.inputs, strict=True)}
        arrays["q"][..., 0], arrays["k"][:, 0, :, 0], arrays["v"][:, 1:] = 8.0, 7.0, 1.0
        scale = {"softmax_scale": 0.125}
        cast = {part: array.astype(case.q.dtype) for part, array in arrays.items()}
        return dataclasses.replace(case, **cast, options={**case.options, **scale})
    if name in _Q_DESCALE:
        value = np.full_like(case.options["q_descale"], _Q_DESCALE[name])
        return dataclasses.replace(case, options={**case.options, "q_descale": value})
    return case


def run_probe(name: str, delivery: Any, schedule: Any, seed: int) -> None:
    """Raise AssertionError or EmulationFault where a probe shows a difference."""
    launch = {"delivery": delivery, "schedule": schedule, "seed": seed, "limit_seconds": 20.0}
    if name == "neighbours":
        check_neighbours(**launch)
        return
    if name == "many keys":
        check_sums(**launch)
        return
    if name.startswith("transposed"):
        check_transposed_v(name.endswith("varlen"), **launch)
        return
    case = case_of(name)
    out, lse = run_case(case, kernel=KERNEL, multiprocessors=2, **launch)
    check_output(out, lse, *case.inputs, repro=case.repro, weights_dtype=E4M3, **case.options)


def check_neighbours(**launch: Any) -> None:
    """A packed sequence has the same bits whatever the values of the next one are."""
    ends = {name: np.array([0, 70, 170], np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    arrays = {name: gaussian(n, (170, 2, 64), E4M3) for n, name in enumerate("qkv")}
    problem = problem_of(*arrays.values(), **ends)
    clean, _ = run(problem, {**arrays, **ends}, kernel=KERNEL, **launch)
    for array in arrays.values():
        array[70:] = np.nan
    out, _ = run(problem, {**arrays, **ends}, kernel=KERNEL, **launch)
    assert (out[:70] == clean[:70]).all(), "out differs"


def check_sums(keys: int = 32768, head_dim: int = 64, **launch: Any) -> None:
    """Sums over many keys keep what tensor cores would cut off them: `many_keys`."""
    check_many_keys(*answer_many_keys(keys, head_dim, **launch), *many_keys(keys, head_dim))


def answer_many_keys(keys: int, head_dim: int, **launch: Any) -> tuple[Any, Any]:
    q, k, v = many_keys(keys, head_dim)
    return run(problem_of(q, k, v), {"q": q, "k": k, "v": v}, kernel=KERNEL, multiprocessors=1, **launch)


# The keys of 16 positions.
_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


def check_transposed_v(varlen: bool, **launch: Any) -> None:
    """The transposed values themselves: what forward_sm90 finds to be NaN it would read again from V."""
    lengths = (3, 0, 128, 140, 0) if varlen else (150, 150)
    heads, dim, dim_v, start = 2, 64, 80, 0
    rows = (sum(lengths),) if varlen else (len(lengths), lengths[0])
    v = np.random.default_rng(0).integers(0, 127, (*rows, heads, dim_v)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    q = np.zeros((*rows, heads, dim), ml_dtypes.float8_e4m3fn)
    ends = np.cumsum((0, *lengths)).astype(np.int32)
    options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends} if varlen else {}
    problem = problem_of(q, q, v, **options)
    key = key_of(problem, "sm_90a", KERNEL)
    program = emulated_forward.program_on(problem, key)
    part, tile, spec = program.parts[0], tile_of(key).block_n, program.scratch[TRANSPOSED]
    arrays = {"v": v, TRANSPOSED: np.full(spec.shape, 0xFF, np.uint8).view(v.dtype), "cu_seqlens_k": ends}
    memory = {name: EmulatedBuffer.of(array, name) for name, array in arrays.items()}
    buffers = {name: emulated_forward.describe(array, array, memory[name].address) for name, array in arrays.items()}
    params = part.pack(buffers, NO_VALUES)
    module = emulated_forward.module_of(kernel_source(part.key))
    module.launch(part.key.kernel, *part.geometry, params, list(memory.values()), **launch)
    found = memory[TRANSPOSED].array.reshape(spec.shape)
    for n, length in enumerate(lengths):
        whole = -(-length // tile) * tile
        values = (v[ends[n] : ends[n + 1]] if varlen else v[n]).view(np.uint8)
        padded = np.concatenate([values, np.zeros((whole - length, heads, dim_v), np.uint8)])
        wanted = padded.reshape(-1, 16, heads, dim_v)[:, _ORDER].reshape(whole, heads, dim_v).transpose(1, 2, 0)
        start = (int(ends[n]) + n * (tile - 1)) // tile * tile if varlen else 0
        got = found[0 if varlen else n, ..., start : start + whole]
        assert (got == wanted).all(), "transposed V differs"


def run_probes(mutant: Mutant, cache: Path, *, bug: bool = True) -> None:
    """Run a mutant's probes, or with ``bug=False`` those of the kernels as they are."""
    with seeded(mutant if bug else None, cache):
        for name in mutant.probes:
            for launch in LAUNCHES:
                run_probe(name, *launch)


def check_clean(chosen: Sequence[Mutant], cache: Path) -> None:
    run_probes(Mutant("none", KERNEL, kernel_file(KERNEL), "", "", probes_of(chosen)), cache, bug=False)


def main(names: list[str]) -> int:
    return run_mutants(MUTANTS, names, check_clean, run_probes, kernel_and_name, REPORT, _REPORT)


_REPORT = """# Mutation run of the Hopper forward kernel on e4m3

`scripts/mutants hopper_fp8` seeds each of these bugs into forward_sm90, or into transpose_v, which runs
before it, and compares the emulated result with the oracle under several schedules and deliveries. {caught}.

| kernel | bug | probes | caught by |
|---|---|---|---|
{rows}
"""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
