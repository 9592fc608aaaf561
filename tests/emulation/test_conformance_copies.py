"""cp.async, ldmatrix, movmatrix, mma and wide accesses against the tables of the PTX ISA."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from isa import formats, fragments
from kernel_runs import KernelRun, Runner, pointers
from second_reading import encoded, mma_case

FILE = "conformance/copies.cu"


@pytest.mark.parametrize("size", [4, 8, 16])
def test_async_copies_fill_a_ring_and_zero_what_is_not_valid(runner: Runner, size: int) -> None:
    rounds = 7
    rng = np.random.default_rng(size)
    source = rng.integers(1, 256, (rounds, 32, size)).astype(np.uint8)
    valid = rng.integers(0, size + 1, 32).astype(np.int32)
    valid[:3] = 0, size, 1
    run = KernelRun(
        FILE,
        f"copy_{size}",
        {"in": source, "valid": valid, "out": np.full_like(source, 0xEE)},
        lambda place: [*pointers("in", "valid", "out")(place), struct.pack("<i", rounds)],
        shared_bytes=3 * 32 * size,
    )
    for result in runner(run):
        result.check(out=np.where(np.arange(size) < valid[:, None], source, 0).astype(np.uint8))


def test_waiting_for_all_copies_needs_no_group(runner: Runner) -> None:
    source = np.random.default_rng(6).integers(0, 256, (32, 16)).astype(np.uint8)
    arrays = {"in": source, "out": np.zeros_like(source)}
    for result in runner(KernelRun(FILE, "copy_ungrouped", arrays, pointers("in", "out"), shared_bytes=512)):
        result.check(out=source[::-1])


def lane_words(matrix: np.ndarray) -> np.ndarray:
    """The words that the 32 lanes hold of an 8x8 matrix of 16-bit elements."""
    return np.ascontiguousarray(matrix).view(np.uint32).reshape(32)


def test_matrix_loads_spread_rows_over_lanes(runner: Runner) -> None:
    m = np.random.default_rng(2).integers(0, 1 << 16, (4, 8, 8)).astype(np.uint16)
    plain, turned = [lane_words(x) for x in m], [lane_words(x.T) for x in m]
    words = [plain[0], turned[0], *plain[:2], *turned[:2], *plain, *turned, turned[3]]
    arrays: dict[str, np.ndarray] = {"in": m, "out": np.zeros((15, 32), np.uint32)}
    for result in runner(KernelRun(FILE, "matrix_loads", arrays, pointers("in", "out"), shared_bytes=512)):
        result.check(out=np.stack(words))


@pytest.mark.parametrize("element", ["f16", "bf16", "tf32", "e4m3", "e5m2"])
def test_mma_multiplies_by_the_tables(runner: Runner, element: str) -> None:
    case = mma_case(element, 3)
    for result in runner(case.run):
        result.check(**case.expected)


@pytest.mark.parametrize("element", ["f16", "bf16", "e4m3", "e5m2"])
def test_mma_reads_every_kind_of_number_exactly(quick_runner: Runner, element: str) -> None:
    """A times the identity is A."""
    form = formats.FORMATS[element]
    if form.bits == 8:
        patterns = np.arange(256, dtype=np.uint8)
    else:  # the smallest of either sign, and others
        patterns = np.random.default_rng(4).integers(0, 1 << 16, 256).astype(np.uint16)
        patterns[:64] = np.r_[:32, 0x8000:0x8020]
    patterns[~np.isfinite(formats.decoded(patterns, element))] = 0
    for rows in patterns.reshape(-1, 16, 8):
        bits, ones = np.zeros((16, form.k), patterns.dtype), np.zeros((form.k, 8))
        bits[:, 3:11] = rows
        ones[3:11] = np.eye(8)
        arrays = {
            "a": fragments.packed(fragments.mma_a(form.k, form.bits).taken(bits)),
            "b": fragments.packed(fragments.mma_b(form.k, form.bits).taken(encoded(ones, element))),
            "c": np.zeros((32, 4), np.float32),
            "d": np.zeros((32, 4), np.float32),
        }
        wanted = fragments.mma_c().taken(formats.decoded(rows, element).astype(np.float32))
        for result in quick_runner(KernelRun(FILE, f"mma_{element}", arrays, pointers("a", "b", "c", "d"))):
            result.check(d=wanted)


def test_wide_accesses_keep_every_word(runner: Runner) -> None:
    words = np.random.default_rng(5).integers(0, 1 << 32, (32, 16), dtype=np.uint32)
    arrays = {"in": words, "out": np.zeros((32, 12), np.uint32)}
    expected = np.zeros((32, 12), np.uint32)
    expected[:, :9] = words[::-1, :9]
    for result in runner(KernelRun(FILE, "wide_accesses", arrays, pointers("in", "out"), shared_bytes=2048)):
        result.check(out=expected)


def test_bytes_past_a_copy_of_nothing_are_not_read(runner: Runner) -> None:
    """Without a valid byte the source is not read, so it may lie past the end of its buffer."""
    source, valid = np.ones((1, 32, 16), np.uint8), np.full(32, 16, np.int32)
    valid[20:] = 0
    run = KernelRun(
        FILE,
        "copy_16",
        {"in": source[:, :20], "valid": valid, "out": np.full_like(source, 0xEE)},
        lambda place: [*pointers("in", "valid", "out")(place), struct.pack("<i", 1)],
        shared_bytes=3 * 32 * 16,
    )
    for result in runner(run):
        result.check(out=np.where(valid[:, None] > 0, source[0], 0).astype(np.uint8)[None])
