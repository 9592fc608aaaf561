"""Counts what a block of a kernel does for one tile of rows and keys, in the machine code that NVRTC makes of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.sass import Step, disassemble, main_step
from gpu_actors.attention.problem import DispatchKey
from gpu_actors.attention.requests import FlashBackward, FlashForward, PagedForward
from gpu_actors.bench.cases import Case
from gpu_actors.compiling.compiler import Compiler
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.kernels import decode_sm90
from gpu_actors.kernels.decode_mma import DECODE
from gpu_actors.kernels.decode_tiles import decode_tile
from gpu_actors.kernels.support import ELEMENTS
from gpu_actors.kernels.tiles import Tile, tile_of
from gpu_actors.kernels.variants import variant_of

__all__ = ["Counts", "block_products", "count_case", "counts_of", "key_of", "loaded_bytes"]

_OPCODES = ("HMMA", "HGMMA", "QGMMA", "LDSM", "STSM", "LDS", "STS", "BAR", "LDL", "STL")


@dataclass(frozen=True, slots=True)
class Counts:
    """One step of a kernel's main loop: a tile of rows times a tile of keys, without a mask.

    rows, keys: of the tile. warps: of a block that multiply. products: multiply-adds of the block. loaded: bytes that
    copies move into its shared memory, and out of it. The other fields count one warp: instructions; special, those of
    the special function unit; overlapped, those of them that run during the same warpgroup's products; half_rate, those
    that take twice an issue slot; shared, bytes moved into and out of shared memory; masks, instructions that are
    skipped if nothing is hidden; opcodes, how often some instructions occur. registers: a thread's at launch.
    """

    kernel: str
    rows: int
    keys: int
    warps: int
    products: float
    loaded: int
    instructions: int
    special: int
    overlapped: int
    half_rate: int
    shared: float
    masks: int
    registers: int
    opcodes: dict[str, int]

    @property
    def a_thousand(self) -> float:
        """Instructions of all warps for 1,000 pairs of a row and a key."""
        return 1000 * self.instructions * self.warps / (self.rows * self.keys)


def counts_of(kernel: str, tile: tuple[int, int], warps: int, loaded: int, step: Step, registers: int) -> Counts:
    """The counts of a block from the step of one of its warps. tile: rows and keys."""
    opcodes = {name: step.opcodes[name] for name in _OPCODES if step.opcodes[name]}
    return Counts(
        kernel,
        *tile,
        warps,
        step.products * warps,
        loaded,
        step.instructions,
        step.special,
        step.overlapped,
        step.half_rate,
        step.shared,
        step.masks,
        registers,
        opcodes,
    )


def block_products(kind: str, tile: tuple[int, int], dims: tuple[int, int]) -> int:
    """Multiply-adds of a tile: two products, or five in a backward pass. dims: head_dim of q and k, and of v."""
    return tile[0] * tile[1] * (3 * dims[0] + 2 * dims[1] if kind == "backward" else sum(dims))


def loaded_bytes(kind: str, tile: tuple[int, int], dims: tuple[int, int], item: int, bulk: bool) -> int:
    """Bytes that copies move in a step: keys and values, or q, dout and statistics in a backward pass.

    8-bit values are also read and written again by the warps that transpose them, which are not counted elsewhere.
    bulk: whether dQ leaves shared memory as floats, by a copy that adds.
    """
    rows, keys = tile
    if kind == "forward" and item == 1:
        return keys * (sum(dims) + 2 * dims[1])
    if kind != "backward":
        return keys * sum(dims) * item
    return rows * (sum(dims) * item + 8 + 4 * dims[0] * bulk)


def key_of(case: Case, context: GpuContext) -> DispatchKey:
    """The key of what would run. Raises GpuActorsError if no kernel takes the case."""
    return context.flash_attn.inspect_key(_request(dataclasses.replace(case, batch=1)))


def count_case(key: DispatchKey, kind: str) -> Counts | None:
    """Compile the variant that a key names, and count it.

    None for a kernel without a loop that has products and exponentials. Raises FileNotFoundError without a
    disassembler.
    """
    tile = _tile_of(key)
    hopper = key.kernel.endswith("_sm90")
    warps = tile.warps - 4 if hopper else tile.warps  # the others load
    if key.kernel == decode_sm90.NAME:
        warps = tile.block_m // 16  # the others load, and widen 8-bit caches, which is not counted
    size = (tile.block_m, tile.block_n)
    dims = (-(-key.head_dim // 16) * 16, -(-key.head_dim_v // 16) * 16)
    cubin = Compiler().compile(variant_of(key).source, key.arch)
    step = main_step(disassemble(cubin.data), block_products(kind, size, dims) / warps)
    if step is None:
        return None
    item = ELEMENTS[key.kv_dtype if kind == "decode" else key.dtype].itemsize
    loaded = loaded_bytes(kind, size, dims, item, bulk=hopper)
    return counts_of(key.kernel, size, warps, loaded, step, cubin.resources[key.kernel].registers)


def _tile_of(key: DispatchKey) -> Tile:
    if key.kernel == DECODE:
        return decode_tile(key).tile
    if key.kernel == decode_sm90.NAME:
        return decode_sm90.sm90_decode_tile(key).tile
    return tile_of(key)


def _request(case: Case) -> FlashForward | FlashBackward | PagedForward:
    """A request of the case's shapes. Its arrays are never touched, so they take no memory."""

    def array(*shape: int, dtype: str = case.dtype) -> Any:
        return np.empty(shape, getattr(ml_dtypes, dtype, dtype))

    q, kv = case.q_shape, case.kv_shape
    if case.kind == "decode":
        pool = (case.pages, case.page_size, case.kv_heads, case.head_dim)
        table = np.zeros((1, case.pages), np.int32)
        lengths = np.full(1, case.keys, np.int32)
        return PagedForward(
            q=array(*q), k_cache=array(*pool), v_cache=array(*pool), block_table=table, cache_seqlens=lengths
        )
    options = case.options()
    if case.kind == "backward":
        lse = array(case.batch, case.heads, case.rows, dtype="float32")
        more = {"out": array(*q), "dout": array(*q), "lse": lse, "deterministic": case.deterministic}
        return FlashBackward(array(*q), array(*kv), array(*kv), **options, **more)
    return FlashForward(array(*q), array(*kv), array(*kv), **options)
