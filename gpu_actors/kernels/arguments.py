"""Packs an attention problem and its operands into the bytes of the kernels' Params struct.

The struct is declared once, in kernels_cu/forward_params.cuh, and read from there: a field cannot be in another place
here than in the kernel.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gpu_actors.devices.interface import Buffer
from gpu_actors.errors import InvalidRequest
from gpu_actors.kernels.assets import asset_text
from gpu_actors.kernels.support import ELEMENTS
from gpu_actors.philox import dropout_threshold
from gpu_actors.problem import AttentionProblem

__all__ = [
    "UNBOUNDED",
    "Field",
    "Operand",
    "ParamsLayout",
    "checked_address",
    "describe_operand",
    "forward_layout",
    "forward_operands",
    "forward_scalars",
    "pack_forward",
    "parse_layout",
]

# A window bound that no pair of rows can exceed; it stays addable to two row indices in 32 bits.
UNBOUNDED = 1 << 30

_HEADER = "forward_params.cuh"
_C_TYPES = {"int32_t": "i", "uint32_t": "I", "int64_t": "q", "uint64_t": "Q", "float": "f", "double": "d"}
_STRUCT = re.compile(r"struct (\w+) \{[^\n]*\n(.*?)\n\};", re.S)
_FIELD = re.compile(r"(?:const )?(\w+)(\*?) (\w+);(?:\s*//.*)?")
_AXES = {"b": "batch", "r": "row", "h": "head"}


class Field(NamedTuple):
    """A scalar of a struct. name: its path, as in "q_strides.row". code: of the struct module. offset: in bytes."""

    name: str
    code: str
    offset: int


@dataclass(frozen=True)
class ParamsLayout:
    """A parameter struct as a C compiler lays it out on a 64-bit host and on the GPU. size: in bytes, padded."""

    fields: tuple[Field, ...]
    size: int

    @property
    def dtype(self) -> np.dtype[np.void]:
        """The same as a NumPy structured dtype, to look into packed bytes."""
        return np.dtype(
            {
                "names": [field.name for field in self.fields],
                "formats": [np.dtype(field.code) for field in self.fields],
                "offsets": [field.offset for field in self.fields],
                "itemsize": self.size,
            }
        )

    @functools.cached_property
    def positions(self) -> dict[str, int]:
        """The position of each field, by name."""
        return {field.name: position for position, field in enumerate(self.fields)}

    def pack(self, values: Sequence[int | float]) -> bytes:
        """The struct's bytes. values: of every field, in order."""
        return self._struct.pack(*values)

    @functools.cached_property
    def _struct(self) -> struct.Struct:
        codes, end = ["<"], 0
        for field in self.fields:
            codes.append(f"{field.offset - end}x{field.code}")
            end = field.offset + struct.calcsize(field.code)
        return struct.Struct("".join(codes) + f"{self.size - end}x")


@functools.cache
def forward_layout() -> ParamsLayout:
    """struct Params of kernels_cu/forward_params.cuh."""
    return parse_layout(asset_text(_HEADER), "Params")


