"""Hard problems of decode_mma and of the kernels that split and merge its work."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cases.cached_batches import Batch, random_batch, random_tree, tree_bits
from cases.decode import VARIANTS, Variant, draw
from cases.steady_scores import check_steady_decode
from emulated import decode as emulated_decode
from emulated.decode import DecodeCase, check, key_of, positions_on_the_device, problem_of
from emulated.far_pages import check_far_pages, check_far_rows
from emulated.sweeps import launch_of
from inside.kernels import splitter

KERNELS = ("decode_mma", "decode_plan", "decode_combine")
LAUNCHES = (("late", "greedy", 0), ("eager", "greedy", 1), ("late", "lane", 1), ("random", "random", 2))

CAUSAL: dict[str, Any] = {"causal": True}
SLOPES = np.array([0.03, 0.1, 0.01, 0.0], np.float32)
SINKS: dict[str, Any] = {"sinks": np.array([1.0, 3.0, -1.0, 2.0], np.float32)}
FP8, FP8_Q = {"kv_dtype": "float8_e4m3fn"}, {"dtype": "float8_e4m3fn"}


def batch_of(*lengths: int, rows: int = 1, heads: tuple[int, int] = (4, 2), **given: Any) -> Batch:
    return random_batch(3, lengths, rows=rows, heads=heads, **{"dim": 32, "dtype": "float16", **given})


def rising(batch: Batch) -> Batch:
    """The batch with scores that rise with the key, so that every tile and piece has a maximum of its own."""
    batch.q = np.abs(batch.q)
    for index, keys in enumerate(batch.k):
        ramp = np.linspace(0.0, 4.0, len(keys))[:, None, None]
        batch.k[index] = (np.abs(keys.astype(np.float32)) * ramp).astype(keys.dtype)
    return batch


def steep(batch: Batch) -> Batch:
    """The batch with scores that rise by more than 16 and depend on the key alone."""
    batch.q[...] = 1.0
    for keys in batch.k:
        keys[...] = np.linspace(0, 3, len(keys))[:, None, None]
    return batch


def with_scales(batch: Batch) -> DecodeCase:
    shape = len(batch.k), batch.k[0].shape[1]
    scales = np.random.default_rng(5).uniform(0.5, 2.0, (2, *shape)).astype(np.float32)
    scales[:, 0, 0] *= -1
    return DecodeCase(batch, options={**CAUSAL, "k_descale": scales[0], "v_descale": scales[1]})


def zero_scales(batch: Batch) -> DecodeCase:
    """Descales of 0 among others, for two sequences and two heads."""
    k, v = np.array([[[0.0, -1.0], [2.0, 1e-3]], [[1.0, 0.0], [-3.0, 448.0]]], np.float32)
    return DecodeCase(batch, options={**CAUSAL, "k_descale": k, "v_descale": v})


def narrow(batch: Batch, nan: bool = False) -> DecodeCase:
    """q and the cache in e4m3, with descales of q, k and v. nan: an element of q's first row is NaN."""
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
    """Values are the first columns of keys. nan: the column that is NaN in a key that some rows do not see."""
    for keys in batch.k if nan is not None else ():
        keys[-3, :, nan] = np.nan
    columns = 512 if batch.q.shape[-1] == 576 else 16
    batch.v = [np.ascontiguousarray(keys[..., :columns]) for keys in batch.k]
    return DecodeCase(batch, latent=True, options=CAUSAL)


def trees(batch: Batch) -> Any:
    """A tree of drafts for each sequence."""
    rng = np.random.default_rng(0)
    return np.stack([tree_bits(random_tree(rng, batch.q.shape[1])) for _ in batch.k])


def tree_case(batch: Batch | None = None, **given: Any) -> DecodeCase:
    batch = batch_of(300, 9, 130, rows=9) if batch is None else batch
    return DecodeCase(batch, tree=trees(batch), **given)


def placed(case: DecodeCase | None = None, **positions: Sequence[Any]) -> DecodeCase:
    """A case whose rows and keys have positions, by default under every mask and ALiBi."""
    if case is None:
        masks = {**CAUSAL, "window_size": (300, 0), "sink_tokens": 200, "alibi_slopes": SLOPES}
        case = DecodeCase(batch_of(300, 9, 130, rows=5), options=masks)
    steps = {name: np.array(steps, np.int32) for name, steps in positions.items()}
    return dataclasses.replace(case, options=case.options | steps)


