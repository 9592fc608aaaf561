"""Seeds bugs into forward_sm90, one at a time, and shows that the comparison with the oracle catches each.

scripts/mutants hopper            every mutant, some six seconds each; writes build/reports/mutation_hopper.md
scripts/mutants hopper NAME...    only these, and writes nothing
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.finite_masks import hide_first
from cases.score_mods import MODIFICATIONS
from cases.steady_scores import check_steady
from emulated import forward as emulated_forward
from emulated.modified import check_modified, check_modified_nonfinite, modified_case
from inside.compiling import kernel_file
from inside.kernels import variant as sm90_variants
from inside.testing import poison_unseen
from mutation.forward import seeded
from mutation.forward_mutants import Mutant
from mutation.hopper_mutants import MUTANTS
from mutation.run import probes_of, run_mutants

from gpu_actors.testing import ForwardCase, check_output, random_forward

KERNEL = "forward_sm90"
LAUNCHES = (
    ("late", "greedy", 0),
    ("eager", "lane", 1),
    ("random", "random", 2),
    ("late", "lane", 1),
    ("eager", "greedy", 1),
    ("late", "random", 3),
)

# Problems by name: more tiles of keys than stages and more tiles of rows than the two blocks, rows and keys that end
# inside a tile. "neighbours" is `check_neighbours`, "steady" `check_steady`; those of `cases.score_mods` and
# "nonfinite, modified" are score modifications.
_SHAPE: dict[str, Any] = {
    "dtype": "float16",
    "head_dim": 64,
    "varlen": False,
    "batch": 1,
    "heads": (2, 1),
    "features": (),
}
PROBES: dict[str, dict[str, Any]] = {
    "plain": {"seqlens": (400, 700), "kind": "peaked"},
    "outlier": {"seqlens": (200, 700), "kind": "outlier"},
    "causal": {"head_dim": 128, "dtype": "bfloat16", "seqlens": (300, 600), "always": ("causal",)},
    "empty": {"seqlens": (1500, 21), "heads": (1, 1), "always": ("causal",)},
    "few": {"seqlens": (300, 21), "always": ("causal",)},
    "batch": {"seqlens": (200, 300), "batch": 3, "heads": (4, 2), "kind": "gaussian"},
    "sections": {"seqlens": (200, 70), "heads": (14, 7)},
    "varlen": {"seqlens": (300, 500), "varlen": True, "batch": 4, "always": ("causal",)},
    "long": {"seqlens": (500, 300), "varlen": True, "batch": 2},
    "window": {"seqlens": (400, 600), "always": ("window", "sink_tokens"), "alignment": "top_left"},
    "sink tokens": {"seqlens": (400, 300), "always": ("causal", "window", "sink_tokens")},
    "right edge": {"seqlens": (400, 600), "always": ("causal", "window")},
    "wide": {"head_dim": 256, "seqlens": (140, 350), "kind": "peaked"},
    "narrow": {"head_dim": 96, "seqlens": (130, 300)},
    "direct": {"head_dim": 128, "seqlens": (300, 500)},
    "direct varlen": {"head_dim": 256, "seqlens": (300, 300), "varlen": True, "batch": 5, "always": ("causal",)},
    "direct narrow": {"head_dim": 136, "seqlens": (140, 300)},
    "direct nonfinite": {"head_dim": 256, "seqlens": (140, 200), "always": ("causal",)},
    "plain alibi": {"seqlens": (200, 300), "always": ("alibi",)},
    "softcap": {"seqlens": (200, 300), "always": ("softcap",)},
    "signed alibi": {"seqlens": (200, 300), "always": ("alibi",)},
    "dropout": {"seqlens": (200, 300), "batch": 2, "always": ("dropout",)},
    "nonfinite, dropped": {"seqlens": (200, 200), "always": ("causal", "dropout")},
    "bias": {"seqlens": (200, 300), "batch": 2, "always": ("bias",)},
    "odd bias": {"seqlens": (200, 301), "always": ("bias",)},
    "capped bias": {"seqlens": (200, 300), "always": ("bias", "softcap")},
    "mask": {"seqlens": (200, 300), "always": ("bias",)},
    "hidden": {"seqlens": (200, 300), "always": ("bias",)},
    "nonfinite": {"seqlens": (200, 200), "always": ("causal",)},
}  # fmt: skip
assert not PROBES.keys() & MODIFICATIONS.keys(), "a probe of that name would be another problem"
# Bytes that L2 is taken to hold: ten heads of fourteen, so that sections have eight and six.
SECTIONS = {"sections": 5 * 70 * 256}
# Windows that end inside tiles, whatever is drawn.
_OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (150, 30), "sink_tokens": 5},
    "sink tokens": {"window_size": (40, 200), "sink_tokens": 140},
    "right edge": {"window_size": (500, 300)},
    "signed alibi": {"alibi_signed": True},
}


def case_of(name: str) -> ForwardCase:
    case = random_forward(len(name), **{**_SHAPE, **PROBES[name]})
    case = dataclasses.replace(case, options={**case.options, **_OPTIONS.get(name, {})})
    case = poison_unseen(case)
    if "nonfinite" in name:
        case.v[0, 100, :, 3::59] = np.inf if "dropped" in name else np.nan
    if name == "hidden":
        case.options["bias"] = hide_first(case.options["bias"])
    if name == "mask":
        case.options["bias"] = case.options["bias"] > -0.5
    return case


def run_probe(name: str, delivery: Any, schedule: Any, seed: int) -> None:
    """Raise AssertionError or EmulationFault where a probe shows a difference."""
    if name == "neighbours":
        check_neighbours(delivery=delivery, schedule=schedule, seed=seed)
        return
    if name == "steady":
        check_steady(KERNEL, delivery=delivery, schedule=schedule, seed=seed)
        return
    if name in MODIFICATIONS:
        modified = modified_case(name, "float16", seed, 64, 150, 300, causal=False)
        check_modified(modified, causal=False, kernel=KERNEL, delivery=delivery, schedule=schedule, seed=seed)
        return
    if name == "nonfinite, modified":
        check_modified_nonfinite(KERNEL, delivery=delivery, schedule=schedule, seed=seed)
        return
    case = case_of(name)
    problem = emulated_forward.problem_of(*case.inputs, **case.options)
    if name == "long":  # as if the caller had said too little
        problem = dataclasses.replace(problem, seqlen_q=100)
    operands = dict(zip("qkv", case.inputs, strict=True))
    operands |= {n: case.options[n] for n in emulated_forward.OPERANDS if n in case.options}
    with pytest.MonkeyPatch.context() as patch:
        if name in SECTIONS:
            patch.setattr(sm90_variants, "_L2_BYTES", SECTIONS[name])
        sm90_variants.sections_of.cache_clear()
        out, lse = emulated_forward.run(
            problem,
            operands,
            kernel=KERNEL,
            dropout_seed=case.options.get("dropout_seed", 0),
            multiprocessors=2,
            delivery=delivery,
            schedule=schedule,
            seed=seed,
            limit_seconds=20.0,
        )
    sm90_variants.sections_of.cache_clear()
    check_output(out, lse, *case.inputs, repro=case.repro, **case.options)


def check_neighbours(**launch: Any) -> None:
    """A packed sequence has the same bits whatever the values of the next one are."""
    ends = {name: np.array([0, 70, 170], np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    arrays = {name: emulated_forward.gaussian(n, (170, 2, 64), "float16") for n, name in enumerate("qkv")}
    problem = emulated_forward.problem_of(*arrays.values(), causal=True, **ends)
    clean, _ = emulated_forward.run(problem, {**arrays, **ends}, kernel=KERNEL, **launch)
    for array in arrays.values():
        array[70:] = np.nan
    out, _ = emulated_forward.run(problem, {**arrays, **ends}, kernel=KERNEL, **launch)
    assert (out[:70] == clean[:70]).all(), "out differs"


def run_probes(mutant: Mutant, cache: Path, *, bug: bool = True) -> None:
    """Run a mutant's probes, or with ``bug=False`` those of the kernel as it is."""
    with seeded(mutant if bug else None, cache):
        for name in mutant.probes:
            for launch in LAUNCHES:
                run_probe(name, *launch)


def told(message: str) -> str:
    """What the message of a failed probe says: the output that differs, else the counter."""
    what = message.split(" ", 1)[0]
    return f"{what} differs" if what in ("out", "lse") else "the counter differs"


def check_clean(chosen: Sequence[Mutant], cache: Path) -> None:
    run_probes(Mutant("none", KERNEL, kernel_file(KERNEL), "", "", probes_of(chosen)), cache, bug=False)


def main(names: list[str]) -> int:
    return run_mutants("hopper", MUTANTS, names, check_clean, run_probes, told)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
