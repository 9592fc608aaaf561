"""Seeds bugs into what forward_sm90 has for 8-bit floats, and shows that the comparison with the oracle catches each.

scripts/mutants hopper_fp8            every mutant, some eight seconds each; writes build/reports/mutation_hopper_fp8.md
scripts/mutants hopper_fp8 NAME...    only these, and writes nothing
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.many_keys import check_many_keys, many_keys
from emulated import forward as emulated_forward
from emulated.forward import gaussian, problem_of, run, run_case
from inside.compiling import kernel_file
from inside.emulation import EmulatedModule
from inside.testing import poison_unseen
from mutation.forward import seeded
from mutation.forward_mutants import Mutant
from mutation.hopper_fp8_mutants import MUTANTS
from mutation.run import probes_of, run_mutants

from gpu_actors import KernelSource
from gpu_actors.testing import ForwardCase, check_output, random_forward

KERNEL = "forward_sm90"
E4M3 = "float8_e4m3fn"
LAUNCHES = (("late", "greedy", 0), ("eager", "lane", 1), ("random", "random", 2), ("late", "lane", 1))

# What computes rows again that are not finite would put right what is NaN by mistake.
NONFINITE = "hopper/nonfinite.cuh"
MENDING = "if ((found[0] | found[1]) == 0) return;"

# Problems by name: more tiles of keys than stages, more tiles of rows than the two blocks. Besides, "neighbours" is
# `check_neighbours`, and "many keys" is `check_sums`. "unmended" is `odd` in kernels of `unmended`.
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
    if name == "unmended":
        with unmended():
            run_probe("odd", delivery, schedule, seed)
        return
    case = case_of(name)
    out, lse = run_case(case, kernel=KERNEL, multiprocessors=2, **launch)
    check_output(out, lse, *case.inputs, repro=case.repro, weights_dtype=E4M3, **case.options)


@contextmanager
def unmended() -> Iterator[None]:
    """Have `emulated_forward` build kernels that leave rows as they are which are not finite."""
    build = emulated_forward.module_of

    def without(source: KernelSource) -> EmulatedModule:
        text = source.headers[NONFINITE]
        assert text.count(MENDING) == 1
        return build(
            dataclasses.replace(source, headers={**source.headers, NONFINITE: text.replace(MENDING, "return;")})
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated_forward, "module_of", without)
        yield


def check_neighbours(**launch: Any) -> None:
    """A packed sequence has the same bits whatever the values of the next one are."""
    ends = {name: np.array([0, 170, 270], np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    arrays = {name: gaussian(n, (270, 2, 64), E4M3) for n, name in enumerate("qkv")}
    problem = problem_of(*arrays.values(), **ends)
    clean, _ = run(problem, {**arrays, **ends}, kernel=KERNEL, **launch)
    for array in arrays.values():
        array[170:] = np.nan
    out, _ = run(problem, {**arrays, **ends}, kernel=KERNEL, **launch)
    assert (out[:170] == clean[:170]).all(), "out differs"


def check_sums(keys: int = 32768, head_dim: int = 64, **launch: Any) -> None:
    """Sums over many keys keep what tensor cores would cut off them: `many_keys`."""
    check_many_keys(*answer_many_keys(keys, head_dim, **launch), *many_keys(keys, head_dim))


def answer_many_keys(keys: int, head_dim: int, **launch: Any) -> tuple[Any, Any]:
    q, k, v = many_keys(keys, head_dim)
    return run(problem_of(q, k, v), {"q": q, "k": k, "v": v}, kernel=KERNEL, multiprocessors=1, **launch)


def run_probes(mutant: Mutant, cache: Path, *, bug: bool = True) -> None:
    """Run a mutant's probes, or with ``bug=False`` those of the kernels as they are."""
    with seeded(mutant if bug else None, cache):
        for name in mutant.probes:
            for launch in LAUNCHES:
                run_probe(name, *launch)


def check_clean(chosen: Sequence[Mutant], cache: Path) -> None:
    run_probes(Mutant("none", KERNEL, kernel_file(KERNEL), "", "", probes_of(chosen)), cache, bug=False)


def main(names: list[str]) -> int:
    return run_mutants("hopper_fp8", MUTANTS, names, check_clean, run_probes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
