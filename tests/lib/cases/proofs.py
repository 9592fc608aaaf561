"""Proofs of kernels on the emulated device, under several orders of its events."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from cases.matrix_variants import first_variant
from inside.compiling import Variant
from inside.cuda import CudaDevice
from inside.devices import Kernels
from inside.emulation import EmulatedApi
from inside.kernels import (
    FAMILIES,
    MergeProblem,
    merge_gradient_variants,
    merge_variant,
    page_copy_variant,
    variant_of,
)
from inside.qualification import experiments_of, is_proved
from matrix.table import FAMILIES as MATRIX

import gpu_actors as ga

__all__ = ["MERGES", "ORDERS", "covering", "device_of", "prove", "proved_alone", "variants_of_family"]

ORDERS: Sequence[dict[str, Any]] = (
    {"delivery": "late", "schedule": "greedy"},
    # With the errors of a GPU's arithmetic, which must not be taken for those of a wrong kernel.
    {"delivery": "eager", "schedule": "round_robin", "arithmetic": "hardware", "seed": 1},
)
_HANGS = 30.0  # seconds of a launch

_MERGE = MergeProblem(
    count=2, batch=1, rows=1, heads=1, columns=64, dtype="bfloat16", lse_dtype="float32", out_dtype="bfloat16",
    out_lse_dtype="float32", sinks="float32",
)  # fmt: skip
MERGES = {
    "plain": dataclasses.replace(_MERGE, sinks=None),
    "sinks": _MERGE,
    "float16": dataclasses.replace(_MERGE, dtype="float16", out_dtype="float16", sinks="float16"),
    "to bfloat16": dataclasses.replace(_MERGE, dtype="float32"),
}


@functools.cache
def device_of(arch: str, **emulation: Any) -> CudaDevice:
    options = ga.ContextOptions(hang_timeout=_HANGS)
    return CudaDevice(0, options, EmulatedApi(arch, ga.EmulationOptions(**emulation), options))


def prove(variant: Variant, orders: Iterable[dict[str, Any]] = ORDERS) -> int:
    """Run a variant's experiments in each order. Returns how many ran. Raises as `Experiment.prove`."""
    count = 0
    for order in orders:
        device = device_of(variant.arch, **order)
        stream = device.open_stream("proof")
        try:
            for experiment in experiments_of(variant, device):
                assert variant in experiment.variants, "it takes part in what proves it"
                kernels = Kernels(device.build(each.source, each.arch) for each in experiment.variants)
                experiment.prove(stream, kernels, 4 * _HANGS)
                count += 1
        finally:
            stream.close()
    return count


def proved_alone(variant: Variant) -> Variant:
    """The variant, or if it is not proved itself the one that it is launched beside, whose experiments prove both."""
    key = variant.example
    if is_proved(variant) or not isinstance(key, ga.DispatchKey) or key.score_mod is not None:
        return variant
    names = [family.name for family in FAMILIES if key.kernel in family.companions]
    names += ["backward_sm90"] * (key.kernel == "backward_prepare_sm90")
    name = next((name for name in names if name.endswith("sm90") == key.kernel.endswith("sm90")), names[0])
    return variant_of(dataclasses.replace(key, kernel=name))


def variants_of_family(family: str) -> list[Variant]:
    """The proved variants that the rows of a family of the matrix launch first, each once; for merge, of `MERGES`."""
    if family == "merge":
        merges = [merge_variant(problem, "sm_90a") for problem in MERGES.values()]
        return merges + [v for problem in MERGES.values() for v in merge_gradient_variants(problem, "sm_90a")]
    module = MATRIX[family]
    rows = [*((row, False) for row in module.ROWS), *((row, True) for row in module.GRID)]
    found = [variant for row, grid in rows if (variant := first_variant(family, row, grid)) is not None]
    if family == "append":
        found.append(page_copy_variant("sm_90a"))
    return list(dict.fromkeys(one for variant in found if is_proved(one := proved_alone(variant))))


def covering(variants: Sequence[Variant], most: int) -> list[Variant]:
    """At most ``most`` variants, chosen one by one so that each adds the most new pairs of options."""

    def parts(variant: Variant) -> set[Any]:
        own = {(name, value) for name, value in variant.macros.items() if value == 1 or isinstance(value, str)}
        own |= {("kernel", variant.kernel), ("arch", variant.arch)}
        return {frozenset(pair) for pair in itertools.product(own, own)}

    left, chosen, covered = list(variants), [], set[Any]()
    while left and len(chosen) < most:
        best = max(left, key=lambda variant: len(parts(variant) - covered))
        if not parts(best) - covered:
            break
        left.remove(best)
        chosen.append(best)
        covered |= parts(best)
    return chosen
