"""Seeds bugs into backward_sm90 and the kernels beside it, one at a time, and shows that the oracle catches each.

scripts/mutants backward_sm90            every mutant; writes build/reports/mutation_backward_sm90.md
scripts/mutants backward_sm90 NAME...    only these, and writes nothing

A mutant is caught as `mutation.backward` says.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cases.finite_masks import hide_first
from emulated import backward as emulated_backward
from emulated.forward import OPERANDS
from inside.testing import poison_unseen_backward
from mutation.backward import answered, beyond_float16, seeded, told
from mutation.backward_sm90_mutants import MUTANTS
from mutation.forward_mutants import Mutant
from mutation.run import probes_of, run_mutants

from gpu_actors.testing import BackwardCase, check_gradients, random_backward

KERNEL = "backward_sm90"
LAUNCHES = (
    ("late", "greedy", 0),
    ("eager", "lane", 1),
    ("random", "random", 2),
    ("late", "lane", 1),
    ("eager", "greedy", 1),
    ("late", "random", 3),
    ("random", "greedy", 0),
)
LIMIT_SECONDS = 20.0

# Problems by name: more tiles of queries than stages, several of keys; rows and keys that end inside a tile.
_SHAPE: dict[str, Any] = {
    "dtype": "float16",
    "head_dim": 64,
    "varlen": False,
    "kind": "gaussian",
    "batch": 1,
    "heads": (1, 1),
    "features": (),
}
PROBES: dict[str, dict[str, Any]] = {
    "plain": {"seqlens": (500, 300)},
    "sent": {"seqlens": (500, 300), "always": ("softcap",)},  # options send dQ through shared memory
    "wide": {"dtype": "bfloat16", "head_dim": 128, "seqlens": (300, 200)},
    "narrow": {"head_dim": 40, "seqlens": (200, 200)},
    "gqa": {"seqlens": (200, 200), "heads": (4, 2), "batch": 2},
    "causal": {"dtype": "bfloat16", "head_dim": 128, "seqlens": (300, 420), "always": ("causal",)},
    "few": {"seqlens": (400, 121), "always": ("causal",)},
    "varlen": {"seqlens": (300, 310), "varlen": True, "batch": 3, "heads": (2, 1), "always": ("causal",)},
    "varlen full": {"seqlens": (300, 310), "varlen": True, "batch": 3, "heads": (2, 1)},
    "long": {"seqlens": (500, 500), "varlen": True, "batch": 2},
    "window": {"seqlens": (400, 600), "always": ("window", "sink_tokens"), "alignment": "top_left"},
    "sinks": {"seqlens": (200, 100), "batch": 2, "heads": (2, 1), "always": ("sinks",)},
    "nonfinite": {"seqlens": (300, 300), "always": ("causal",)},
    "nonfinite q": {"seqlens": (300, 300), "always": ("causal",)},
    "nonfinite key": {"seqlens": (300, 300), "always": ("causal",)},
    "nonfinite value": {"seqlens": (300, 300), "always": ("causal",)},
    "unseen": {"seqlens": (100, 400), "always": ("causal",), "alignment": "top_left"},
    "negative": {"seqlens": (200, 300)},
    "neighbours": {"seqlens": (300, 310), "varlen": True, "batch": 2},
    "large": {"seqlens": (150, 200)},
    "opposite": {"seqlens": (150, 2)},
    "cap": {"seqlens": (150, 200), "kind": "peaked", "always": ("softcap",)},
    "alibi": {"seqlens": (150, 200), "always": ("alibi",)},
    "bias": {"seqlens": (150, 200), "always": ("bias", "causal")},
    "nonfinite bias": {"seqlens": (150, 200), "always": ("bias", "causal")},
    "hidden": {"seqlens": (150, 150), "always": ("bias",)},
    "dropout": {"seqlens": (150, 200), "heads": (2, 1), "always": ("dropout",)},
    "shared": {"dtype": "bfloat16", "head_dim": 256, "seqlens": (400, 150)},
    "shared causal": {"dtype": "bfloat16", "head_dim": 256, "seqlens": (300, 200), "always": ("causal",)},
    "shared mixed": {"dtype": "bfloat16", "head_dim": 192, "head_dim_v": 128, "seqlens": (500, 100), "heads": (2, 1)},
    "shared narrow": {"head_dim": 136, "head_dim_v": 200, "seqlens": (200, 100)},
    "shared nonfinite": {"dtype": "bfloat16", "head_dim": 256, "seqlens": (300, 200), "always": ("causal",)},
    "shared nonfinite key": {"dtype": "bfloat16", "head_dim": 256, "seqlens": (300, 200), "always": ("causal",)},
    "shared turns": {"dtype": "bfloat16", "head_dim": 256, "seqlens": (150, 400)},
    "cap bias": {"seqlens": (150, 200), "kind": "peaked", "always": ("bias", "softcap", "causal")},
    "nonfinite cap bias": {"seqlens": (150, 200), "always": ("bias", "softcap", "causal")},
    "turns": {"seqlens": (200, 700)},
    "turns bias": {"seqlens": (100, 200), "batch": 4, "heads": (4, 4), "always": ("bias",)},
}  # fmt: skip
_OPTIONS: dict[str, dict[str, Any]] = {"window": {"window_size": (150, 30), "sink_tokens": 5}}


def case_of(name: str) -> BackwardCase:
    case = random_backward(len(name), **{**_SHAPE, **PROBES[name]})
    if name == "turns bias":  # shared by every sequence and head
        shared = np.ascontiguousarray(case.options["bias"][:1, :1]).astype(np.float32)
        case = answered(case, {**case.options, "bias": shared})
    if name == "hidden":
        case = answered(case, {**case.options, "bias": hide_first(case.options["bias"])})
    if name in ("large", "opposite"):
        case = beyond_float16(case, name)
    if name == "negative":  # scores so low that the weight of a key past the end is infinite
        case.forward.q[...] += 4
        case.forward.k[...] -= 4
        case = answered(case, case.options)
    if name in ("turns", "shared turns"):  # parts that cancel, as 16 bits show their order
        case.forward.k[...] += 64
        case = answered(case, case.options)
    if name in _OPTIONS:
        case = answered(case, {**case.options, **_OPTIONS[name]})
    if name in ("nonfinite bias", "nonfinite cap bias"):
        case.dout[0, 60, :, 3] = np.nan
    if name == "shared nonfinite":
        case.dout[0, 150, :, 200] = np.nan
    if name == "shared nonfinite key":
        case.forward.k[0, 100, :, 3] = np.nan
        case.lse[0, :, 200:], case.out[0, 200:] = np.nan, np.nan
    if name == "nonfinite":
        case.dout[0, 240, :, 3] = np.nan
    if name == "nonfinite q":
        case.forward.q[0, 140, :, 3] = np.nan
        case.lse[0, :, 140], case.out[0, 140] = np.nan, np.nan
    if name == "nonfinite key":
        case.forward.k[0, 140, :, 3] = np.nan
        case.lse[0, :, 140:], case.out[0, 140:] = np.nan, np.nan
    if name == "nonfinite value":
        case.forward.v[0, 140, :, 3] = np.nan
        case.out[0, 140:, :, 3] = np.nan
    return case


def with_neighbours(case: BackwardCase) -> dict[str, Any]:
    """The inputs by name, with NaN in the second sequence, which the first one's tiles reach into."""
    names = ("dout", "q", "k", "v", "out", "lse")
    arrays = {name: array.copy() for name, array in zip(names, case.inputs, strict=True)}
    rows, keys = (case.options[f"cu_seqlens_{side}"][1] for side in "qk")
    for name in names[:-1]:
        arrays[name][keys if name in "kv" else rows :] = np.nan
    arrays["lse"][:, rows:] = np.nan
    return arrays