def parse_layout(header: str, name: str) -> ParamsLayout:
    """The layout of struct ``name``, whose members are scalars, pointers and structs declared before it.

    Raises ValueError for a line that is no such member.
    """
    bodies = {match[1]: match[2] for match in _STRUCT.finditer(header)}

    def scalars(struct_name: str, prefix: str) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for line in bodies[struct_name].splitlines():
            member = _FIELD.fullmatch(line.strip())
            if member is None:
                raise ValueError(f"struct {struct_name}: {line.strip()!r} is not one 'type name;'")
            c_type, pointer, field = member.groups()
            if pointer:
                found.append((prefix + field, "Q"))
            elif c_type in bodies:
                found += scalars(c_type, f"{prefix}{field}.")
            elif c_type in _C_TYPES:
                found.append((prefix + field, _C_TYPES[c_type]))
            else:
                raise ValueError(f"struct {struct_name}: unknown type {c_type!r} of {field}")
        return found

    fields: list[Field] = []
    end = 0
    for path, code in scalars(name, ""):
        size = struct.calcsize(code)
        offset = -(-end // size) * size
        fields.append(Field(path, code, offset))
        end = offset + size
    widest = max(struct.calcsize(field.code) for field in fields)
    return ParamsLayout(tuple(fields), -(-end // widest) * widest)


class Operand(NamedTuple):
    """An operand of a problem, and where its address and strides go in the struct.

    strides: (axis of the operand, index of the field) of each axis of extent above 1 that the kernel strides over.
    contiguous: the axis that must be contiguous, or None.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    optional: bool
    address: int
    strides: tuple[tuple[int, int], ...]
    contiguous: int | None


class _Plan(NamedTuple):
    """What packing a problem comes down to. values: of every field, those of operands still 0."""

    values: tuple[int | float, ...]
    operands: tuple[Operand, ...]
    seed: int | None  # index of dropout_seed
    sinks_are_float: int | None  # index of the flag


def pack_forward(problem: AttentionProblem, buffers: Mapping[str, Buffer], *, dropout_seed: int = 0) -> bytes:
    """The parameters of a forward launch.

    buffers: by name, of shapes as in `AttentionProblem`:
        q (batch, seqlen_q, heads_q, head_dim), k and v alike, out (batch, seqlen_q, heads_q, head_dim_v), or packed
        (total, heads, dim) where varlen, with cu_seqlens_q and cu_seqlens_k int32 (batch + 1,); any outer strides.
        lse float32 (batch, heads_q, seqlen_q), or (heads_q, total_q), where return_lse.
        bias (batch or 1, heads_q or 1, seqlen_q, seqlen_k); alibi_slopes float32 (heads_q,) or (batch, heads_q);
        sinks (heads_q,) float32 or of the output's dtype; q_descale, k_descale, v_descale float32 (batch, heads_kv),
        of which some may be missing. Only what the problem asks for is looked at.
    dropout_seed: 0 <= seed < 2^64.
    Raises InvalidRequest for an operand that is missing or not as described; axes of extent 1 may have any stride.
    """
    plan = _plan(problem)
    values = list(plan.values)
    for operand in plan.operands:
        buffer = buffers.get(operand.name)
        if buffer is None and operand.optional:
            continue
        values[operand.address] = checked_address(operand, buffer)
        assert buffer is not None
        for axis, index in operand.strides:
            values[index] = buffer.strides[axis]
    if plan.seed is not None:
        if not 0 <= dropout_seed < 1 << 64:
            raise InvalidRequest("dropout_seed", dropout_seed, "the seed is an unsigned 64-bit integer")
        values[plan.seed] = dropout_seed
    if plan.sinks_are_float is not None:
        values[plan.sinks_are_float] = buffers["sinks"].dtype == "float32"
    return forward_layout().pack(values)


@functools.lru_cache(maxsize=1024)
def _plan(problem: AttentionProblem) -> _Plan:
    layout = forward_layout()
    values: list[int | float] = [0] * len(layout.fields)
    for name, value in forward_scalars(problem).items():
        values[layout.positions[name]] = value
    return _Plan(
        tuple(values),
        tuple(forward_operands(problem, layout)),
        layout.positions["dropout_seed"] if problem.dropout_p else None,
        layout.positions["sinks_are_float"] if problem.sinks else None,
    )


def forward_scalars(problem: AttentionProblem) -> dict[str, int | float]:
    left, right = problem.window
    scalars = {
        "softmax_scale": problem.softmax_scale,
        "softcap": problem.softcap,
        "heads_q": problem.heads_q,
        "heads_kv": problem.heads_kv,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "window_left": UNBOUNDED if left < 0 else min(left, UNBOUNDED),
        "window_right": UNBOUNDED if right < 0 else min(right, UNBOUNDED),
        "sink_tokens": min(problem.sink_tokens, UNBOUNDED),
    }
    if problem.dropout_p:
        scalars["dropout_scale"] = 1.0 / (1.0 - problem.dropout_p)
        scalars["dropout_threshold"] = dropout_threshold(problem.dropout_p)
    return scalars


def describe_operand(
    layout: ParamsLayout,
    name: str,
    axes: str,
    shape: tuple[int, ...],
    *dtypes: str,
    prefix: str = "",
    optional: bool = False,
) -> Operand:
    """Where an operand goes in a struct: its address into ``prefix + name``, its strides into the Strides beside it.

    axes: a letter an axis, b (batch), r (row), h (head) or . (contiguous).
    """
    # A stride along an extent of 1 means nothing, and has to be 0 where the operand is broadcast along it.
    strides = tuple(
        (axis, layout.positions[f"{prefix}{name}_strides.{_AXES[letter]}"])
        for axis, letter in enumerate(axes)
        if letter != "." and shape[axis] > 1
    )
    last = len(shape) - 1
    contiguous = last if axes[-1] == "." and shape[last] > 1 else None
    return Operand(name, shape, dtypes, optional, layout.positions[prefix + name], strides, contiguous)


def forward_operands(problem: AttentionProblem, layout: ParamsLayout, prefix: str = "") -> Iterator[Operand]:
    """Every operand of struct Params that the problem asks for. prefix: of its fields in ``layout``."""
    p, varlen = problem, problem.layout == "varlen"
    operand = functools.partial(describe_operand, layout, prefix=prefix)
    packed = varlen or p.varlen_q
    rows = (p.total_q,) if packed else (p.batch, p.seqlen_q)
    axes = "rh." if packed else "brh."
    yield operand("q", axes, (*rows, p.heads_q, p.head_dim), p.dtype)
    yield operand("out", axes, (*rows, p.heads_q, p.head_dim_v), p.out_dtype)
    keys, axes = _keys(p)
    yield operand("k", axes, (*keys, p.heads_kv, p.head_dim), p.kv_dtype)
    yield operand("v", axes, (*keys, p.heads_kv, p.head_dim_v), p.kv_dtype)
    if packed:
        yield operand("cu_seqlens_q", ".", (p.batch + 1,), "int32")
    if varlen:
        yield operand("cu_seqlens_k", ".", (p.batch + 1,), "int32")
    if p.return_lse and packed:
        yield operand("lse", "hr", (p.heads_q, p.total_q), "float32")
    elif p.return_lse:
        yield operand("lse", "bhr", (p.batch, p.heads_q, p.seqlen_q), "float32")
    if p.bias is not None:
        dtype, one_batch, one_head = p.bias
        outer = (1 if one_batch else p.batch, 1 if one_head else p.heads_q)
        yield operand("bias", "bhr.", (*outer, p.seqlen_q, p.seqlen_k), dtype)
    if p.alibi == "heads":
        yield operand("alibi_slopes", "h", (p.heads_q,), "float32")
    elif p.alibi == "batch":
        yield operand("alibi_slopes", "bh", (p.batch, p.heads_q), "float32")
    if p.sinks:
        yield operand("sinks", "h", (p.heads_q,), "float32", p.out_dtype)
    if p.descales:
        for name in ("q_descale", "k_descale", "v_descale"):
            yield operand(name, "bh", (p.batch, p.heads_kv), "float32", optional=True)


def _keys(p: AttentionProblem) -> tuple[tuple[int, ...], str]:
    """The outer shape of k and v, and what its axes are. Pages are a batch."""
    if p.layout == "varlen":
        return (p.total_k,), "rh."
    if p.layout == "paged":
        return (p.total_k // p.page_size, p.page_size), "brh."
    return (p.batch, p.seqlen_k), "brh."


def checked_address(operand: Operand, buffer: Buffer | None) -> int:
    """The operand's address, after a look at its shape, dtype and alignment."""
    name, shape, dtypes = operand.name, operand.shape, operand.dtypes
    if buffer is None or buffer.shape != shape or buffer.dtype not in dtypes:
        given = None if buffer is None else f"{buffer.dtype}{list(buffer.shape)}"
        wanted = f"must be {' or '.join(dict.fromkeys(dtypes))} of shape {shape} for this problem"
        raise InvalidRequest(name, given, wanted)
    if operand.contiguous is not None and buffer.strides[operand.contiguous] != 1:
        raise InvalidRequest(name, f"strides {buffer.strides}", "the last axis must be contiguous")
    itemsize = ELEMENTS[buffer.dtype].itemsize if buffer.dtype in ELEMENTS else 4
    if buffer.address % itemsize:
        raise InvalidRequest(name, hex(buffer.address), f"must start at a multiple of {itemsize} bytes")
    return buffer.address
