"""Seeds bugs into forward_wide, one at a time, and shows that the comparison with the oracle catches each.

scripts/mutants forward_wide                 every mutant; writes build/reports/mutation_forward_wide.md
scripts/mutants forward_wide NAME...         only these, and writes nothing
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from emulated import forward as emulated_forward
from inside.testing import poison_unseen
from mutation.forward import seeded
from mutation.forward_mutants import Mutant
from mutation.forward_wide_mutants import MUTANTS
from mutation.run import probes_of, run_mutants

from gpu_actors.testing import random_forward

__all__ = ["PROBES", "run_probes"]

KERNEL = "forward_wide"
LAUNCHES = (("late", "greedy", 0), ("eager", "greedy", 1), ("late", "lane", 1), ("random", "random", 2))

# Problems by name, each of several tiles of keys, and with rows and keys that end inside a tile. On sm_86 there is one
# stage of tiles of 16 keys at head dim 512, on sm_90a there are two of 32 at 320.
_SHAPE: dict[str, Any] = {"dtype": "float16", "head_dim": 512, "seqlens": (40, 75), "varlen": False, "heads": (2, 1)}
PROBES: dict[str, dict[str, Any]] = {
    "plain": {"kind": "rising"},
    "stages": {"kind": "gaussian", "head_dim": 320, "seqlens": (20, 150), "arch": "sm_90a"},
    "odd": {"dtype": "bfloat16", "head_dim": 264, "head_dim_v": 280, "kind": "gaussian"},
    "causal": {"dtype": "bfloat16", "always": ("causal",)},
    "nonfinite": {"seqlens": (60, 60), "always": ("causal",)},
    "options": {"head_dim": 320, "always": ("dropout", "sinks", "bias", "alibi", "softcap")},
}


def run_probes(mutant: Mutant | None, cache: Path, probes: Sequence[str] = ()) -> None:
    """Run a mutant's probes, or these of the kernel as it is.

    Raises AssertionError or EmulationFault from the first that shows a difference.
    """
    with seeded(mutant, cache):
        for name in probes if mutant is None else mutant.probes:
            chosen = {**_SHAPE, "features": (), **PROBES[name]}
            arch = chosen.pop("arch", "sm_86")
            case = poison_unseen(random_forward(len(name), **chosen))
            if name == "nonfinite":
                case.v[0, 33, :, 3::50] = np.nan
            for delivery, schedule, seed in LAUNCHES:
                given: dict[str, Any] = {"delivery": delivery, "schedule": schedule, "seed": seed}
                emulated_forward.check_case(case, kernel=KERNEL, arch=arch, limit_seconds=30.0, **given)


def main(names: list[str]) -> int:
    return run_mutants(
        "forward_wide",
        MUTANTS,
        names,
        lambda chosen, cache: run_probes(None, cache, probes_of(chosen)),
        run_probes,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
