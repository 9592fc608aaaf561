"""forward_sm90's tensor maps, boxes and descriptors, decoded by the second reading alone.

Where TMA puts an element, wgmma must find it. What is decoded is what the package makes: the tensor maps of
`sm90_packer`, and the descriptors, steps and places of kernels_cu/forward_sm90/boxes.cuh, run on the emulated device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from emulated.forward import key_of, problem_of
from inside.attention import ScoreMod
from inside.kernels import (
    COUNTER,
    ELEMENTS,
    NO_VALUES,
    TILES,
    padded_head_dim,
    sm90_packer,
    tile_of,
    value_pieces,
)
from isa import swizzle, tma, wgmma
from kernel_runs import KernelRun, emulated_module, launch_emulated, pointer
from support.gate import kernel_source

from gpu_actors import AttentionProblem
from gpu_actors.devices.emulation import EmulatedModule
from gpu_actors.devices.interface import Buffer, TensorMap

pytestmark = pytest.mark.timeout(300)  # the first test of a process builds the module of all

FILE = "second_reading_boxes.cu"
KERNEL = "forward_sm90"
BASE = 4096
BYTES_OF_NUMBERS = 4 * 4 + 2 * 8 + 32 * 4
TYPES = {"float16": "half_t", "bfloat16": "bfloat16_t", "float8_e4m3fn": "e4m3_t"}
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}

HALF_DIMS = [(dim, dim) for dim in (32, 40, 64, 72, 80, 96, 104, 128, 136, 160, 192, 200, 256)]
HALF_DIMS += [(192, 128), (128, 64), (64, 256)]
FP8_DIMS = [(dim, dim) for dim in (32, 64, 96, 128, 160, 192, 256)] + [(192, 128)]


class Boxed(NamedTuple):
    """A tile in boxes: rows and columns of it, and the bytes and C++ type of its elements."""

    rows: int
    columns: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The kernel's numbers for a tile in boxes. places: address of each row's 16-byte units, (rows, units)."""

    width: int
    count: int
    line: int
    box_bytes: int
    rows: int
    columns: int
    column_steps: tuple[int, ...]
    row_steps: tuple[int, ...]
    places: npt.NDArray[np.uint32]


class Variant(NamedTuple):
    """A problem's tiles, and the tensor maps that its launch passes: q, k, v and out.

    arriving: v as TMA brings it, which 8-bit products do not take.
    """

    name: str
    q: Boxed
    k: Boxed
    v: Boxed
    arriving: Boxed
    out: Boxed
    keys_of_a_copy: int
    pieces: int
    maps: tuple[tma.TensorMap, ...]


def problems() -> Iterator[tuple[str, AttentionProblem]]:
    """A problem for every dtype, pair of head dims, mask, layout and page size that lead to other tiles."""
    for dtype, dims in (("float16", HALF_DIMS), ("bfloat16", [(64, 64), (128, 128)]), ("float8_e4m3fn", FP8_DIMS)):
        for dim, dim_v in dims:
            q = np.zeros((2, 200, 4, dim), DTYPES[dtype])
            k, v = (np.zeros((2, 300, 2, d), DTYPES[dtype]) for d in (dim, dim_v))
            masks = ((False, (-1, -1)), (True, (-1, -1)), (True, (64, -1)))
            for (causal, window), softcap in itertools.product(masks, (0.0, 30.0)):
                made = problem_of(q, k, v, causal=causal, window_size=window, softcap=softcap)
                yield f"{dtype} {dim},{dim_v} {made.mask} softcap {softcap}", made
            # Any modification takes smaller tiles.
            yield f"{dtype} {dim},{dim_v} modified", dataclasses.replace(made, score_mod=ScoreMod(""))
            if dtype == "float8_e4m3fn":
                continue
            # Dropout and biases take even smaller ones.
            yield f"{dtype} {dim},{dim_v} dropped", dataclasses.replace(made, dropout_p=0.1)
            cached = dataclasses.replace(problem_of(q, k, v), seqlen_k=512, total_k=1024)
            yield f"{dtype} {dim},{dim_v} cache", dataclasses.replace(cached, layout="cache")
            for page in (16, 64, 256):
                yield f"{dtype} {dim},{dim_v} pages {page}", dataclasses.replace(cached, layout="paged", page_size=page)


def contiguous(shape: tuple[int, ...], dtype: str) -> Buffer:
    strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    return Buffer(1 << 20, shape, tuple(strides), dtype)


