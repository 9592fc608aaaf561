"""Seeds bugs into the backward kernels, one at a time, and shows that the comparison with the oracle catches each.

scripts/mutants backward            every mutant, about ten seconds each; writes build/reports/mutation_backward.md
scripts/mutants backward NAME...    only these, and writes nothing

A mutant is caught when one of its probes differs from the oracle by more than the tolerance, when a probe that asks for
it does not repeat its bits, or when the emulation finds fault with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.finite_masks import hide_first
from emulated import backward as emulated_backward
from emulated.gradients import answered
from inside.compiling import kernel_file
from inside.emulation import EmulatedModule, build_module
from inside.testing import poison_unseen_backward
from mutation.backward_mutants import MUTANTS
from mutation.forward import mutated
from mutation.forward_mutants import Mutant
from mutation.run import probes_of, run_mutants

from gpu_actors import KernelSource
from gpu_actors.testing import BackwardCase, check_gradients, random_backward

LAUNCHES = (("late", "greedy", 0), ("eager", "greedy", 1), ("late", "lane", 1), ("random", "random", 2))
LIMIT_SECONDS = 40.0

# Problems by name. Most have more tiles of queries than the ring has stages, and rows and keys that end inside a tile.
_SHAPE: dict[str, Any] = {
    "dtype": "float16",
    "head_dim": 32,
    "varlen": False,
    "kind": "gaussian",
    "batch": 1,
    "heads": (2, 1),
    "features": (),
}
_FLOATS: dict[str, Any] = {"dtype": "float32", "head_dim": 64}
_PLAIN: dict[str, Any] = {"dtype": "float32", "head_dim": 20}
_ALL = ("dropout", "sinks", "bias", "alibi", "softcap")
PROBES: dict[str, dict[str, Any]] = {
    "plain": {"seqlens": (210, 150)},
    "late": {"seqlens": (70, 150)},
    "pairs": {"dtype": "bfloat16", "head_dim": 128, "seqlens": (150, 200)},  # of 16 keys and 16 rows of dQ a warp
    "large": {"seqlens": (70, 150)},
    "opposite": {"seqlens": (70, 2)},
    "batch": {"seqlens": (150, 200), "batch": 2},
    "causal": {"seqlens": (290, 290), "always": ("causal",)},
    "edge": {"seqlens": (150, 212), "always": ("causal",)},  # tiles with one hidden pair
    "few": {"seqlens": (150, 21), "always": ("causal",)},
    "varlen": {"seqlens": (150, 210), "varlen": True, "batch": 3, "always": ("causal",)},
    "window": {"seqlens": (333, 410), "always": ("window", "sink_tokens"), "alignment": "top_left"},
    "options": {"seqlens": (70, 150), "batch": 2, "kind": "peaked", "always": _ALL},
    "sinks": {"seqlens": (250, 21), "batch": 12, "heads": (1, 1), "always": ("sinks",)},
    "gqa": {"seqlens": (70, 150), "heads": (4, 2)},
    "wide": {"dtype": "bfloat16", "head_dim": 256, "seqlens": (100, 100), "always": ("causal",)},
    "wide dq": {"dtype": "bfloat16", "head_dim": 256, "seqlens": (40, 60), "always": ("softcap",)},
    "passes": {"dtype": "bfloat16", "head_dim": 128, "seqlens": (70, 100), "always": ("dropout",)},
    "float": {"dtype": "float32", "head_dim": 96, "seqlens": (70, 150), "always": ("causal",)},
    "redundant": {"dtype": "float32", "head_dim": 256, "seqlens": (40, 40), "always": ("bias",)},
    "nonfinite": {"seqlens": (150, 150), "always": ("causal",)},
    "nonfinite bias": {"seqlens": (150, 150), "always": ("causal", "bias")},
    "hidden": {"seqlens": (150, 150), "always": ("bias",)},
    "nonfinite key": {"seqlens": (150, 150), "always": ("causal",)},
    # Floats, whose gradients show the last bits of their sums.
    "turns": {**_FLOATS, "seqlens": (90, 610)},
    "turns window": {**_FLOATS, "seqlens": (350, 350), "always": ("window",), "alignment": "top_left"},
    "turns bias": {**_FLOATS, "seqlens": (40, 150), "batch": 3, "always": ("bias",)},
    # Of backward_simple.
    "simple": {**_PLAIN, "seqlens": (70, 90)},
    "simple causal": {**_PLAIN, "seqlens": (70, 90), "always": ("causal",)},
    "simple varlen": {**_PLAIN, "seqlens": (70, 90), "varlen": True, "batch": 3, "always": ("causal",)},
    "simple window": {**_PLAIN, "seqlens": (133, 150), "always": ("window", "sink_tokens"), "alignment": "top_left"},
    "simple options": {**_PLAIN, "seqlens": (40, 50), "batch": 2, "kind": "peaked", "always": _ALL},
    "simple gqa": {**_PLAIN, "seqlens": (40, 50), "heads": (4, 2)},
    "simple few": {**_PLAIN, "seqlens": (90, 20), "always": ("causal",)},
    "simple double": {**_PLAIN, "dtype": "float64", "seqlens": (40, 50), "always": ("softcap",)},
    "simple nonfinite": {**_PLAIN, "seqlens": (70, 70), "always": ("causal",)},
}
ARCHS = {"late": "sm_90a", "pairs": "sm_80"}


def kernel_of(probe: str) -> str:
    return "backward_simple" if probe.startswith("simple") else "backward_mma"


def compute_of(probe: str, dtype: str) -> str | None:
    return "tf32" if dtype == "float32" and kernel_of(probe) == "backward_mma" else None


@contextmanager
def seeded(mutant: Mutant | None, cache: Path) -> Iterator[None]:
    """Have `emulated_backward` build kernels, one of them with the bug."""

    def build(source: KernelSource) -> EmulatedModule:
        macros = dict(source.macros)
        if mutant is None or source.name != kernel_file(mutant.kernel):
            return build_module(source.source, macros, dict(source.headers), entries=source.entry_points)
        text, headers = mutated(source, mutant)
        return build_module(text, macros, headers, cache_dir=cache, entries=source.entry_points)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated_backward, "module_of", build)
        yield


def case_of(name: str) -> BackwardCase:
    choices = {**_SHAPE, **PROBES[name]}
    compute = compute_of(name, choices["dtype"])
    case = random_backward(len(name), compute=compute, **choices)
    if name == "turns bias":  # shared by every sequence and head
        case.options["bias"] = np.ascontiguousarray(case.options["bias"][:1, :1])
    if name == "options":  # of the type that backward_finish turns sums into
        case.options["bias"] = case.options["bias"].astype(np.float16)
    if name == "hidden":
        case = answered(case, {**case.options, "bias": hide_first(case.options["bias"])})
    if name in ("large", "opposite"):
        case = beyond_float16(case, name)
    if name in ("nonfinite", "nonfinite bias"):
        case.dout[0, 100, :, 3] = np.nan
    if name == "simple nonfinite":
        case.dout[0, 40, :, 3] = np.nan
    if name == "nonfinite key":
        case.forward.k[0, 100, :, 3] = np.nan
        case.lse[0, :, 100:], case.out[0, 100:] = np.nan, np.nan
    return case


def beyond_float16(case: BackwardCase, name: str) -> BackwardCase:
    """The case with a dS that float16 does not hold."""
    case.forward.q[...] *= np.float16(0.01)
    if name == "large":
        case.dout[...] *= 3000
    else:  # V of the two keys is opposite: so is their dP, and delta is 0
        case.dout[...] *= 1000
        case.forward.v[:, 1] = -case.forward.v[:, 0]
        case.forward.k[...] *= np.float16(0.1)
    case.forward.v[...] *= 20
    return answered(case, case.options)


def run_probe(name: str) -> None:
    """Raise AssertionError or EmulationFault where a probe shows a difference."""
    case = case_of(name)
    compute = compute_of(name, case.dout.dtype.name)
    poisoned = poison_unseen_backward(case)
    deterministic, first = name.startswith("turns"), None
    for delivery, schedule, seed in LAUNCHES * (3 if deterministic else 1):
        gradients = emulated_backward.run_case(
            poisoned,
            compute=compute,
            deterministic=deterministic,
            arch=ARCHS.get(name, "sm_86"),
            kernel=kernel_of(name),
            delivery=delivery,
            schedule=schedule,
            seed=seed,
            limit_seconds=LIMIT_SECONDS,
        )
        given = {"out": case.out, "lse": case.lse, "compute": compute}
        check_gradients(gradients, *case.arguments, repro=case.repro, **given, **case.options)
        first = first or gradients
        if deterministic:
            np.testing.assert_array_equal(gradients.dq, first.dq, err_msg="dq does not repeat")
            if gradients.dbias is not None:
                np.testing.assert_array_equal(gradients.dbias, first.dbias, err_msg="dbias does not repeat")


def run_probes(mutant: Mutant | None, probes: Sequence[str], cache: Path) -> None:
    """Run these probes of a mutant, or of the kernels as they are."""
    with seeded(mutant, cache):
        for probe in probes:
            run_probe(probe)


def told(message: str) -> str:
    """What the message of a failed probe says: that a gradient does not repeat, or which one differs."""
    return "bits differ" if "does not repeat" in message else f"{message.split(' ', 1)[0]} differs"


def check_clean(chosen: Sequence[Mutant], cache: Path) -> None:
    run_probes(None, probes_of(chosen), cache)


def run_own_probes(mutant: Mutant, cache: Path) -> None:
    run_probes(mutant, mutant.probes, cache)


def main(names: list[str]) -> int:
    return run_mutants("backward", MUTANTS, names, check_clean, run_own_probes, told)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
