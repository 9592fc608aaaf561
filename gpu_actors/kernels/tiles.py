"""The table of all tile sizes, and the sizes that follow from a tile, such as shared memory.

Grids and shared-memory sizes are computed from the table, and the kernels receive the same numbers as macros. The
kernels assert that the shared memory they lay out is what the launch provides.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from gpu_actors.attention.key_mask import MaskKind
from gpu_actors.attention.problem import Direction, DispatchKey, Layout
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.occupancy import shared_mem_limit
from gpu_actors.kernels.support import ELEMENTS, capability

__all__ = [
    "TILES",
    "Tile",
    "backward_warp_tile",
    "mma_row",
    "output_is_direct",
    "padded_backward_dims",
    "padded_head_dim",
    "shared_mem_bytes",
    "shares_keys",
    "threads_of",
    "tile_for",
    "value_pieces",
]


class Tile(NamedTuple):
    """block_m: query rows per block. block_n: keys per tile. stages: key tiles in flight. warps: per block."""

    block_m: int
    block_n: int
    stages: int
    warps: int


class _TileRow(NamedTuple):
    """Which problems a tile is for. None matches everything. head_dim is the largest head dim that the tile is for, and
    head_dim_v that of v if v has its own bound.

    scale_only: whether only the scale may stand between product and score. plain: whether it excludes bias, dropout and
    score modifications, which need registers. bare: whether it excludes bias and dropout, which need more. blocks: the
    blocks that must fit into a multiprocessor's shared memory at once. layouts: as in AttentionProblem.
    hopper: whether it is for compute capability 9.0 alone.
    """

    kernel: str
    tile: Tile
    dtypes: tuple[str, ...] | None = None
    head_dim: int = 256
    masks: tuple[MaskKind, ...] | None = None
    scale_only: bool = False
    plain: bool = False
    bare: bool = False
    blocks: int = 1
    layouts: tuple[Layout, ...] | None = None
    direction: Direction = "forward"
    hopper: bool = False
    head_dim_v: int | None = None


_HALVES = ("float16", "bfloat16")
_FLOATS = ("float32",)
_CACHES: tuple[Layout, ...] = ("paged", "cache")
_NO_CACHES: tuple[Layout, ...] = ("dense", "varlen")
_NO_WINDOW: tuple[MaskKind, ...] = ("full", "causal")

_EIGHTS = ("float8_e4m3fn", "float8_e5m2")

_sm90 = functools.partial(_TileRow, "forward_sm90", hopper=True)
_mma = functools.partial(_TileRow, "forward_mma")
_wide = functools.partial(_TileRow, "forward_wide", dtypes=_HALVES, head_dim=512)
_backward = functools.partial(_TileRow, "backward_mma", direction="backward")
_backward_sm90 = functools.partial(_TileRow, "backward_sm90", direction="backward", hopper=True)
_simple = functools.partial(_TileRow, "forward_simple")
_backward_simple = functools.partial(_TileRow, "backward_simple", direction="backward")

# The first row counts that matches and whose tiles fit into the architecture's shared memory.
TILES = (
    # Consumers of 64 rows and four warps each, beside a producer of four warps. If the output does not fit beside two
    # stages of K and V, it is stored from registers.
    # Pages divide a tile of 128 or 64 keys, or are multiples of it.
    _sm90(Tile(192, 128, 2, 16), _HALVES, 64, scale_only=True),
    _sm90(Tile(128, 128, 2, 12), _HALVES, 64),  # 160 registers do not suffice
    _sm90(Tile(128, 128, 2, 12), _HALVES, 96, bare=True),
    _sm90(Tile(128, 176, 2, 12), _HALVES, 128, ("full",), scale_only=True, layouts=_NO_CACHES),
    _sm90(Tile(128, 128, 2, 12), _HALVES, 128, plain=True),
    _sm90(Tile(128, 96, 2, 12), _HALVES, 128),
    _sm90(Tile(128, 64, 2, 12), _HALVES, layouts=_CACHES),
    _sm90(Tile(128, 128, 2, 12), _HALVES, 192, scale_only=True, head_dim_v=128),
    _sm90(Tile(128, 112, 2, 12), _HALVES, 192, scale_only=True),
    _sm90(Tile(128, 80, 2, 12), _HALVES, 192, plain=True),
    _sm90(Tile(128, 64, 2, 12), _HALVES, 192),
    _sm90(Tile(128, 80, 2, 12), _HALVES, 256, scale_only=True),
    _sm90(Tile(128, 64, 2, 12), _HALVES, 256, bare=True),
    _sm90(Tile(128, 48, 2, 12), _HALVES, 256),
    # 8-bit elements, with V transposed: keys, too, come in boxes of 64 or 128 bytes. Tensor cores keep 13 fraction
    # bits of a sum, so they sum the keys of one tile alone. Each of its block_n / 32 steps truncates 34 numbers (32
    # products, the earlier sum, the new sum) by less than 2^-13 of the tile's sum P|V|. With 256 keys that is below
    # 3.4% of the sum, with 128 below 1.7%, for any number of tiles, if the largest product of each step has factors of
    # 2^-6 or more, the least normal number. Products of more than 2^-6 of the largest number lose nothing. Under a
    # mask, registers do not hold the scores of 256 keys.
    _sm90(Tile(192, 128, 2, 16), _EIGHTS, 64, scale_only=True),
    _sm90(Tile(128, 256, 2, 12), _EIGHTS, 128, ("full",), scale_only=True),
    _sm90(Tile(128, 128, 2, 12), _EIGHTS, 192, plain=True),
    _sm90(Tile(128, 64, 2, 12), _EIGHTS, 192),
    _sm90(Tile(128, 128, 2, 12), _EIGHTS, 256, scale_only=True),
    _sm90(Tile(128, 64, 2, 12), _EIGHTS, 256),
    # Warps of 32 rows read half as much of K and V from shared memory as warps of 16. Up to dim 128, with
    # only the scale between product and score, and no window, registers hold 32. Four such warps leave
    # room for a second block.
    _mma(Tile(128, 64, 3, 4), dtypes=_HALVES, head_dim=64, masks=_NO_WINDOW, scale_only=True, blocks=2),
    _mma(Tile(128, 64, 2, 4), dtypes=_HALVES, head_dim=64, masks=_NO_WINDOW, scale_only=True, blocks=2),
    _mma(Tile(128, 32, 3, 4), dtypes=_HALVES, head_dim=128, masks=_NO_WINDOW, scale_only=True, blocks=2),
    _mma(Tile(128, 64, 2, 8), dtypes=_HALVES, head_dim=192),
    _mma(Tile(128, 64, 2, 8), dtypes=_HALVES, scale_only=True),
    _mma(Tile(128, 32, 2, 8), dtypes=_HALVES),
    _mma(Tile(64, 32, 2, 4), dtypes=_HALVES),
    _mma(Tile(64, 32, 2, 4), dtypes=_FLOATS, head_dim=192),
    _mma(Tile(64, 16, 2, 4), dtypes=_FLOATS),
    _mma(Tile(32, 16, 2, 2), dtypes=_FLOATS),
    # Two warps share 16 rows, because one warp lacks the registers above 256 columns. Above 384, registers do not hold
    # the places of a second stage either, and above 448 no window beside the scores of 32 keys. Blocks of a mask divide
    # into 64 or 32 rows.
    _wide(Tile(64, 32, 2, 8), head_dim=384),
    _wide(Tile(64, 32, 1, 8), head_dim=448),
    _wide(Tile(64, 32, 1, 8), masks=_NO_WINDOW),
    _wide(Tile(64, 16, 1, 8)),
    _wide(Tile(48, 16, 1, 6), plain=True),
    _wide(Tile(32, 16, 1, 4)),
    # Backward on Hopper: two consumers of 64 keys each, beside a producer of four warps, loop over block_m query rows.
    _backward_sm90(Tile(128, 128, 2, 12), _HALVES, 64, scale_only=True),
    _backward_sm90(Tile(64, 128, 2, 12), _HALVES, 128),
    # Wider heads: both consumers share 64 keys. Two tiles of Q beside one of dO fit up to 192, one of each above.
    _backward_sm90(Tile(128, 64, 2, 12), _HALVES, 192),
    _backward_sm90(Tile(128, 64, 1, 12), _HALVES),
    # Backward: a block keeps block_n keys and loops over block_m query rows. A warp's registers are full with 16 keys
    # and dK and dV of 128 columns, or 32 keys and half of the columns. Wider heads give half of them to a second warp.
    _backward(Tile(64, 128, 2, 8), dtypes=_HALVES, head_dim=128, scale_only=True),
    _backward(Tile(32, 128, 2, 8), dtypes=_HALVES, head_dim=128),
    _backward(Tile(32, 64, 2, 4), dtypes=_HALVES, head_dim=128),
    _backward(Tile(32, 64, 2, 8), dtypes=_HALVES),
    _backward(Tile(32, 48, 2, 6), dtypes=_HALVES),
    _backward(Tile(32, 48, 1, 6), dtypes=_HALVES),
    _backward(Tile(32, 64, 2, 4), dtypes=_FLOATS, head_dim=64),
    _backward(Tile(32, 64, 2, 8), dtypes=_FLOATS, head_dim=128),
    _backward(Tile(32, 32, 2, 4), dtypes=_FLOATS),
    _backward(Tile(32, 32, 1, 4), dtypes=_FLOATS),
    _backward(Tile(16, 16, 2, 4), dtypes=_FLOATS),
    _simple(Tile(32, 32, 1, 4), head_dim=128),
    # 32 rows of 256 doubles, twice, exceed the 99 KiB of the smallest architectures.
    _simple(Tile(16, 16, 1, 4), dtypes=("float64",)),
    _simple(Tile(32, 32, 1, 4)),
    _simple(Tile(8, 16, 1, 4), dtypes=("float64",), head_dim=512),
    _simple(Tile(16, 16, 1, 4), head_dim=512),
    _backward_simple(Tile(32, 32, 1, 4), head_dim=128),
    _backward_simple(Tile(16, 16, 1, 4)),
    _backward_simple(Tile(8, 16, 1, 4)),
    _backward_simple(Tile(8, 16, 1, 4), head_dim=512),
    _backward_simple(Tile(4, 16, 1, 2), head_dim=512),  # float64 on compute capability 8.0
)


@functools.lru_cache(maxsize=1024)
def tile_for(
    kernel: str,
    direction: Direction,
    arch: str,
    dtype: str,
    head_dim: int,
    mask: MaskKind,
    scale_only: bool = True,
    layout: Layout = "dense",
    plain: bool = True,
    bare: bool = True,
    head_dim_v: int | None = None,
    block_size: tuple[int, int] | None = None,
) -> Tile:
    """The tile of a kernel for a problem. head_dim: the larger of q's and v's. head_dim_v: v's, by default the same.
    block_size: rows and keys of a block of a block mask, which the tile must divide. The others are as in `_TileRow`.
    Raises Unsupported if the table has no row for the problem.
    """
    sm = capability(arch)
    limit = shared_mem_limit(sm)
    dim_v = head_dim if head_dim_v is None else head_dim_v
    for row in TILES:
        if (
            (row.kernel, row.direction) == (kernel, direction)
            and (sm == 90 or not row.hopper)
            and (row.dtypes is None or dtype in row.dtypes)
            and head_dim <= row.head_dim
            and (row.head_dim_v is None or dim_v <= row.head_dim_v)
            and (row.masks is None or mask in row.masks)
            and (scale_only or not row.scale_only)
            and (plain or not row.plain)
            and (bare or not row.bare)
            and (row.layouts is None or layout in row.layouts)
            and (block_size is None or _divides(row.tile, block_size))
            and row.blocks * shared_mem_bytes(kernel, row.tile, dtype, head_dim, row.head_dim_v or head_dim) <= limit
        ):
            return row.tile
    largest = max((row.head_dim for row in TILES if row.kernel == kernel), default=None)
    reason = f"kernel {kernel} has no tile for {direction}, {dtype}, {mask} on {arch}"
    raise Unsupported("head_dim", head_dim, reason, nearest=largest)


def tile_of(key: DispatchKey) -> Tile:
    widest = max(key.head_dim, key.head_dim_v)
    fields = (key.kernel, key.direction, key.arch, key.dtype, widest, key.mask, key.scale_only, key.layout)
    block_size = None if key.score_mod is None else key.score_mod.block_size
    return tile_for(*fields, plain=key.plain, bare=key.bare, head_dim_v=key.head_dim_v, block_size=block_size)


def threads_of(key: DispatchKey) -> int:
    return 32 * tile_of(key).warps


def _divides(tile: Tile, block_size: tuple[int, int]) -> bool:
    return block_size[0] % tile.block_m == 0 and block_size[1] % tile.block_n == 0


def shared_bytes_of(key: DispatchKey) -> int:
    return shared_mem_bytes(key.kernel, tile_of(key), key.dtype, key.head_dim, key.head_dim_v)


def shared_mem_bytes(kernel: str, tile: Tile, dtype: str, head_dim: int, head_dim_v: int) -> int:
    return _SHARED_BYTES[kernel](tile, dtype, head_dim, head_dim_v)


def _simple_bytes(tile: Tile, dtype: str, head_dim: int, head_dim_v: int) -> int:
    """Tiles of Q, of K or V, and of P, all in the dtype of the sums. Rows are padded to an odd length."""
    pitch = max(head_dim, head_dim_v) | 1
    values = (tile.block_m + tile.block_n) * pitch + tile.block_m * tile.block_n
    return values * (8 if dtype == "float64" else 4)


def _backward_simple_bytes(tile: Tile, dtype: str, head_dim: int, head_dim_v: int) -> int:
    """Two tiles of rows, two of keys, and two of scores of their pairs."""
    return 2 * _simple_bytes(tile, dtype, head_dim, head_dim_v)


def _mma_bytes(tile: Tile, dtype: str, head_dim: int, head_dim_v: int) -> int:
    keys = tile.stages * tile.block_n
    return (tile.block_m + keys) * mma_row(head_dim, dtype) + keys * mma_row(head_dim_v, dtype)


def _wide_bytes(tile: Tile, dtype: str, head_dim: int, head_dim_v: int) -> int:
    """The tile of Q, `stages` tiles of K and V, all padded to 64 columns, and the scores of warps in float."""
    row, row_v = (-(-dim // 64) * 64 * ELEMENTS[dtype].itemsize for dim in (head_dim, head_dim_v))
    keys = tile.stages * tile.block_n
    return (tile.block_m + keys) * row + keys * row_v + tile.warps * 16 * tile.block_n * 4


def mma_row(dim: int, dtype: str) -> int:
    """The bytes of a row in shared memory, padded to 32 bytes, one step of an mma."""
    return -(-dim * ELEMENTS[dtype].itemsize // 32) * 32


def padded_head_dim(dim: int, dtype: str = "bfloat16") -> int:
    """The head dim to which forward_sm90 pads ``dim``: see kernels_cu/forward_sm90/layout.cuh."""
    dims = (64, 128, 192, 256) if ELEMENTS[dtype].fp8 else (64, 96, 128, 192, 256)
    return next(padded for padded in dims if dim <= padded)


def shares_keys(tile: Tile) -> bool:
    """Whether both consumers of backward_sm90 multiply the same 64 keys, each with half of a head's columns."""
    return tile.block_n == 64


