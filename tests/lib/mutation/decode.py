"""Seeds bugs into the decode kernels, one at a time, and shows that the comparison with the oracle catches each.

    scripts/mutants decode                 every mutant, some ten seconds each; writes build/reports/mutation_decode.md
    scripts/mutants decode NAME...         only these, and writes nothing

As mutation.py does for the forward kernels; a bug in a header is in each of the kernels that includes it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.cached_batches import Batch, random_batch, random_tree, tree_bits
from cases.steady_scores import check_steady_decode
from emulated import contraction
from emulated import decode as emulated_decode
from emulated.decode import DecodeCase, check_results, key_of, positions_on_the_device, problem_of, run
from emulated.far_pages import check_far_pages, check_far_rows
from inside.devices import Kernel
from inside.emulation import build_module
from inside.kernels import split_decode
from mutation.decode_mutants import DECODE_MUTANTS
from mutation.forward_mutants import Mutant
from mutation.run import probes_of, run_mutants

from gpu_actors import KernelSource

LAUNCHES = (("late", "greedy", 0), ("eager", "greedy", 1), ("late", "lane", 1), ("random", "random", 2))


def batch_of(*lengths: int, rows: int = 1, heads: tuple[int, int] = (4, 2), **given: Any) -> Batch:
    batch = random_batch(3, lengths, rows=rows, heads=heads, **{"dim": 32, "dtype": "float16", **given})
    return batch


def rising(batch: Batch) -> Batch:
    """The same with scores that rise with the key, so that every tile and piece has a maximum of its own."""
    batch.q = np.abs(batch.q)
    for index, keys in enumerate(batch.k):
        ramp = np.linspace(0.0, 4.0, len(keys))[:, None, None]
        batch.k[index] = (np.abs(keys.astype(np.float32)) * ramp).astype(keys.dtype)
    return batch


def with_scales(batch: Batch) -> DecodeCase:
    shape = len(batch.k), batch.k[0].shape[1]
    scales = np.random.default_rng(5).uniform(0.5, 2.0, (2, *shape)).astype(np.float32)
    scales[:, 0, 0] *= -1
    return DecodeCase(batch, options={"causal": True, "k_descale": scales[0], "v_descale": scales[1]})


def narrow(batch: Batch, nan: bool = False) -> DecodeCase:
    """q and the cache in e4m3, under descales of all three. nan: a column of q's first row is no number."""
    case = with_scales(batch)
    if nan:
        batch.q[0, 0, 0, 5] = np.nan
    scales = np.random.default_rng(6).uniform(0.5, 2.0, case.options["k_descale"].shape).astype(np.float32)
    case.options["q_descale"] = scales * np.where(np.arange(len(scales))[:, None] == 1, -1, 1).astype(np.float32)
    return case


def with_nan(batch: Batch, key: int, column: int = 3) -> Batch:
    batch.v[0][key, :, column] = np.nan
    return batch


def latent(batch: Batch, nan: int | None = None) -> DecodeCase:
    """Values are the first columns of keys. nan: a column of keys that some rows do not see, which is NaN there."""
    for keys in batch.k if nan is not None else ():
        keys[-3, :, nan] = np.nan
    columns = 512 if batch.q.shape[-1] == 576 else 16
    batch.v = [np.ascontiguousarray(keys[..., :columns]) for keys in batch.k]
    return DecodeCase(batch, latent=True, options=CAUSAL)


def tree_case() -> DecodeCase:
    batch = batch_of(300, 9, 130, rows=9)
    rng = np.random.default_rng(0)
    return DecodeCase(batch, tree=np.stack([tree_bits(random_tree(rng, 9)) for _ in batch.k]))


def placed(case: DecodeCase | None = None, **positions: list[list[int]]) -> DecodeCase:
    """A case whose rows and keys have positions; without one of another kind, under every mask and ALiBi."""
    if case is None:
        masks = {"causal": True, "window_size": (300, 0), "sink_tokens": 200, "alibi_slopes": SLOPES}
        case = DecodeCase(batch_of(300, 9, 130, rows=5), options=masks)
    return dataclasses.replace(
        case, options=case.options | {name: np.array(steps, np.int32) for name, steps in positions.items()}
    )


