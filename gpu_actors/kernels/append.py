"""The append kernel: appends new rows of K and V, perhaps rotated and quantised, to many caches in one launch.

The same launch can rotate q. The parameters are the struct of kernels_cu/append/params.cuh.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import Buffer, LaunchGeometry
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.kernels.macros import Macros, flags
from gpu_actors.kernels.params import ITEMSIZES, Binder, Operand, ParamsLayout, struct_layout
from gpu_actors.kernels.program import flat_grid
from gpu_actors.kernels.support import ELEMENTS, LATENT_DIM, MAX_HEAD_DIM, check_capability

__all__ = [
    "AppendLayout",
    "AppendProblem",
    "AppendTrial",
    "Rope",
    "append_geometry",
    "append_layout",
    "append_trials",
    "append_variant",
    "cut_rows",
    "pack_append",
]

AppendLayout: TypeAlias = Literal["paged", "dense", "pointers"]

_KERNEL = "append"
_WARPS, _WARP = 4, 32
_MAX_ROWS = 16  # per thread block: shared memory holds their places and rotations
_BLOCK_UNITS = 4 * _WARPS * _WARP  # four per thread: enough in flight, and few enough to spread small batches
_FULL_GPU = 256  # with fewer blocks, another row per block would leave multiprocessors idle
_PLACE_BYTES, _ROTATION_BYTES = 24, 8

_CONVERTS = {"float16": ("float16",), "bfloat16": ("bfloat16",), "float32": ("float32", "float16", "bfloat16")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding (Su et al., arXiv 2104.09864, section 3.2.2) of the first columns of every head.

    dim: the number of rotated columns, even and at most head_dim. base: pair i turns by base^(-2i/dim) radians per
    position. interleaved: columns 2i and 2i + 1 are a pair ("GPT-J"); else i and i + dim / 2 ("NeoX", "rotate half").
    inv_freq: radians per position of each of the dim / 2 pairs, instead of those from base; for scaled embeddings.
    table_rows: positions of the tables of cosines and sines that come with the request and replace base and inv_freq;
    0 for no tables. Raises InvalidRequest for other values.
    """

    dim: int
    base: float = 10000.0
    interleaved: bool = False
    inv_freq: tuple[float, ...] | None = None
    table_rows: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int) or self.dim < 2 or self.dim % 2:
            raise InvalidRequest("rope.dim", self.dim, "must be an even int >= 2: columns are rotated in pairs")
        if not (isinstance(self.base, int | float) and self.base > 0 and math.isfinite(self.base)):
            raise InvalidRequest("rope.base", self.base, "must be a finite number > 0")
        if isinstance(self.table_rows, bool) or not isinstance(self.table_rows, int) or self.table_rows < 0:
            raise InvalidRequest("rope.table_rows", self.table_rows, "must be an int >= 0, 0 for no tables")
        if self.inv_freq is not None:
            object.__setattr__(self, "inv_freq", tuple(map(float, self.inv_freq)))
            if len(self.inv_freq) != self.dim // 2 or not all(map(math.isfinite, self.inv_freq)):
                raise InvalidRequest("rope.inv_freq", self.inv_freq, f"must be {self.dim // 2} finite numbers")

    @property
    def frequencies(self) -> tuple[float, ...]:
        """The radians per position of each pair."""
        if self.inv_freq is not None:
            return self.inv_freq
        return tuple(self.base ** (-2 * pair / self.dim) for pair in range(self.dim // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendProblem:
    """The shapes, dtypes and options of one append, without its data.

    layout: of the caches, "paged" (num_blocks, page_size, heads_kv, dim) with a block table (batch, max_blocks),
        "dense" (batch, max_seq, heads_kv, dim), or "pointers", the address of each sequence's (heads_kv, max_seq, dim).
    total: all new rows, packed. rows: new rows of each sequence, or 0 if cu_seqlens defines them.
    dtype: of the new rows. cache_dtype: of the caches, the same or a narrower one.
    page_size, num_blocks, max_blocks: of paged caches. max_seq: of the others.
    rope: rotates K, and q if heads_q > 0. positions: whether the request gives each row's position for the rotation;
        else it is the row's place in its sequence. descales: whether the fp8 cache has descales.
    latent: multi-head latent attention with a single cache: a row has the head_dim_v columns of v, the latent, followed
        by the head_dim columns of k, which are rotated.
    """

    layout: AppendLayout
    batch: int
    total: int
    rows: int = 0
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    cache_dtype: str
    page_size: int = 0
    num_blocks: int = 0
    max_blocks: int = 0
    max_seq: int = 0
    rope: Rope | None = None
    positions: bool = False
    heads_q: int = 0
    descales: bool = False
    latent: bool = False

    @property
    def sides(self) -> dict[str, int]:
        """The columns of a cache's row, by cache: "k", and "v" unless the cache is latent."""
        if self.latent:
            return {"k": self.head_dim_v + self.head_dim}
        return {"k": self.head_dim, "v": self.head_dim_v}

    @property
    def capacity(self) -> int:
        """The most rows that a sequence may have in its cache."""
        return self.max_blocks * self.page_size if self.layout == "paged" else self.max_seq


@functools.lru_cache(maxsize=1024)
def append_variant(problem: AppendProblem, arch: str) -> Variant:
    """The variant for a problem, independent of its sizes. Raises `Unsupported` if the kernel does not take it."""
    p, rope, units = problem, problem.rope, _checked_units(problem, arch)
    macros: Macros = {
        "HEAD_DIM": p.head_dim,
        "HEAD_DIM_V": p.head_dim_v,
        "WARPS": _WARPS,
        "MAX_ROWS": _MAX_ROWS,
        "SHARED_BYTES": _shared_bytes(p),
        "K_UNITS": units.k,
        "V_UNITS": units.v,
        "ELEMENT": ELEMENTS[p.dtype].c_type,
        "CACHE_ELEMENT": ELEMENTS[p.cache_dtype].c_type,
    }
    macros |= flags(PAGED=p.layout == "paged", POINTERS=p.layout == "pointers", DESCALES=p.descales)
    if rope is not None:
        macros |= {"ROTARY_DIM": rope.dim} | flags(INTERLEAVED=rope.interleaved, TABLES=rope.table_rows > 0)
    macros |= flags(POSITIONS=p.positions, QUERY=p.heads_q > 0)
    if p.heads_q:
        macros["Q_UNITS"] = units.q
    return Variant(_KERNEL, arch, macros, example=p)


def _checked_units(p: AppendProblem, arch: str) -> _Units:
    check_capability(arch)
    rotary_dim = 0 if p.rope is None else p.rope.dim
    fp8 = p.cache_dtype in ELEMENTS and ELEMENTS[p.cache_dtype].fp8
    if p.dtype != p.cache_dtype or p.dtype not in ELEMENTS:
        if p.dtype not in _CONVERTS:
            raise Unsupported("dtype", p.dtype, "new rows are fp16, bf16, fp32, or as those of the cache", "bfloat16")
        if not fp8 and p.cache_dtype not in _CONVERTS[p.dtype]:
            reason = f"rows of {p.dtype} go to a cache of {', '.join(_CONVERTS[p.dtype])} or fp8"
            raise Unsupported("cache_dtype", p.cache_dtype, reason, p.dtype)
    for field, dim in (("head_dim", p.head_dim), ("latent_dim" if p.latent else "head_dim_v", p.head_dim_v)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise Unsupported(field, dim, f"the append kernel takes rows of 1 to {MAX_HEAD_DIM} columns", MAX_HEAD_DIM)
    if p.latent and p.sides["k"] > LATENT_DIM:
        reason = f"rows of a latent cache have up to {LATENT_DIM} columns"
        raise Unsupported("head_dim", p.sides["k"], reason, LATENT_DIM)
    if rotary_dim > p.head_dim:
        reason = f"at most head_dim columns can be rotated, {p.head_dim}"
        raise Unsupported("rope.dim", rotary_dim, reason, p.head_dim // 2 * 2)
    if rotary_dim and ELEMENTS[p.dtype].itemsize not in (2, 4):
        raise Unsupported("dtype", p.dtype, "rows that are fp8 already cannot be rotated, nor fp64 ones", "float32")
    if p.descales and (not fp8 or p.dtype == p.cache_dtype):
        reason = "descales are for rows that are quantised to fp8 here"
        raise Unsupported("cache_dtype", p.cache_dtype, reason, "float8_e4m3fn")
    if not rotary_dim and (p.heads_q or p.positions):
        field = "heads_q" if p.heads_q else "positions"
        raise Unsupported(field, True, "q and positions are given to be rotated, and no rope is asked for", None)
    return _units(p)


class _Units(NamedTuple):
    """The pieces of one head's row that threads move, for each operand."""

    k: int
    v: int
    q: int


def _units(p: AppendProblem) -> _Units:
    narrow = ELEMENTS[p.dtype].itemsize
    to_cache = 16 // min(narrow, ELEMENTS[p.cache_dtype].itemsize)
    rotary_dim, interleaved = (0, False) if p.rope is None else (p.rope.dim, p.rope.interleaved)

    def count(dim: int, rotated: int, vector: int) -> int:
        span = rotated if interleaved else rotated // 2
        return -(-span // vector) + -(-(dim - rotated) // vector)

    q = count(p.head_dim, rotary_dim, 16 // narrow) if p.heads_q else 0
    return _Units(count(p.head_dim, rotary_dim, to_cache), count(p.head_dim_v, 0, to_cache), q)


def _shared_bytes(p: AppendProblem) -> int:
    return _MAX_ROWS * (_PLACE_BYTES + (0 if p.rope is None else p.rope.dim // 2 * _ROTATION_BYTES))


class _Cut(NamedTuple):
    """How a launch's rows are divided among blocks: see the same fields in kernels_cu/append/params.cuh."""

    block_rows: int
    parts: int
    part_units: int


def cut_rows(problem: AppendProblem) -> _Cut:
    units_of = _units(problem)
    row_units = problem.heads_kv * (units_of.k + units_of.v) + problem.heads_q * units_of.q
    block_rows = max(1, min(_MAX_ROWS, _BLOCK_UNITS // row_units, problem.total // _FULL_GPU))
    units = block_rows * row_units
    parts = -(-units // _BLOCK_UNITS)
    return _Cut(block_rows, parts, -(-units // (parts * _WARP)) * _WARP)


def append_geometry(problem: AppendProblem) -> LaunchGeometry:
    cut = cut_rows(problem)
    blocks = -(-problem.total // cut.block_rows) * cut.parts
    return flat_grid(blocks, _WARPS * _WARP, _shared_bytes(problem), "total", problem.total)


class AppendTrial(NamedTuple):
    """A small append that proves a kernel. new: new rows of each sequence. before: keys that it has already."""

    problem: AppendProblem
    new: tuple[int, ...]
    before: tuple[int, ...]


def append_trials(problem: AppendProblem) -> list[AppendTrial]:
    """Return appends of sequences without new rows or keys, begun, filled and crossed pages, and rows in one block."""
    trials = []
    sizes = (((3, 0, 21, 1, 0, 8), (5, 2, 7, 0, 0, 8), 2), ((530, 3), (0, 9), 1))
    for new, before, heads in sizes:
        longest = max(map(sum, zip(new, before, strict=True))) + 4
        changes: dict[str, Any] = {"batch": len(new), "total": sum(new), "rows": 0, "heads_kv": heads}
        if problem.heads_q:
            changes["heads_q"] = 2 * heads
        if problem.layout == "paged":
            page_size = 8 if heads > 1 else 64
            blocks = -(-longest // page_size)
            changes |= {"page_size": page_size, "max_blocks": blocks, "num_blocks": len(new) * blocks + 2}
        else:
            changes["max_seq"] = longest
        if problem.rope is not None and problem.rope.table_rows:
            changes["rope"] = dataclasses.replace(problem.rope, table_rows=longest)
        trials.append(AppendTrial(dataclasses.replace(problem, **changes), new, before))
    return trials


append_layout = functools.partial(struct_layout, "Params", "append/params.cuh")


def pack_append(problem: AppendProblem, buffers: Mapping[str, Buffer]) -> bytes:
    """Return the parameters of a launch.

    The buffers by name; outer strides may be any, the last axis is contiguous:
        k (total, heads_kv, head_dim), v (total, heads_kv, head_dim_v) of dtype: the new rows, sequence after sequence.
        cu_seqlens_q int32 (batch + 1,) of the new rows, if ``rows`` is 0; rows past its end belong to no sequence.
        cache_seqlens int32 (batch,): keys of each sequence, the new ones included.
        k_cache, v_cache of cache_dtype, in the layout; with "pointers" k_pointers, v_pointers uint64 (batch,).
            A latent cache is k_cache alone, and its k_descale serves v, too.
        block_table int32 (batch, max_blocks), if paged.
        positions int32 (total,); rope_cos, rope_sin float32 (table_rows, rope.dim / 2), if asked for.
        q, q_rotated (total, heads_q, head_dim) of dtype, if heads_q > 0; q_rotated is an output.
        k_descale, v_descale float32 (batch, heads_kv), positive; either may be missing.
    Raises InvalidRequest for an operand that is missing or not as described.
    """
    binder, steps = _binder(problem)
    return binder.pack(_columns(problem, buffers) if problem.latent else buffers) + steps


def _columns(problem: AppendProblem, buffers: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """Return the buffers with the latent cache as two: its first columns as v_cache, the rest as k_cache."""
    cache, found = buffers["k_cache"], dict(buffers)
    if cache.shape[-1] != problem.sides["k"]:
        reason = f"must have {problem.sides['k']} columns: {problem.head_dim_v} of v, and k's behind them"
        raise InvalidRequest("k_cache", f"{cache.dtype}{list(cache.shape)}", reason)
    for name, first, dim in (("v_cache", 0, problem.head_dim_v), ("k_cache", problem.head_dim_v, problem.head_dim)):
        address = cache.address + first * ITEMSIZES[cache.dtype]
        found[name] = cache._replace(address=address, shape=(*cache.shape[:-1], dim))
    if "k_descale" in buffers:
        found["v_descale"] = buffers["k_descale"]
    return found


@functools.lru_cache(maxsize=256)
def _binder(problem: AppendProblem) -> tuple[Binder, bytes]:
    """Return what packs the struct, and the bytes after it: each pair's turns per position modulo 1, times 2^64."""
    layout, rope = append_layout(), problem.rope
    turns = () if rope is None or rope.table_rows else rope.frequencies
    steps = [round(math.fmod(radians / math.tau, 1.0) * 2.0**64) % (1 << 64) for radians in turns]
    scalars = layout.named(problem) | layout.named(problem.rope) | layout.named(cut_rows(problem))
    if problem.layout == "pointers":
        for name, dim in (("k", problem.head_dim), ("v", problem.head_dim_v)):
            scalars |= {f"{name}_cache_row": dim, f"{name}_cache_head": problem.max_seq * dim}
    return Binder.of(layout, _operands(problem, layout), scalars), struct.pack(f"<{len(steps)}Q", *steps)


def _operands(p: AppendProblem, layout: ParamsLayout) -> Iterator[Operand]:
    operand = layout.operand

    def rows(name: str, heads: int, dim: int) -> Operand:
        return operand(name, (f"{name}_row", f"{name}_head", "."), (p.total, heads, dim), p.dtype)

    for side, dim in (("k", p.head_dim), ("v", p.head_dim_v)):
        yield rows(side, p.heads_kv, dim)
        cache, factors = f"{side}_cache", f"{side}_descale"
        if p.layout == "pointers":
            yield operand(f"{side}_pointers", ".", (p.batch,), "uint64", field=cache)
        else:
            outer = (p.num_blocks, p.page_size) if p.layout == "paged" else (p.batch, p.max_seq)
            axes = (f"{cache}_block", f"{cache}_row", f"{cache}_head", ".")
            yield operand(cache, axes, (*outer, p.heads_kv, dim), p.cache_dtype)
        if p.descales:
            yield operand(
                factors, (f"{factors}_row", f"{factors}_head"), (p.batch, p.heads_kv), "float32", optional=True
            )
    yield operand("cache_seqlens", ".", (p.batch,), "int32")
    if not p.rows:
        yield operand("cu_seqlens_q", ".", (p.batch + 1,), "int32", field="cu_seqlens")
    if p.layout == "paged":
        yield operand("block_table", ("block_table_row", "."), (p.batch, p.max_blocks), "int32")
    if p.positions:
        yield operand("positions", ".", (p.total,), "int32")
    if p.rope is not None and p.rope.table_rows:
        for name in ("rope_cos", "rope_sin"):
            yield operand(name, (f"{name}_row", "."), (p.rope.table_rows, p.rope.dim // 2), "float32")
    if p.heads_q:
        yield rows("q", p.heads_q, p.head_dim)
        yield rows("q_rotated", p.heads_q, p.head_dim)