def check_first(gradients: Any, clean: Any, case: BackwardCase) -> None:
    """The first sequence has the same bits whatever the second one holds; of dQ, whose sums have no order, nearly."""
    rows, keys = (case.options[f"cu_seqlens_{side}"][1] for side in "qk")
    for name, end in (("dk", keys), ("dv", keys)):
        np.testing.assert_array_equal(getattr(gradients, name)[:end], getattr(clean, name)[:end], err_msg=name)
    found, wanted = (result.dq[:rows].astype(float) for result in (gradients, clean))
    np.testing.assert_allclose(found, wanted, rtol=0.01, atol=0.01, err_msg="dq")


def run_probe(name: str) -> None:
    """Raise AssertionError or EmulationFault where a probe shows a difference."""
    case = case_of(name)
    poisoned = poison_unseen_backward(case)
    deterministic, first = "turns" in name, None
    problem = emulated_backward.backward_problem_of(
        *poisoned.forward.inputs, deterministic=deterministic, **poisoned.options
    )
    if name == "long":  # as if the caller had said too little
        problem = dataclasses.replace(problem, seqlen_q=100, seqlen_k=100)
    operands = dict(zip(("dout", "q", "k", "v", "out", "lse"), poisoned.inputs, strict=True))
    operands |= {option: poisoned.options[option] for option in OPERANDS if option in poisoned.options}
    for delivery, schedule, seed in LAUNCHES:
        launch = {"delivery": delivery, "schedule": schedule, "seed": seed, "limit_seconds": LIMIT_SECONDS}
        if name == "turns bias":  # more blocks at a time than cores, so that the system's clock mixes them
            launch["threads"] = 8
        seeds = {"dropout_seed": case.options.get("dropout_seed", 0)}
        gradients = emulated_backward.run(problem, operands, kernel=KERNEL, **seeds, **launch)
        if name == "neighbours":
            spoilt = {**operands, **with_neighbours(case)}
            check_first(emulated_backward.run(problem, spoilt, kernel=KERNEL, **launch), gradients, case)
        given = {"out": case.out, "lse": case.lse}
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


def main(names: list[str]) -> int:
    return run_mutants(
        "backward_sm90",
        MUTANTS,
        names,
        lambda chosen, cache: run_probes(None, probes_of(chosen), cache),
        lambda mutant, cache: run_probes(mutant, mutant.probes, cache),
        told,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
