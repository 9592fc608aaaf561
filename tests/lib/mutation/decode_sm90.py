"""Seeds bugs into decode_sm90, one at a time, and shows that the comparison with the oracle catches each.

scripts/mutants decode_sm90                 every mutant; writes build/reports/mutation_decode_sm90.md
scripts/mutants decode_sm90 NAME...         only these, and writes nothing
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from emulated.decode import DecodeCase, check_results, run
from inside.kernels import NAME
from mutation.decode import batch_of, narrow, rising, seeded, tree_case, with_nan, with_scales
from mutation.decode_sm90_mutants import MUTANTS
from mutation.forward_mutants import Mutant
from mutation.run import probes_of, run_mutants

__all__ = ["PROBES", "run_probes"]

LAUNCHES = (
    ("late", "greedy", 0),
    ("eager", "greedy", 1),
    ("late", "lane", 1),
    ("random", "random", 2),
    ("eager", "lane", 3),
)
CAUSAL: dict[str, Any] = {"causal": True}
SHAPE: dict[str, Any] = {"rows": 9, "heads": (4, 2), "dim": 128, "dtype": "bfloat16"}


def wide(*lengths: int, **given: Any) -> Any:
    return batch_of(*lengths, **{**SHAPE, **given})


def rise_of_lower_rows() -> DecodeCase:
    """Scores of rows g + 8 rise with the key, and those of rows g fall: 16 packed rows of one head."""
    batch = wide(300, rows=16, heads=(1, 1))
    ramp = np.linspace(-3.0, 3.0, 300)[:, None, None]
    batch.q[:, :8], batch.q[:, 8:] = -0.25, 0.25
    batch.k[0] = np.broadcast_to(ramp, batch.k[0].shape).astype(batch.k[0].dtype)
    return DecodeCase(batch)


# Problems by name. Keys end inside a tile, and of "long" they are more tiles than there are stages.
PROBES: dict[str, Callable[[], DecodeCase]] = {
    "plain": lambda: DecodeCase(rising(wide(300, 0, 5, 170)), options=CAUSAL),
    "long": lambda: DecodeCase(rising(wide(1500)), page_size=8, options=CAUSAL),
    "short": lambda: DecodeCase(wide(60, heads=(2, 1))),  # one tile of keys in all
    "two": lambda: DecodeCase(rising(wide(700, 90, rows=40)), options=CAUSAL),
    "odd pages": lambda: DecodeCase(wide(300, 70), page_size=24, options=CAUSAL),
    "cache": lambda: DecodeCase(wide(300, 70, 9), "cache", options=CAUSAL),
    "narrow": lambda: DecodeCase(wide(300, 70, dim=40), options=CAUSAL),
    "window": lambda: DecodeCase(wide(300, 70), options={**CAUSAL, "window_size": (90, -1), "sink_tokens": 5}),
    "tree": lambda: DecodeCase(wide(300, 9, 130), tree=tree_case().tree),
    "alibi": lambda: DecodeCase(
        wide(300, 70), options={**CAUSAL, "alibi_slopes": np.array([0.1, 0.2, 0.4, 0.3], np.float32)}
    ),
    "rise": rise_of_lower_rows,
    "sinks": lambda: DecodeCase(
        wide(170, 90), options={**CAUSAL, "sinks": np.array([1.0, 3.0, -1.0, 2.0], np.float32)}
    ),
    "fp8": lambda: with_scales(wide(300, 70, 1000, kv_dtype="float8_e4m3fn")),
    "fp8 q": lambda: narrow(wide(300, 70, dtype="float8_e4m3fn")),
    "fp8 q NaN": lambda: narrow(wide(300, 70, dtype="float8_e4m3fn"), nan=True),
    "nonfinite": lambda: DecodeCase(with_nan(wide(300, 70), 297), options=CAUSAL),
    "nonfinite two": lambda: DecodeCase(with_nan(wide(300, 70, rows=40), 290), options=CAUSAL),
}


def check_probe(name: str, **launch: Any) -> None:
    case = PROBES[name]()
    launch |= {"arch": "sm_90a", "kernel": NAME, "multiprocessors": 1 if name == "long" else 3}
    check_results(case, *run(case, **launch))


def run_probes(mutant: Mutant | None, probes: Sequence[str], cache: Path) -> None:
    """Run these probes of a mutant, or of the kernel as it is."""
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
        "decode_sm90",
        MUTANTS,
        names,
        lambda chosen, cache: run_probes(None, probes_of(chosen), cache),
        lambda mutant, cache: run_probes(mutant, mutant.probes, cache),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
