"""Seeds bugs into decode_simple and its merge, one at a time, and shows that the comparison catches each.

scripts/mutants decode_simple                 every mutant; writes build/reports/mutation_decode_simple.md
scripts/mutants decode_simple NAME...         only these, and writes nothing
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cases.cached_batches import Batch, random_tree, tree_bits
from emulated.decode import DecodeCase, check_results, device_of, problem_of, run
from inside.kernels import SIMPLE
from inside.testing import round_inputs
from mutation.decode import CAUSAL, SINKS, SLOPES, batch_of, placed, rising, seeded, with_scales
from mutation.decode_simple_mutants import MUTANTS
from mutation.forward_mutants import Mutant
from mutation.run import probes_of, run_mutants

from gpu_actors.testing import check_output

__all__ = ["PROBES", "run_probes"]

LAUNCHES = (("late", "greedy", 0), ("late", "lane", 1), ("random", "random", 2))
PINNED: dict[str, Any] = {**CAUSAL, "num_splits": 3}


def narrow(*lengths: int, **given: Any) -> Any:
    """Head dim 20: no whole chunks of 16 bits, nor a power of two."""
    return batch_of(*lengths, **{"dim": 20, "dtype": "float32", **given})


def tree_of(rows: list[int] | None = None) -> DecodeCase:
    batch, rng = narrow(70, 9, 40, rows=9), np.random.default_rng(0)
    return DecodeCase(batch, rows=rows, tree=np.stack([tree_bits(random_tree(rng, 9)) for _ in batch.k]))


def steep(batch: Batch) -> DecodeCase:
    """Scores that rise by more than the exponents of floats."""
    batch.q *= 16
    return DecodeCase(batch, options={**CAUSAL, "num_splits": 4})


# Problems by name. Most have several tiles of keys, and keys that end inside a tile.
PROBES: dict[str, Callable[[], DecodeCase]] = {
    "plain": lambda: DecodeCase(rising(narrow(300, 0, 5, 40, 140)), options=PINNED),
    "one": lambda: DecodeCase(narrow(40, 9), options={**CAUSAL, "num_splits": 1}),
    "pinned": lambda: DecodeCase(narrow(130, 300), options=PINNED),
    "rows": lambda: DecodeCase(narrow(100, 12, rows=5, heads=(6, 2)), options=PINNED),
    "steep": lambda: steep(rising(narrow(900, heads=(2, 1)))),
    "early rows": lambda: placed(DecodeCase(narrow(80, rows=8, heads=(1, 1)), options=PINNED), q_positions=[[-20, 10]]),
    "alibi": lambda: DecodeCase(narrow(100, 9), options={**PINNED, "alibi_slopes": SLOPES}),
    "alibi rows": lambda: DecodeCase(narrow(100, 9, rows=20), options={**CAUSAL, "alibi_slopes": SLOPES}),
    "varlen": lambda: DecodeCase(
        narrow(100, 12, 70, rows=5, heads=(6, 2)), rows=[5, 0, 2], options={**CAUSAL, "num_splits": 1}
    ),
    "varlen pinned": lambda: DecodeCase(narrow(100, 12, 70, rows=5, heads=(6, 2)), rows=[5, 0, 2], options=PINNED),
    "tree": tree_of,
    "varlen tree": lambda: tree_of([9, 3, 5]),
    "window": lambda: DecodeCase(narrow(300, rows=5), options={**CAUSAL, "window_size": (40, 0), "sink_tokens": 9}),
    "last keys": lambda: placed(
        DecodeCase(narrow(100, 9, 50, rows=5), options={**CAUSAL, "alibi_slopes": SLOPES}),
        k_positions=[[40, 2], [0, 1], [7, 3]],
    ),
    "sinks": lambda: DecodeCase(narrow(170, 9), options={**PINNED, **SINKS}),
    "fp8": lambda: with_scales(narrow(70, 40, dtype="float16", kv_dtype="float8_e4m3fn")),
    "wide": lambda: DecodeCase(rising(narrow(200, dim=130, rows=3)), options={**CAUSAL, "num_splits": 1}),
    "pointers": lambda: DecodeCase(narrow(300, 70, 9, heads=(1, 1), dim=3), "pointers"),
    "odd": lambda: DecodeCase(narrow(100, 9, dim=5), options=CAUSAL),
}


def check_probe(name: str, **launch: Any) -> None:
    launch["kernel"] = SIMPLE
    if name == "tf32":
        check_rounded(PROBES["one"](), **launch)
    elif name == "broken":
        case = DecodeCase(narrow(300, 12, 70, rows=5, heads=(6, 2)), options=PINNED)
        operands = case.operands() | {"cache_seqlens": np.array([300, 1 << 20, 70], np.int32)}
        out, _ = run(case, operands=operands, planned=False, zero=True, **launch)
        assert np.isnan(out[1]).all(), "out differs"
        assert (np.isfinite(out) & (out != 0))[[0, 2]].all(), "out differs"
    elif name == "fp8 pinned":
        case = PROBES["fp8"]()
        case.options["num_splits"] = 3
        check_results(case, *run(case, **launch))
    elif name == "pointers":
        case = PROBES[name]()
        operands = case.operands()
        for key in [key for key in operands if "_cache." in key]:  # addresses that are multiples of 4 alone
            operands[key] = _moved(operands[key])
        check_results(case, *run(case, operands=operands, **launch))
    else:
        case = PROBES[name]()
        check_results(case, *run(case, multiprocessors=4, **launch))


def _moved(array: Any) -> Any:
    memory = device_of().allocate((array.size + 1,), array.dtype.name)
    memory[1:] = array.ravel()
    return memory[1:].reshape(array.shape)


def check_rounded(case: DecodeCase, **launch: Any) -> None:
    """The rows and the LSE of operands rounded to tf32."""
    problem = dataclasses.replace(problem_of(case, case.operands()), compute="tf32")
    out, lse = run(case, problem=problem, **launch)
    k, v, ends = case.batch.packed
    rounded = round_inputs(case.q.reshape(-1, *case.q.shape[-2:]), k, v, "tf32")
    check_output(out[:, 0], lse[:, :, 0].T, *rounded, causal=True, cu_seqlens_q=case.ends, cu_seqlens_k=ends)


def run_probes(mutant: Mutant | None, probes: Sequence[str], cache: Path) -> None:
    """Run these probes of a mutant, or of the kernels as they are. Raises as `mutation.decode.run_probes`."""
    with seeded(mutant, cache) as changed:
        for name in probes:
            for delivery, schedule, seed in LAUNCHES:
                try:
                    check_probe(name, delivery=delivery, schedule=schedule, seed=seed)
                finally:
                    if mutant is not None and not changed:
                        raise LookupError(f"{mutant.name}: no kernel of its probes has {mutant.old!r} in {mutant.file}")


def main(names: list[str]) -> int:
    return run_mutants(
        "decode_simple",
        MUTANTS,
        names,
        lambda chosen, cache: run_probes(None, probes_of(chosen), cache),
        lambda mutant, cache: run_probes(mutant, mutant.probes, cache),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
