"""Hard problems of decode_sm90."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cases.cached_batches import Batch
from cases.decode import SM90_VARIANTS
from emulated.decode import DecodeCase, check
from emulated.decode import run as run_decode
from emulated.far_pages import check_far_pages, check_far_rows
from inside.kernels import NAME

from matrix.decode import (
    CAUSAL,
    FP8,
    SINKS,
    batch_of,
    check_drawn,
    narrow,
    rising,
    tree_case,
    whole_table,
    with_nan,
    with_scales,
)

KERNELS = (NAME,)
LAUNCHES = (
    ("late", "greedy", 0),
    ("eager", "greedy", 1),
    ("late", "lane", 1),
    ("random", "random", 2),
    ("eager", "lane", 3),
)
_SHAPE: dict[str, Any] = {"rows": 9, "heads": (4, 2), "dim": 128, "dtype": "bfloat16"}


def wide(*lengths: int, **given: Any) -> Batch:
    return batch_of(*lengths, **{**_SHAPE, **given})


def _rise_of_lower_rows() -> DecodeCase:
    """Scores of rows 8 to 15 rise with the key, and those of rows 0 to 7 fall: 16 packed rows of one head."""
    batch = wide(300, rows=16, heads=(1, 1))
    ramp = np.linspace(-3.0, 3.0, 300)[:, None, None]
    batch.q[:, :8], batch.q[:, 8:] = -0.25, 0.25
    batch.k[0] = np.broadcast_to(ramp, batch.k[0].shape).astype(batch.k[0].dtype)
    return DecodeCase(batch)


def _bytes() -> DecodeCase:
    """Values of every byte that is a number. One of the last keys, which some rows do not see, has a NaN."""
    batch = wide(300, 256, **FP8)
    numbers = np.array([byte for byte in range(256) if byte & 0x7F != 0x7F], np.uint8)
    batch.v[1] = np.resize(numbers, batch.v[1].shape).view(batch.v[1].dtype)
    scales = np.array([[[0.5, -1.0], [2.0, 0.0]], [[1.0, -2.0], [0.25, 3.0]]], np.float32)
    return DecodeCase(with_nan(batch, 297), options={**CAUSAL, "k_descale": scales[0], "v_descale": scales[1]})


# Keys end inside a tile. Those of "long" fill more tiles than there are stages.
_PROBLEMS: dict[str, Callable[[], DecodeCase]] = {
    "plain": lambda: DecodeCase(rising(wide(300, 0, 5, 170)), options=CAUSAL),
    "long": lambda: DecodeCase(rising(wide(1500)), page_size=8, options=CAUSAL),
    "short": lambda: DecodeCase(wide(60, heads=(2, 1))),  # one tile of keys in all
    "two": lambda: DecodeCase(rising(wide(700, 90, rows=40)), options=CAUSAL),
    "few keys": lambda: DecodeCase(wide(3, 100, 0, 7, 1), options=CAUSAL),
    "ends": lambda: DecodeCase(wide(64, 63, 65, 128, 129), options=CAUSAL),
    "full": lambda: DecodeCase(wide(304, 304, 200), options=CAUSAL),
    "no rows": lambda: DecodeCase(wide(3, 100, 0, 7), rows=[9, 0, 9, 2], options=CAUSAL),
    "odd pages": lambda: DecodeCase(wide(300, 70), page_size=24, options=CAUSAL),
    "cache": lambda: DecodeCase(wide(300, 70, 9), "cache", options=CAUSAL),
    "narrow": lambda: DecodeCase(wide(300, 70, dim=40), options=CAUSAL),
    "unequal": lambda: DecodeCase(wide(300, 70, dim_v=64), options=CAUSAL),
    "window": lambda: DecodeCase(wide(300, 70), options={**CAUSAL, "window_size": (90, -1), "sink_tokens": 5}),
    "keyless": lambda: DecodeCase(wide(700), options={**CAUSAL, "window_size": (90, -1), "sink_tokens": 5}),
    "chunks": lambda: DecodeCase(wide(300, 70, 9), options={**CAUSAL, "attention_chunk": 17}),
    "tree": lambda: DecodeCase(wide(300, 9, 130), tree=tree_case().tree),
    "tree of two": lambda: tree_case(wide(300, 40, 130, rows=40)),  # more rows than 32 bits
    "alibi": lambda: DecodeCase(
        wide(300, 70), options={**CAUSAL, "alibi_slopes": np.array([0.1, 0.2, 0.4, 0.3], np.float32)}
    ),
    "rise": _rise_of_lower_rows,
    "sinks": lambda: DecodeCase(wide(170, 90), options={**CAUSAL, **SINKS}),
    "fp8": lambda: with_scales(wide(300, 70, 1000, **FP8)),
    "bytes": _bytes,
    "fp8 q": lambda: narrow(wide(300, 70, dtype="float8_e4m3fn")),
    "fp8 q NaN": lambda: narrow(wide(300, 70, dtype="float8_e4m3fn"), nan=True),
    "nonfinite": lambda: DecodeCase(with_nan(wide(300, 70), 297), options=CAUSAL),
    "nonfinite two": lambda: DecodeCase(with_nan(wide(300, 70, rows=40), 290), options=CAUSAL),
}
_FAR = {"far": check_far_pages, "far rows": check_far_rows}
ROWS = (*_PROBLEMS, *_FAR)
# Each needs a build of its own; other rows of the decode kernels cover the options' paths, which the kernels share.
RARE = frozenset({"no rows", "unequal", "tree of two", "chunks", "far rows"})


def run(row: str) -> None:
    """Raise AssertionError or EmulationFault if the row shows a difference."""
    if row in _FAR:
        _FAR[row](NAME)
        return
    multiprocessors = 1 if row in ("long", "keyless") else 3
    for delivery, schedule, seed in LAUNCHES:
        launch: dict[str, Any] = {"arch": "sm_90a", "kernel": NAME, "multiprocessors": multiprocessors}
        launch |= {"delivery": delivery, "schedule": schedule, "seed": seed}
        case = _PROBLEMS[row]()
        operands = case.operands()
        if row == "full":
            operands["block_table"] = whole_table(operands)
        check(case, operands=operands, **launch)
        if row == "full":
            _check_broken(case, operands, **launch)


def _check_broken(case: DecodeCase, operands: dict[str, Any], **launch: Any) -> None:
    """A sequence with a length beyond the capacity gets NaN, and the others the same as before."""
    good, _ = run_decode(case, operands=operands, planned=False, **launch)
    for length in (305, 1 << 29):
        broken = operands | {"cache_seqlens": np.array([304, length, 200], np.int32)}
        out, lse = run_decode(case, operands=broken, planned=False, **launch)
        assert np.isnan(out[1]).all(), "out differs"
        assert np.isnan(lse[1]).all(), "lse differs"
        np.testing.assert_allclose(out[[0, 2]], good[[0, 2]], atol=2e-2)  # ranges may begin at other keys


_DRAWN = {str(variant): variant for variant in SM90_VARIANTS}
GRID = tuple(_DRAWN)
USUAL: frozenset[str] = frozenset()  # the rows cover every path


def run_variant(variant: str, *, thorough: bool) -> None:
    """Sequences of 0 to 2,000 keys, six page sizes, 16 packed rows and more, split by the host or the device."""
    seeds, longest = (range(100, 125), 2000) if thorough else (range(100, 101), 500)
    check_drawn(_DRAWN[variant], SM90_VARIANTS, seeds, longest, arch="sm_90a", kernel=NAME)