SLOPES = np.array([0.03, 0.1, 0.01, 0.0], np.float32)
FP8 = {"kv_dtype": "float8_e4m3fn"}
FP8_Q = {"dtype": "float8_e4m3fn"}
CAUSAL = {"causal": True}
SINKS = {"sinks": np.array([1.0, 3.0, -1.0, 2.0], np.float32)}
# Problems by name. Most have more key tiles than the ring has stages, and keys that end inside a tile.
PROBES: dict[str, Callable[[], DecodeCase]] = {
    "plain": lambda: DecodeCase(rising(batch_of(300, 0, 5, 700)), options=CAUSAL),
    "rows": lambda: DecodeCase(batch_of(300, 12, 70, rows=5, heads=(6, 2)), options=CAUSAL),
    "varlen": lambda: DecodeCase(batch_of(300, 12, 70, rows=5, heads=(6, 2)), rows=[5, 0, 2], options=CAUSAL),
    "tree": tree_case,
    "nonfinite": lambda: DecodeCase(with_nan(batch_of(300, 70, rows=5, heads=(6, 2)), 297), options=CAUSAL),
    "nonfinite8": lambda: with_scales(with_nan(batch_of(300, 70, **FP8), 40)),
    "masked8": lambda: with_scales(with_nan(batch_of(300, 70, rows=5, heads=(6, 2), **FP8), 297)),
    "fp8": lambda: with_scales(batch_of(300, 70, **FP8)),
    "fp8 q": lambda: narrow(batch_of(300, 70, rows=2, **FP8_Q)),
    "fp8 q NaN": lambda: narrow(batch_of(300, 70, rows=2, **FP8_Q), nan=True),
    "fp8 q odd": lambda: narrow(batch_of(300, 70, rows=2, **FP8_Q)),
    "unequal": lambda: DecodeCase(batch_of(300, 70, dim_v=64), options=CAUSAL),
    "cache": lambda: DecodeCase(batch_of(300, 70, 9), "cache", options=CAUSAL),
    "leftpad": lambda: DecodeCase(batch_of(300, 0, 70, 9), "cache", options=CAUSAL, leftpad=[5, 70, 0, 130]),
    "leftpad nonfinite": lambda: DecodeCase(
        with_nan(batch_of(300, 70, rows=5, heads=(6, 2)), 298), "cache", options=CAUSAL, leftpad=[3, 7]
    ),
    "leftpad pages": lambda: DecodeCase(batch_of(300, 0, 70, 9), options=CAUSAL, leftpad=[5, 70, 0, 130]),
    "places": lambda: DecodeCase(batch_of(300, 0, 70, 9), "cache", options=CAUSAL, places=[4, 0, 2, 1]),
    "own": lambda: DecodeCase(batch_of(300, 0, 70, 9, 130), "pointers", own=True),
    "single": lambda: DecodeCase(batch_of(300, 0, 70, 9), page_size=1, options=CAUSAL),
    "twelves": lambda: DecodeCase(batch_of(300, 0, 70, 9), page_size=12, options=CAUSAL),
    "threes": lambda: DecodeCase(batch_of(300, 0, 70, 9), page_size=3, options=CAUSAL),
    "threes nonfinite": lambda: DecodeCase(
        with_nan(batch_of(300, 70, rows=5, heads=(6, 2)), 298), page_size=3, options=CAUSAL
    ),
    "pointers": lambda: DecodeCase(batch_of(300, 70, 9), "pointers"),
    "long": lambda: DecodeCase(rising(batch_of(2000, heads=(2, 1))), options=CAUSAL),
    "many pieces": lambda: DecodeCase(rising(batch_of(4700, heads=(2, 1))), options=CAUSAL),
    "sinks": lambda: DecodeCase(batch_of(700, 90), options={**CAUSAL, **SINKS}),
    "placed": lambda: placed(q_positions=[[500, 3], [9, 1], [70, 2]], k_positions=[[1, 4], [0, 1], [3, 2]]),
    "last keys": lambda: placed(k_positions=[[40, 2], [0, 1], [7, 3]]),
    "placed tree": lambda: placed(
        dataclasses.replace(tree_case(), options={"alibi_slopes": SLOPES}), k_positions=[[40, 2], [0, 1], [7, 3]]
    ),
    "pinned": lambda: DecodeCase(rising(batch_of(300, 5, 700)), options={**CAUSAL, "num_splits": 3}),
}
PROBES |= {
    "wide": lambda: DecodeCase(rising(batch_of(70, 0, 33, dim=288, dim_v=512)), options=CAUSAL),
    "padded": lambda: DecodeCase(batch_of(70, 33, dim=288, dim_v=328), options=CAUSAL),
    "wide NaN": lambda: DecodeCase(
        with_nan(batch_of(70, rows=5, heads=(6, 2), dim=288, dim_v=512), 67, 300), options=CAUSAL
    ),
    "latent": lambda: latent(rising(batch_of(300, 0, 70, heads=(6, 1)))),
    "latent wide": lambda: latent(batch_of(70, 33, heads=(6, 1), dim=576, dim_v=512)),
    "latent wide8": lambda: latent(batch_of(70, 33, heads=(6, 1), dim=576, dim_v=512, **FP8)),
    "latent key": lambda: latent(batch_of(70, 95, rows=5, heads=(6, 1)), nan=30),
    "latent NaN": lambda: latent(batch_of(70, 95, rows=5, heads=(6, 1)), nan=3),
}
FAR = {"far": check_far_pages, "far rows": check_far_rows}
MULTIPROCESSORS = {"long": 4, "many pieces": 18}  # more pieces than a warp has lanes


