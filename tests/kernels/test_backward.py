"""Backward kernels beyond the oracle's answers: equal bits, the reach of a NaN, untouched memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from emulated.backward import backward_problem_of, run, run_case
from emulated.forward import key_of
from emulated.gradients import (
    case_of,
    check_padded_views,
    check_sequences_longer_than_said,
    operands_of,
    problem_and_operands,
)
from emulated.sweeps import Sweep, assert_same_bits, launch_of
from matrix.backward import SIMPLE_SWEEPS
from matrix.backward import SWEEPS as MMA_SWEEPS
from matrix.backward_sm90 import SWEEPS as SM90_SWEEPS
from matrix.backward_sm90 import cancelling
from support.gate import code_faults, code_of, kernel_source, register_limit

from gpu_actors.testing import BackwardCase, check_gradients

MMA, SIMPLE, SM90 = "backward_mma", "backward_simple", "backward_sm90"
KERNELS = (MMA, SIMPLE, SM90)
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")


def launch_by(kernel: str) -> dict[str, Any]:
    return {"kernel": kernel, "arch": "sm_90a" if kernel == SM90 else "sm_80"}


@pytest.mark.parametrize(("kernel", "rows"), [(MMA, 300), (SIMPLE, 100), (SM90, 500)])
def test_sequences_longer_than_the_caller_said_are_answered_whole(kernel: str, rows: int) -> None:
    """A block then takes several tiles of keys, some of which no row sees."""
    check_sequences_longer_than_said(launch_by(kernel), rows)


@pytest.mark.parametrize(("kernel", "rows"), [(MMA, 150), (SIMPLE, 70), (SM90, 300)])
def test_special_values_reach_what_their_row_or_key_reaches_and_no_more(kernel: str, rows: int) -> None:
    """A hidden pair must not become 0 * NaN in a product."""
    for special, index in itertools.product((np.nan, np.inf), range(4)):
        arrays = operands_of(rows, rows)
        arrays[index][0, rows // 2, :, 3] = special
        problem, operands = problem_and_operands(*arrays, causal=True)
        gradients = run(problem, operands, **launch_by(kernel))
        assert not np.isfinite(gradients.dk).all()
        assert np.isfinite(gradients.dq[:, : rows // 2]).all()
        if special != special:
            check_gradients(gradients, *arrays, out=operands["out"], lse=operands["lse"], causal=True)


@pytest.mark.parametrize(
    ("kernel", "read", "written"),
    # 8 aligns rows to 16 bytes, as cp.async and TMA need; 3 leaves them unaligned.
    [(MMA, 8, 8), (MMA, 2, 2), (MMA, 3, 3), (SIMPLE, 3, 1), (SM90, 8, 4), (SM90, 8, 3)],
)
def test_transposed_padded_views_are_read_and_written_in_place(kernel: str, read: int, written: int) -> None:
    check_padded_views(launch_by(kernel), read, written)


@pytest.mark.parametrize(
    ("kernel", "sweep"),
    [(MMA, MMA_SWEEPS[4]), (SIMPLE, Sweep("float16", 64, None, "causal", varlen=True)), (SM90, SM90_SWEEPS[4])],
    ids=KERNELS,
)
def test_a_packed_sequence_has_the_same_bits_of_every_gradient_where_deterministic(kernel: str, sweep: Sweep) -> None:
    case = case_of(sweep, 11, (100, 200), batch=3, heads=(2, 1))
    options = dict(case.options)
    ends_q, ends_k = options.pop("cu_seqlens_q"), options.pop("cu_seqlens_k")
    launch = {"kernel": kernel, "arch": sweep.arch}
    how: dict[str, Any] = {"compute": sweep.compute, "deterministic": kernel != SIMPLE}
    whole = run_case(case, **how, **launch)
    dout, q, k, v, out, lse = case.inputs
    for index, lengths in enumerate(case.forward.seqlens):
        if not all(lengths):
            continue
        rows, keys = (slice(*ends[index : index + 2]) for ends in (ends_q, ends_k))
        ends = {
            "cu_seqlens_q": np.array([0, rows.stop - rows.start], np.int32),
            "cu_seqlens_k": np.array([0, keys.stop - keys.start], np.int32),
        }
        inputs = q[rows], k[keys], v[keys]
        problem = backward_problem_of(*inputs, **how, **options, **ends)
        operands = {"dout": dout[rows], "q": q[rows], "k": k[keys], "v": v[keys], "out": out[rows], **ends}
        alone = run(problem, {**operands, "lse": np.ascontiguousarray(lse[:, rows])}, **launch)
        np.testing.assert_array_equal(alone.dq, whole.dq[rows])
        np.testing.assert_array_equal(alone.dk, whole.dk[keys])
        np.testing.assert_array_equal(alone.dv, whole.dv[keys])


@pytest.mark.parametrize(
    ("kernel", "sweep", "seqlens", "names"),
    [
        (MMA, MMA_SWEEPS[0], (200, 150), ("dk", "dv")),
        (SIMPLE, SIMPLE_SWEEPS[0], (70, 90), GRADIENTS),
        (SM90, SM90_SWEEPS[0], (300, 200), ("dk", "dv")),
    ],
    ids=KERNELS,
)
def test_every_delivery_and_schedule_gives_the_same_bits(
    kernel: str, sweep: Sweep, seqlens: tuple[int, int], names: tuple[str, ...]
) -> None:
    """Gradients that are summed in order. There are more tiles of queries than stages, so every stage is refilled."""
    case = case_of(sweep, 5, seqlens, heads=(2, 1), batch=1)
    if kernel != SIMPLE:
        problem = backward_problem_of(*case.forward.inputs, **case.options)
        macros = kernel_source(key_of(problem, sweep.arch, kernel)).macros
        assert int(macros["STAGES"]) * int(macros["BLOCK_M"]) < seqlens[0]
    # Each delivery once, and each schedule but one.
    assert_repeats(case, (0, 5, 10), names, kernel=kernel, arch=sweep.arch)


def assert_repeats(case: BackwardCase, seeds: Iterable[int], names: tuple[str, ...], **given: Any) -> None:
    """These gradients have the same bits in every launch."""
    # With the hardware's arithmetic, errors of functions would differ by seed.
    first = run_case(case, arithmetic="nearest", **given)
    names = tuple(name for name in names if getattr(first, name) is not None)
    for seed in seeds:
        again = run_case(case, seed=seed, arithmetic="nearest", **given, **launch_of(seed))
        assert_same_bits([[getattr(result, name) for name in names] for result in (first, again)])


def _repeated() -> Iterator[Any]:
    """(kernel, sweep, count) of cases that the matrix's rows `turns` do not repeat."""
    yield pytest.param(MMA, MMA_SWEEPS[4], 8, id="mma")
    yield pytest.param(SM90, SM90_SWEEPS[9], 6, id="sm90")
    for kernel, sweeps, count in ((MMA, MMA_SWEEPS, 100), (SM90, SM90_SWEEPS, 20)):
        for sweep in sweeps:
            if sweep.deterministic:
                marks = (pytest.mark.sweep, pytest.mark.timeout(600))
                yield pytest.param(kernel, sweep, count, id=f"{kernel}-{sweep}", marks=marks)


