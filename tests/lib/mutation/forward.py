"""Seeds bugs into the forward kernels, one at a time, and shows that the comparison with the oracle catches each.

    scripts/mutants forward           every mutant, about five seconds each; writes build/reports/mutation_forward.md
    scripts/mutants forward NAME...   only these, and writes nothing

A mutant replaces one piece of a kernel's text. It is caught when one of its probes (a problem, run under several
schedules and deliveries) differs from the oracle by more than the tolerance, or when the emulation finds fault with it.
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
from cases.steady_scores import check_steady
from emulated import contraction
from emulated import forward as emulated_forward
from emulated.far_tensors import check_far
from inside.compiling import kernel_file
from inside.emulation import EmulatedModule, build_module
from inside.testing import poison_unseen
from mutation.forward_mutants import MUTANTS, Mutant
from mutation.run import probes_of, run_mutants

from gpu_actors import KernelSource
from gpu_actors.testing import random_forward

LAUNCHES = (("late", "greedy", 0), ("eager", "greedy", 1), ("late", "lane", 1), ("random", "random", 2))

# Problems by name; "far" is `check_far`, "steady" `check_steady`. Most have more key tiles than the ring has stages,
# and rows and keys that end inside a tile.
_SHAPE: dict[str, Any] = {"heads": (2, 1), "features": ()}
PROBES: dict[str, dict[str, Any]] = {
    "plain": {"dtype": "float16", "head_dim": 32, "seqlens": (150, 300), "varlen": False, "kind": "rising"},
    "batch": {
        "dtype": "float16",
        "head_dim": 32,
        "seqlens": (150, 300),
        "varlen": False,
        "batch": 2,
        "kind": "gaussian",
    },
    "causal": {"dtype": "bfloat16", "head_dim": 32, "seqlens": (137, 300), "varlen": False, "always": ("causal",)},
    "few": {"dtype": "float16", "head_dim": 32, "seqlens": (70, 21), "varlen": False, "always": ("causal",)},
    "varlen": {
        "dtype": "float16",
        "head_dim": 40,
        "seqlens": (150, 210),
        "varlen": True,
        "batch": 3,
        "always": ("causal",),
    },
    "window": {
        "dtype": "float16",
        "head_dim": 32,
        "seqlens": (210, 333),
        "varlen": False,
        "always": ("window", "sink_tokens"),
        "alignment": "top_left",
    },
    "options": {
        "dtype": "float16",
        "head_dim": 32,
        "seqlens": (70, 150),
        "varlen": False,
        "batch": 2,
        "always": ("dropout", "sinks", "bias", "alibi", "softcap"),
    },
    "gqa": {"dtype": "float16", "head_dim": 32, "seqlens": (70, 150), "varlen": False, "heads": (4, 2)},
    "sinks": {
        "dtype": "float16",
        "head_dim": 32,
        "seqlens": (70, 21),
        "varlen": False,
        "kind": "gaussian",
        "always": ("sinks",),
    },
    "nonfinite": {"dtype": "float16", "head_dim": 32, "seqlens": (150, 150), "varlen": False, "always": ("causal",)},
    "hidden": {"dtype": "float16", "head_dim": 32, "seqlens": (70, 150), "varlen": False, "always": ("bias",)},
    "padded": {"dtype": "bfloat16", "head_dim": 40, "head_dim_v": 72, "seqlens": (70, 150), "varlen": False},
    "wide": {"dtype": "float16", "head_dim": 96, "seqlens": (40, 300), "varlen": False, "kind": "gaussian"},
    "float": {"dtype": "float32", "head_dim": 40, "seqlens": (70, 150), "varlen": False, "always": ("causal",)},
}


def mutated(source: KernelSource, mutant: Mutant) -> tuple[str, dict[str, str]]:
    """The kernel's text and headers with the bug. Raises LookupError where there is nothing to replace."""
    files = {kernel_file(mutant.kernel): source.source, **source.headers}
    if mutant.old not in files[mutant.file]:
        raise LookupError(f"{mutant.name}: {mutant.file} has no {mutant.old!r}")
    files[mutant.file] = files[mutant.file].replace(mutant.old, mutant.new)
    return files.pop(kernel_file(mutant.kernel)), files


@contextmanager
def seeded(mutant: Mutant | None, cache: Path) -> Iterator[None]:
    """Have `emulated_forward` build kernels with the bug."""
    clean = emulated_forward.module_of

    def build(source: KernelSource) -> EmulatedModule:
        if mutant is None or source.name != kernel_file(mutant.kernel):  # a request may take other kernels, too
            return clean(source)
        text, headers = mutated(source, mutant)
        macros, compiler = dict(source.macros), contraction.toolchain()
        return build_module(text, macros, headers, compiler, cache, entries=source.entry_points)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated_forward, "module_of", build)
        yield


def run_probes(mutant: Mutant, cache: Path, *, bug: bool = True) -> None:
    """Run a mutant's probes, or with ``bug=False`` those of the kernel as it is.

    Raises AssertionError or EmulationFault from the first that shows a difference.
    """
    with seeded(mutant if bug else None, cache):
        for name in mutant.probes:
            if name == "far":
                for axis in range(3):
                    check_far(mutant.kernel, axis)
                continue
            if name == "steady":
                check_steady(mutant.kernel, arch="sm_86")
                continue
            case = poison_unseen(random_forward(len(name), **{**_SHAPE, **PROBES[name]}))
            if name == "nonfinite":
                case.v[0, 100, :, 3] = np.nan
            if name == "hidden":
                case.options["bias"] = hide_first(case.options["bias"])
            for delivery, schedule, seed in LAUNCHES:
                emulated_forward.check_case(
                    case,
                    compute="tf32" if name == "float" else None,
                    kernel=mutant.kernel,
                    arch="sm_86",
                    delivery=delivery,
                    schedule=schedule,
                    seed=seed,
                    limit_seconds=20.0,
                )


def check_clean(chosen: Sequence[Mutant], cache: Path) -> None:
    for kernel in {mutant.kernel for mutant in chosen}:
        probes = probes_of([mutant for mutant in chosen if mutant.kernel == kernel])
        run_probes(Mutant("none", kernel, kernel_file(kernel), "", "", probes), cache, bug=False)


def main(names: list[str]) -> int:
    return run_mutants("forward", MUTANTS, names, check_clean, run_probes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