def many() -> DecodeCase:
    """More sequences than decode_plan has threads."""
    return DecodeCase(batch_of(*np.random.default_rng(0).integers(0, 200, 600).tolist(), dim=32), options=CAUSAL)


def check_plan(case: DecodeCase) -> None:
    """Device and host split alike. Ranges that are cut elsewhere give right numbers as well, but unevenly."""
    problem = problem_of(case, case.operands())
    host = split_decode(problem, key_of(problem, "sm_80"), 7, case.batch.lengths, None).positions
    assert positions_on_the_device(case, 7).tobytes() == host.tobytes(), "plan differs"


def check_probe(name: str, **launch: Any) -> None:
    if name in FAR:
        FAR[name](**launch)
    elif name == "steady":
        check_steady_decode(**launch)
    elif name == "device":
        for case in (PROBES["plain"](), PROBES["pinned"]()):
            out, lse = run(case, planned=False, multiprocessors=2, **launch)
            check_results(case, out, lse)
        check_plan(PROBES["plain"]())
        check_plan(PROBES["pinned"]())
        check_plan(many())
    elif name == "broken":
        case = PROBES["plain"]()
        operands = case.operands() | {"cache_seqlens": np.array([300, 0, 1 << 20, 700], np.int32)}
        out, _ = run(case, operands=operands, planned=False, **launch)
        assert np.isnan(out[2]).all(), "out differs"
    elif name.startswith("broken "):
        kind, field, value = name.split()[1:]
        case = PROBES[kind]()
        good, operands = run(case, planned=False, **launch), case.operands()
        operands[field][2] = int(value)
        for name in operands.keys() & {"k_cache.2", "v_cache.2"}:  # numbers, so that reading them does not show
            operands[name][...] = np.nan_to_num(operands[name])
        out, lse = run(case, operands=operands, planned=False, **launch)
        assert np.isnan(out[2]).all(), "out differs"
        for found, right in ((out, good[0]), (lse, good[1])):
            # Ranges may begin elsewhere.
            np.testing.assert_allclose(np.delete(found, 2, 0), np.delete(right, 2, 0), atol=1e-2)
    elif name == "fp8 q odd":
        case = PROBES[name]()
        operands = case.operands()
        q = operands["q"]
        wide = emulated_decode.device_of().allocate((*q.shape[:-1], q.shape[-1] + 1), q.dtype.name)
        operands["q"] = wide[..., 1:]  # whose rows begin anywhere
        operands["q"][...] = q
        check_results(case, *run(case, operands=operands, multiprocessors=2, **launch))
    else:
        case = PROBES[name]()
        check_results(case, *run(case, multiprocessors=MULTIPROCESSORS.get(name, 2), **launch))


@contextmanager
def seeded(mutant: Mutant | None, cache: Path) -> Iterator[set[str]]:
    """Have `emulated_decode` build kernels with the bug. Yields the kernels that have it."""
    changed: set[str] = set()

    def build(source: KernelSource) -> Kernel:
        files = {source.name: source.source, **source.headers}
        if mutant is not None and mutant.old in files.get(mutant.file, ""):
            files[mutant.file] = files[mutant.file].replace(mutant.old, mutant.new)
            changed.add(source.name)
        text, entry = files.pop(source.name), source.entry_points
        macros, compiler = dict(source.macros), contraction.toolchain()
        return Kernel(entry[0], build_module(text, macros, files, compiler, cache, entries=entry))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated_decode, "kernel_of", build)
        patch.setattr("emulated.far_pages.kernel_of", build)
        yield changed


def run_probes(mutant: Mutant, cache: Path, *, bug: bool = True) -> None:
    """Run a mutant's probes, or with ``bug=False`` those of the kernels as they are.

    Raises AssertionError or EmulationFault from the first that shows a difference, LookupError where there was nothing
    to replace.
    """
    with seeded(mutant if bug else None, cache) as changed:
        for name in mutant.probes:
            for delivery, schedule, seed in LAUNCHES:
                try:
                    launch = {"delivery": delivery, "schedule": schedule, "seed": seed}
                    check_probe(name, **launch)
                finally:
                    if bug and not changed:
                        raise LookupError(f"{mutant.name}: no kernel of its probes has {mutant.old!r} in {mutant.file}")


def check_clean(chosen: Sequence[Mutant], cache: Path) -> None:
    run_probes(Mutant("none", "decode_mma", "decode/decode_mma.cu", "", "", probes_of(chosen)), cache, bug=False)


def main(names: list[str]) -> int:
    return run_mutants("decode", DECODE_MUTANTS, names, check_clean, run_probes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