@pytest.mark.parametrize(("kernel", "sweep", "count"), list(_repeated()))
def test_deterministic_gradients_have_the_same_bits(kernel: str, sweep: Sweep, count: int) -> None:
    """Several key tiles add to dQ, or heads to the one dbias, from blocks that run at the same time."""
    if kernel == MMA:
        case = case_of(sweep, 3, (40, 410), batch=1, heads=(2, 1))
    else:
        biased = "bias" in sweep.options
        shape = {"seqlens": (40, 150), "heads": (4, 2)} if biased else {"seqlens": (90, 500), "heads": (1, 1)}
        case = case_of(sweep, 4, batch=1, **shape)
        if biased:  # one dbias for all heads, in float32, which shows the last bits
            case.options["bias"] = np.ascontiguousarray(case.options["bias"][:1, :1]).astype(np.float32)
        case = cancelling(case)
    given = {"kernel": kernel, "arch": sweep.arch, "compute": sweep.compute, "deterministic": True, "threads": 3}
    assert_repeats(case, range(count), GRADIENTS, **given)


@pytest.mark.parametrize("kernel", [MMA, SM90])
def test_blocks_that_start_in_another_order_wait_for_none_that_has_not_started(kernel: str) -> None:
    """Each tile of keys adds to all of dQ, each sequence and head to the one dbias; two blocks run at a time."""
    if kernel == MMA:
        sweep = Sweep("float32", 96, None, "causal bias", compute="tf32", arch="sm_80", deterministic=True)
        case = case_of(sweep, 3, (40, 200), batch=2, heads=(4, 2))
        case.options["bias"] = np.ascontiguousarray(case.options["bias"][:1, :1])
    else:  # tiles of keys of packed sequences start by how many follow them
        sweep = SM90_SWEEPS[4]
        case = case_of(sweep, 3, (40, 600), batch=3, heads=(1, 1))
    launch = {"kernel": kernel, "arch": sweep.arch, "compute": sweep.compute, "deterministic": True}
    # Blocks start downwards, and from the third on.
    first, *others = (run_case(case, limit_seconds=20.0, **launch, **given) for given in ({}, {"seed": 1}, {"seed": 6}))
    for again, name in itertools.product(others, ("dq", "dk", "dv", "dbias")):
        np.testing.assert_array_equal(getattr(again, name), getattr(first, name))


@pytest.mark.parametrize(
    "sweep",
    [pytest.param(sweep, marks=[pytest.mark.sweep] * (n not in (0, 3))) for n, sweep in enumerate(SIMPLE_SWEEPS)],
    ids=str,
)
def test_machine_code_of_the_plain_kernel_has_no_faults(sweep: Sweep) -> None:
    case = case_of(sweep, 1, (40, 40), batch=1, heads=(2, 1))
    problem = backward_problem_of(*case.forward.inputs, compute=sweep.compute, **case.options)
    key = key_of(problem, sweep.arch, SIMPLE)
    assert code_faults(code_of(kernel_source(key), key.kernel), register_limit(128)) == []