def apart(*lengths: int, window: int, sink_tokens: int) -> DecodeCase:
    """A case for `placed`, with masks of its own."""
    masks = {**CAUSAL, "window_size": (window, 0), "sink_tokens": sink_tokens, "alibi_slopes": SLOPES}
    return DecodeCase(batch_of(*lengths, rows=5), options=masks)


# Most have more key tiles than the ring has stages, and keys that end inside a tile.
_PROBLEMS: dict[str, Callable[[], DecodeCase]] = {
    "plain": lambda: DecodeCase(rising(batch_of(300, 0, 5, 700)), options=CAUSAL),
    "rows": lambda: DecodeCase(batch_of(300, 12, 70, rows=5, heads=(6, 2)), options=CAUSAL),
    "varlen": lambda: DecodeCase(batch_of(300, 12, 70, rows=5, heads=(6, 2)), rows=[5, 0, 2], options=CAUSAL),
    "tree": tree_case,
    "nonfinite": lambda: DecodeCase(with_nan(batch_of(300, 70, rows=5, heads=(6, 2)), 297), options=CAUSAL),
    "nonfinite8": lambda: with_scales(with_nan(batch_of(300, 70, **FP8), 40)),
    "masked8": lambda: with_scales(with_nan(batch_of(300, 70, rows=5, heads=(6, 2), **FP8), 297)),
    "fp8": lambda: with_scales(batch_of(300, 70, **FP8)),
    "fp8 zero": lambda: zero_scales(batch_of(300, 90, **FP8)),
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
    "sinks alone": lambda: DecodeCase(batch_of(0, 300), options={**CAUSAL, **SINKS}),
    "placed": lambda: placed(q_positions=[[500, 3], [9, 1], [70, 2]], k_positions=[[1, 4], [0, 1], [3, 2]]),
    "last keys": lambda: placed(k_positions=[[40, 2], [0, 1], [7, 3]]),
    "placed tree": lambda: placed(tree_case(options={"alibi_slopes": SLOPES}), k_positions=[[40, 2], [0, 1], [7, 3]]),
    "placed once": lambda: placed(q_positions=[450, 3, 90], k_positions=[200, 0, 0]),
    "placed rows": lambda: placed(q_positions=[299, 2, 350]),
    "behind and before": lambda: placed(
        apart(300, 0, 5, 700, window=90, sink_tokens=200), q_positions=[5000, 0, 0, 0], k_positions=[0, 0, 5, 3000]
    ),
    "keyless": lambda: placed(apart(700, 9, window=60, sink_tokens=20), q_positions=[[500, 3], [4, 1]]),
    "pinned": lambda: DecodeCase(rising(batch_of(300, 5, 700)), options={**CAUSAL, "num_splits": 3}),
    "steep": lambda: DecodeCase(steep(batch_of(1000, 2000, 130, rows=2)), options=CAUSAL),
    "steep pinned": lambda: DecodeCase(steep(batch_of(1000, 2000, 130, rows=2)), options={**CAUSAL, "num_splits": 4}),
    "few keys": lambda: DecodeCase(batch_of(3, 1, 0, 7, rows=7), options=CAUSAL),
    "ends": lambda: DecodeCase(batch_of(1, 63, 64, 65, 128, 129, 256, 257, rows=2), options=CAUSAL),
    "full": lambda: DecodeCase(batch_of(304, 9, 304, 300), options=CAUSAL),
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
# Operands that contradict the request on the device: the problem, the operand, and its value for the third sequence.
_BROKEN = {
    "plain, a length": ("plain", "cache_seqlens", 1 << 20),
    "full, a length": ("full", "cache_seqlens", 305),
    "leftpad, more than keys": ("leftpad", "cache_leftpad", 71),
    "leftpad, below 0": ("leftpad", "cache_leftpad", -1),
    "leftpad, a length": ("leftpad", "cache_seqlens", 1000),
    "places, below 0": ("places", "cache_batch_idx", -1),
    "places, outside": ("places", "cache_batch_idx", 6),
    "places, a length": ("places", "cache_seqlens", -5),
    "own, a length": ("own", "cache_seqlens", 75),
}
_FAR = {"far": check_far_pages, "far rows": check_far_rows}
_MULTIPROCESSORS = {"long": 4, "many pieces": 18}  # more pieces than a warp has lanes
ROWS = (*_PROBLEMS, *(f"broken {what}" for what in _BROKEN), *_FAR, "steady", "device", "plan")
# Usual variants and other rows cover their paths.
RARE = frozenset({"unequal", "leftpad pages"})


def run(row: str) -> None:
    """Raise AssertionError or EmulationFault if the row shows a difference."""
    if row == "plan":
        _check_plans()
        return
    for delivery, schedule, seed in LAUNCHES:
        _run(row, delivery=delivery, schedule=schedule, seed=seed)


def _run(row: str, **launch: Any) -> None:
    if row in _FAR:
        _FAR[row](**launch)
    elif row == "steady":
        check_steady_decode(**launch)
    elif row == "device":
        for name in ("plain", "pinned"):
            check(_PROBLEMS[name](), planned=False, multiprocessors=2, **launch)
    elif row.startswith("broken "):
        _check_broken(*_BROKEN[row.removeprefix("broken ")], **launch)
    else:
        case = _PROBLEMS[row]()
        multiprocessors = _MULTIPROCESSORS.get(row, 2)
        check(case, operands=_operands(row, case), multiprocessors=multiprocessors, **launch)


def _operands(row: str, case: DecodeCase) -> dict[str, Any]:
    operands = case.operands()
    if row == "full":
        operands["block_table"] = whole_table(operands)
    if row == "fp8 q odd":
        q = operands["q"]
        wide = emulated_decode.allocate((*q.shape[:-1], q.shape[-1] + 1), q.dtype.name)
        operands["q"] = wide[..., 1:]  # rows begin at any byte
        operands["q"][...] = q
    return operands


def whole_table(operands: dict[str, Any]) -> Any:
    """The table without its last, unused column: behind a sequence's row lies the next one's."""
    return np.ascontiguousarray(operands["block_table"][:, :-1])


def _check_broken(problem: str, field: str, value: int, **launch: Any) -> None:
    """The sequence is answered with NaN, and the others as before."""
    case = _PROBLEMS[problem]()
    operands = _operands(problem, case)
    good = emulated_decode.run(case, operands=operands, planned=False, **launch)
    operands[field][2] = value
    for name in operands.keys() & {"k_cache.2", "v_cache.2"}:  # finite, so that only the kernel's check gives NaN
        operands[name][...] = np.nan_to_num(operands[name])
    out, lse = emulated_decode.run(case, operands=operands, planned=False, **launch)
    assert np.isnan(out[2]).all(), "out differs"
    assert np.isnan(lse[2]).all(), "lse differs"
    for found, right in ((out, good[0]), (lse, good[1])):
        # Ranges may begin at other keys.
        np.testing.assert_allclose(np.delete(found, 2, 0), np.delete(right, 2, 0), atol=1e-2)


def _check_plans() -> None:
    """Device and host split alike. Other ranges would give right numbers too, but uneven work."""
    lengths = np.random.default_rng(0).integers(0, 200, 600).tolist()  # more than decode_plan has threads
    cases = [_PROBLEMS["plain"](), _PROBLEMS["pinned"](), DecodeCase(batch_of(*lengths), options=CAUSAL)]
    drawn = [variant for variant in VARIANTS if variant.layout != "pointers"][:8:2]
    cases += [draw(variant, seed) for variant in drawn for seed in range(2)]
    for case, ranges in itertools.product(cases, (1, 7)):
        problem = problem_of(case, case.operands())
        rows = None if case.rows is None else np.array(case.rows)
        host = splitter(problem, key_of(problem, "sm_80"), ranges)(case.batch.lengths, rows).positions
        np.testing.assert_array_equal(positions_on_the_device(case, ranges), host, "plan differs")


_DRAWN = {str(variant): variant for variant in VARIANTS}
# Options of rows and keys with positions in a larger problem.
_MASKS: dict[str, Any] = {**CAUSAL, "window_size": (90, 0), "sink_tokens": 200, "alibi_slopes": SLOPES}
_OPTIONS: dict[str, dict[str, Any]] = {
    "all": _MASKS,
    "causal": CAUSAL,
    "full": {"softcap": 3.0},
    "window": {"window_size": (200, 90), "sink_tokens": 40},
    "chunks": {**CAUSAL, "attention_chunk": 150, "sink_tokens": 9},
    "signs of distances": {"alibi_slopes": SLOPES},
}
# Rows among, behind and before the keys; rows and keys one to four positions apart; the third sequence has few keys.
_PLACES: tuple[dict[str, Any], ...] = (
    {"q_positions": [[500, 3], [9, 1], [7, 2], [1400, 1]], "k_positions": [[1, 4], [0, 1], [3, 2], [0, 2]]},
    {"q_positions": [450, 0, 3, 90], "k_positions": [200, 0, 0, 0]},
    {"k_positions": [[40, 2], [0, 1], [7, 3], [100, 4]]},
    {"q_positions": [299, 0, 2, 350]},
    {"q_positions": [5000, 0, 0, 0], "k_positions": [0, 0, 5, 3000]},
)
_PLACED = {
    f"placed-{arch}-{layout}-{name.replace(' ', '-')}": (arch, layout, name)
    for arch, layout, name in itertools.product(("sm_80", "sm_90a"), ("paged", "cache", "pointers"), _OPTIONS)
    if layout != "pointers" or "causal" not in _OPTIONS[name]
}
GRID = (*_DRAWN, *_PLACED, "placed-others")
USUAL = frozenset(str(VARIANTS[number]) for number in (4, 8))


def run_variant(variant: str, *, thorough: bool) -> None:
    """Sequences of 0 to 2,000 keys, nine page sizes, 1 to 16 query heads a KV head, 1 to 64 new rows."""
    if variant in _PLACED:
        _check_placed(*_PLACED[variant])
    elif variant == "placed-others":
        _check_other_placed()
    else:
        seeds, longest = (range(100, 140), 2000) if thorough else (range(2), 500)
        check_drawn(_DRAWN[variant], VARIANTS, seeds, longest, arch=_DRAWN[variant].arch)


def check_drawn(
    variant: Variant, variants: Sequence[Variant], seeds: Sequence[int], longest: int, **launch: Any
) -> None:
    """Check random problems of a variant, split by the host or by the device. longest: most keys of a sequence."""
    for seed in seeds:
        check(
            draw(variant, seed, longest),
            multiprocessors=1 + seed % 5,
            planned=seed % 2 == 0,
            seed=seed,
            **launch_of(5 * seed + variants.index(variant)),
            **launch,
        )


def _placed_batch(**given: Any) -> Batch:
    return random_batch(4, (300, 0, 5, 700), heads=(4, 2), **{"dim": 32, "dtype": "float16", "rows": 5, **given})


def _check_placed(arch: str, layout: str, name: str) -> None:
    for seed, places in enumerate(_PLACES):
        for rows, splits in itertools.product((1,) if layout == "pointers" else (1, 5, 17), (0, 3)):
            options = {**_OPTIONS[name], "num_splits": splits}
            case = placed(DecodeCase(_placed_batch(rows=rows), layout, options=options), **places)
            check(case, arch=arch, multiprocessors=1 + seed, delivery="random", schedule="random", seed=seed)


def _check_other_placed() -> None:
    """Check packed rows, 8 bits, trees and nonfinite values, all with positions."""
    for places in _PLACES:
        nonfinite = _placed_batch()
        nonfinite.v[0][120, :, 3], nonfinite.v[3][695, :, 3] = np.nan, np.inf
        for case in (
            DecodeCase(_placed_batch(), rows=[5, 0, 2, 1], options=_MASKS),
            DecodeCase(_placed_batch(**FP8), options=CAUSAL),
            tree_case(_placed_batch(), options={"alibi_slopes": SLOPES}),
            DecodeCase(nonfinite, options=_MASKS),
        ):
            check(placed(case, **places))