def buffers_of(problem: AttentionProblem) -> dict[str, Buffer]:
    p = problem
    made = {
        "q": contiguous((p.batch, p.seqlen_q, p.heads_q, p.head_dim), p.dtype),
        "out": contiguous((p.batch, p.seqlen_q, p.heads_q, p.head_dim_v), p.out_dtype),
        "lse": contiguous((p.batch, p.heads_q, p.seqlen_q), "float32"),
        COUNTER: contiguous((1,), "int32"),
    }
    if not p.decoding:
        made["k"] = contiguous((p.batch, p.seqlen_k, p.heads_kv, p.head_dim), p.dtype)
        made["v"] = contiguous((p.batch, p.seqlen_k, p.heads_kv, p.head_dim_v), p.dtype)
        return made
    blocks = (p.total_k // p.page_size, p.page_size) if p.page_size else (p.batch, p.seqlen_k)
    made["k_cache"] = contiguous((*blocks, p.heads_kv, p.head_dim), p.dtype)
    made["v_cache"] = contiguous((*blocks, p.heads_kv, p.head_dim_v), p.dtype)
    made["cache_seqlens"] = contiguous((p.batch,), "int32")
    if p.page_size:
        made["block_table"] = contiguous((p.batch, p.seqlen_k // p.page_size), "int32")
    return made


def decoded(given: TensorMap) -> tma.TensorMap:
    mode = 0 if given.swizzle == "none" else int(given.swizzle.removesuffix("B"))
    size = ELEMENTS[given.dtype].itemsize
    return tma.TensorMap(size, tuple(given.shape), tuple(given.strides), tuple(given.box), mode, base=given.address)


@functools.cache
def variants() -> tuple[Variant, ...]:
    """Every problem's variant, without duplicates."""
    found: dict[tuple[object, ...], Variant] = {}
    for name, problem in problems():
        key = key_of(problem, "sm_90a", KERNEL)
        tile = tile_of(key)
        fp8 = ELEMENTS[problem.dtype].fp8
        taken: list[TensorMap] = []

        def encode(given: TensorMap, taken: list[TensorMap] = taken) -> bytes:
            taken.append(given)
            return bytes(128)

        sm90_packer(problem, key, encode)(buffers_of(problem), NO_VALUES)
        by_box = [decoded(given) for given in taken]
        assert len(by_box) == 4
        dim, dim_v = (padded_head_dim(d, problem.dtype) for d in (problem.head_dim, problem.head_dim_v))
        arriving = Boxed(tile.block_n, dim_v, problem.dtype)
        made = Variant(
            name,
            Boxed(64, dim, problem.dtype),
            Boxed(tile.block_n, dim, problem.dtype),
            Boxed(dim_v, tile.block_n, problem.dtype) if fp8 else arriving,
            arriving,
            Boxed(64, dim_v, problem.out_dtype),
            min(tile.block_n, problem.page_size or tile.block_n),
            value_pieces(tile, problem.dtype, problem.head_dim_v),
            tuple(by_box),
        )
        shapes = tuple((m.size, m.box, m.mode) for m in made.maps)
        found.setdefault((made[1:8], shapes), made)
    return tuple(found.values())


Ask = Callable[[Variant, Boxed], Numbers]


@pytest.fixture(scope="module")
def numbers(module_cache: Path) -> Ask:
    """The kernel's numbers for a variant's tile. There are two modules, because the width of operands is global."""
    tiles = sorted({boxed for variant in variants() for boxed in variant[1:6]})
    calls = " ".join(f"CASE({i}, {t.rows}, {t.columns}, {TYPES[t.dtype]})" for i, t in enumerate(tiles))

    @functools.cache
    def module_of(dtype: type[np.generic]) -> EmulatedModule:
        plain = kernel_source(key_of(problem_of(*[np.zeros((1, 64, 1, 64), dtype)] * 3), "sm_90a", KERNEL))
        return emulated_module(FILE, {**plain.macros, "BOXES_CASES": calls}, module_cache)

    @functools.cache
    def ask(variant: Variant, boxed: Boxed) -> Numbers:
        units = boxed.columns * ELEMENTS[boxed.dtype].itemsize // 16
        arrays = {"numbers": np.zeros(BYTES_OF_NUMBERS, np.uint8), "places": np.zeros((boxed.rows, units), np.uint32)}
        run = KernelRun(
            FILE,
            "boxes",
            arrays,
            lambda place: [
                struct.pack("<I", BASE),
                struct.pack("<i", tiles.index(boxed)),
                *(pointer(place, name) for name in arrays),
            ],
            block=1,
        )
        operands = np.float16 if variant.maps[0].size == 2 else ml_dtypes.float8_e4m3fn
        result = launch_emulated(module_of(operands), run, ("late", "greedy", 0))
        width, count, line, box_bytes, rows, columns, *steps = struct.unpack("<4I2Q32I", result["numbers"].tobytes())
        places = result["places"].copy()
        return Numbers(width, count, line, box_bytes, rows, columns, tuple(steps[:16]), tuple(steps[16:]), places)

    return ask


def landed(given: tma.TensorMap, boxed: Boxed, said: Numbers, rows_of_a_copy: int) -> npt.NDArray[np.int64]:
    """Address of every element (rows, columns) of a tile that TMA loads box by box, as the kernel asks for them."""
    size = given.size
    found = np.full((boxed.rows, boxed.columns), -1, dtype=np.int64)
    assert given.box == (said.width, rows_of_a_copy, 1, 1)
    assert given.bytes == rows_of_a_copy * said.line
    for part in range(0, boxed.rows, rows_of_a_copy):
        for box in range(said.count):
            offsets, _, _ = given.pieces((box * said.width, part, 0, 0))
            start = BASE + box * said.box_bytes + part * said.line
            assert start % 128 == 0
            addresses = swizzle.swizzled(start + offsets, given.mode).reshape(rows_of_a_copy, said.width)
            found[part : part + rows_of_a_copy, box * said.width : (box + 1) * said.width] = addresses
    assert len(np.unique(found)) == found.size
    assert found.max() + size <= BASE + said.count * said.box_bytes
    return found


def read(descriptor: int, step: int, major: wgmma.Major, mn: int, size: int) -> npt.NDArray[np.int64]:
    """Addresses (mn, 32 bytes of k) that the step's wgmma reads. The step is added as the kernel adds it."""
    return wgmma.Descriptor.decoded(descriptor + step).addresses(major, mn, 32 // size, size)


def test_wgmma_finds_each_element_where_tma_puts_it(numbers: Ask) -> None:
    for variant in variants():
        finds_each_element(variant, numbers)


def finds_each_element(variant: Variant, numbers: Ask) -> None:
    size = variant.maps[0].size
    step = 32 // size
    for boxed, given, copied in (
        (variant.q, variant.maps[0], 64),
        (variant.k, variant.maps[1], variant.keys_of_a_copy),
    ):
        said = numbers(variant, boxed)
        at = landed(given, boxed, said, copied)
        for n in range(boxed.columns // step):
            found = read(said.rows, said.column_steps[n], "k", boxed.rows, size)
            assert (found == at[:, n * step : (n + 1) * step]).all(), (variant.name, boxed, n)
    boxed, said, arriving = variant.v, numbers(variant, variant.v), numbers(variant, variant.arriving)
    at = landed(variant.maps[2], variant.arriving, arriving, variant.keys_of_a_copy)
    assert (arriving.places == at[:, :: 16 // size]).all(), f"{variant.name}: ldmatrix finds its lines"
    if size == 2:
        for n in range(boxed.rows // step):
            found = read(said.columns, said.row_steps[n], "mn", boxed.columns, size)
            assert (found == at[n * step : (n + 1) * step].T).all(), (variant.name, boxed, n)
        return
    at = (said.places[..., None] + np.arange(16)).reshape(boxed.rows, boxed.columns)  # as stmatrix writes them
    piece = boxed.rows // variant.pieces
    for number, n in itertools.product(range(variant.pieces), range(boxed.columns // step)):
        descriptor = wgmma.Descriptor.decoded(said.rows).moved(number * piece * said.line).encoded()
        found = read(descriptor, said.column_steps[n], "k", piece, size)
        assert (found == at[number * piece : (number + 1) * piece, n * step : (n + 1) * step]).all(), (
            variant.name,
            number,
            n,
        )


def test_tma_takes_each_output_from_where_stmatrix_puts_it(numbers: Ask) -> None:
    for variant in variants():
        boxed, given, said = variant.out, variant.maps[3], numbers(variant, variant.out)
        at = landed(given, boxed, said, 64)
        assert (said.places == at[:, :: 16 // given.size]).all(), variant.name


def test_every_tile_of_the_kernel_is_among_the_variants() -> None:
    tiles = {(row.tile.block_n, row.head_dim) for row in TILES if row.kernel == KERNEL}
    assert {block_n for block_n, _ in tiles} == {variant.k.rows for variant in variants()}