def padded_backward_dims(tile: Tile, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The head dims to which backward_sm90 pads both: see kernels_cu/backward_sm90/layout.cuh."""
    if not shares_keys(tile):
        return (64, 64) if tile.block_m == 128 else (128, 128)
    if max(head_dim, head_dim_v) > 192:
        return 256, 256
    return 192, 128 if head_dim_v <= 128 else 192


def value_pieces(tile: Tile, dtype: str, head_dim_v: int) -> int:
    """The number of pieces of V's columns in which forward_sm90 sums a tile's P V apart from O; 1 for 16-bit floats."""
    if not ELEMENTS[dtype].fp8:
        return 1
    return {64: 1, 128: 1, 192: 2, 256: 256 // tile.block_n}[padded_head_dim(head_dim_v, dtype)]


def output_is_direct(tile: Tile, dtype: str, head_dim: int, head_dim_v: int) -> bool:
    """Whether forward_sm90 stores the output from registers, because it has no room for an output tile."""
    return _sm90_bytes_with(tile, dtype, head_dim, head_dim_v, direct=False) > shared_mem_limit(90)


def _sm90_bytes(tile: Tile, dtype: str, head_dim: int, head_dim_v: int) -> int:
    return _sm90_bytes_with(tile, dtype, head_dim, head_dim_v, output_is_direct(tile, dtype, head_dim, head_dim_v))


def _sm90_bytes_with(tile: Tile, dtype: str, head_dim: int, head_dim_v: int, direct: bool) -> int:
    """Tiles of Q, and of O unless it is stored directly, stages of K and V, mbarriers, two slots for tile indices.

    With 8-bit elements also a tile of V as it arrives, its two mbarriers and a word about it.
    """
    itemsize, out_itemsize = ELEMENTS[dtype].itemsize, ELEMENTS[ELEMENTS[dtype].out].itemsize
    q, v = (padded_head_dim(dim, dtype) * itemsize for dim in (head_dim, head_dim_v))
    out = padded_head_dim(head_dim_v, dtype) * out_itemsize
    values = tile.block_m * (q if direct else q + out) + tile.stages * tile.block_n * (q + v)
    barriers = 2 * (tile.block_m // 64) + 4 * tile.stages + 4
    arriving = tile.block_n * v + 24 if ELEMENTS[dtype].fp8 else 0
    return values + 8 * barriers + 16 + arriving


def backward_warp_tile(tile: Tile, dtype: str, head_dim: int, head_dim_v: int) -> int:
    """The keys, and the rows of dQ, of a warp of backward_mma: 32 for large tiles if registers suffice, else 16."""
    return 32 if tile.block_m == 64 and dtype == "bfloat16" and head_dim == head_dim_v == 128 else 16


def _backward_mma_bytes(tile: Tile, dtype: str, head_dim: int, head_dim_v: int) -> int:
    """K, V, `stages` tiles of Q and dO with two floats per row, and the scores, twice if warps share a head's columns.

    The layout is in kernels_cu/backward/ring.cuh, which asserts the size.
    """
    sharing = max(1, tile.warps * backward_warp_tile(tile, dtype, head_dim, head_dim_v) // tile.block_n)
    split = sharing > 1 and tile.block_m % (16 * sharing) == 0
    rows = mma_row(head_dim, dtype) + mma_row(head_dim_v, dtype)
    queries, scores = tile.block_m * (rows + 8), tile.block_n * mma_row(tile.block_m, dtype)
    factor = 16 if dtype == "float16" else 0  # of dS
    return tile.block_n * rows + tile.stages * queries + (2 if split else 1) * scores + factor


def _backward_sm90_bytes(tile: Tile, dtype: str, head_dim: int, head_dim_v: int) -> int:
    """K, V, stages of Q and dO with a float per row, two tiles of scores, a tile of dQ in float, mbarriers, a number.

    Consumers that share keys have one stage of dO and no tile of dQ. The layout is in
    kernels_cu/backward_sm90/layout.cuh, which asserts the size.
    """
    (dim, dim_v), itemsize = padded_backward_dims(tile, head_dim, head_dim_v), ELEMENTS[dtype].itemsize
    stages, stages_v = tile.stages, 1 if shares_keys(tile) else tile.stages
    keys = tile.block_n * (dim + dim_v) * itemsize
    rows = tile.block_m * (stages * (dim * itemsize + 4) + stages_v * (dim_v * itemsize + 4))
    scores, sums = 2 * tile.block_m * tile.block_n * itemsize, 0 if shares_keys(tile) else tile.block_m * dim * 4
    return keys + rows + scores + sums + 8 * (2 + 2 * stages + 2 * stages_v) + 8


_SHARED_BYTES = {
    "forward_mma": _mma_bytes,
    "forward_wide": _wide_bytes,
    "forward_simple": _simple_bytes,
    "decode_simple": _simple_bytes,
    "backward_simple": _backward_simple_bytes,
    "forward_sm90": _sm90_bytes,
    "backward_mma": _backward_mma_bytes,
    "backward_sm90": _backward_sm90_bytes,
}
