"""Binds the operands of a launch to the fields of a kernel's parameter struct, and packs the Params of all kernels.

Params is declared once, in kernels_cu/common/params.cuh, and read from there, so that a field has the same place here
and in the kernel.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from gpu_actors.attention.philox import dropout_threshold
from gpu_actors.attention.problem import AttentionProblem
from gpu_actors.attention.score_mod import ScoreMod
from gpu_actors.compiling.assets import asset_text
from gpu_actors.devices.interface import Buffer
from gpu_actors.errors import InvalidRequest
from gpu_actors.kernels.program import Pack, Values
from gpu_actors.kernels.support import ELEMENTS

__all__ = [
    "ITEMSIZES",
    "UNBOUNDED",
    "Binder",
    "Field",
    "Operand",
    "ParamsLayout",
    "divider",
    "forward_layout",
    "forward_operands",
    "forward_packer",
    "forward_scalars",
    "key_rows",
    "launch_values",
    "parse_layout",
    "row_stats_layout",
    "row_stats_packer",
    "score_layout",
    "score_packer",
    "struct_layout",
]

# A window bound that no pair of rows can exceed. Its sum with two row indices fits into 32 bits.
UNBOUNDED = 1 << 30

_C_TYPES = {"int32_t": "i", "uint32_t": "I", "int64_t": "q", "uint64_t": "Q", "float": "f", "double": "d"}
_STRUCT = re.compile(r"struct (\w+) \{[^\n]*\n(.*?)\n\};", re.S)
_FIELD = re.compile(r"(?:const )?(\w+)(\*?) (\w+);(?:\s*//.*)?")
_AXES = {"b": "batch", "r": "row", "h": "head"}

ITEMSIZES = {"bool": 1, "int32": 4, "uint64": 8} | {name: element.itemsize for name, element in ELEMENTS.items()}
"""The bytes of an element, by its dtype."""


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

    @functools.cached_property
    def positions(self) -> dict[str, int]:
        return {field.name: position for position, field in enumerate(self.fields)}

    def named(self, source: object, code: str = "i") -> dict[str, Any]:
        """The values of fields with this code of the struct module, from attributes of ``source`` with these names."""
        names = [field.name for field in self.fields if field.code == code]
        return {name: getattr(source, name) for name in names if hasattr(source, name)}

    def pack(self, values: Sequence[int | float]) -> bytes:
        return self._struct.pack(*values)

    def operand(
        self,
        name: str,
        axes: Sequence[str],
        shape: tuple[int, ...],
        *dtypes: str,
        prefix: str = "",
        field: str | None = None,
        optional: bool = False,
    ) -> Operand:
        """Describe where an operand goes: its address into ``prefix + field``, its strides into the Strides beside it.

        field: "" if no field takes the address; by default the operand's name.
        axes: for each axis b (batch), r (row), h (head), . (it and all after it have no gaps), "" (any stride, which no
        field takes) or the name of the field that takes its stride.
        """
        field = name if field is None else field

        def index(axis: str) -> int:
            return self.positions[f"{prefix}{field}_strides.{_AXES[axis]}" if axis in _AXES else prefix + axis]

        # A stride along an extent of 1 has no meaning. It must be 0 if the operand is broadcast along it.
        strides = tuple((n, index(axis)) for n, axis in enumerate(axes) if axis not in ("", ".") and shape[n] > 1)
        packed = next((n for n, axis in enumerate(axes) if axis == "."), len(shape))
        address = self.positions[prefix + field] if field else None
        return Operand(name, shape, dtypes, optional, address, strides, packed)

    @functools.cached_property
    def _struct(self) -> struct.Struct:
        codes, end = ["<"], 0
        for field in self.fields:
            codes.append(f"{field.offset - end}x{field.code}")
            end = field.offset + struct.calcsize(field.code)
        return struct.Struct("".join(codes) + f"{self.size - end}x")


def parse_layout(header: str, name: str) -> ParamsLayout:
    """The layout of a struct whose members are scalars, pointers and structs declared before it."""
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


@functools.cache
def struct_layout(name: str, *files: str) -> ParamsLayout:
    """The layout of a struct of the last of these files of kernels_cu. The others may declare its members' types."""
    return parse_layout("\n".join(map(asset_text, files)), name)


forward_layout = functools.partial(struct_layout, "Params", "common/params.cuh")


def divider(divisor: int) -> tuple[int, int]:
    """(multiplier, shift) to divide 0 <= n < 2^31 by 1 <= divisor < 2^31, a divisor for which no cubin is compiled.

    n // divisor == (n * multiplier >> 32) >> shift; a multiplier of 0 stands for division by 1. Both fit 32 bits.
    Granlund and Montgomery, "Division by invariant integers using multiplication", PLDI 1994, theorem 4.2.
    """
    if divisor == 1:
        return 0, 0
    bits = (divisor - 1).bit_length()
    return ((1 << (31 + bits)) + divisor - 1) // divisor, bits - 1


class Operand(NamedTuple):
    """An operand of a launch, and where its address and strides go in the struct.

    address: index of the field, or None if no field takes the address. strides: (axis of the operand, index of the
    field) of each axis of extent above 1 that the kernel strides over. packed: the first of the axes that must have no
    gaps, or the number of axes if all may have them.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    optional: bool
    address: int | None
    strides: tuple[tuple[int, int], ...]
    packed: int

    def check(self, buffer: Buffer | None) -> Buffer:
        """Return the buffer, after a check of its shape, dtype, last axes and alignment."""
        name, shape = self.name, self.shape
        if buffer is None or buffer.shape != shape or buffer.dtype not in self.dtypes:
            given = None if buffer is None else f"{buffer.dtype}{list(buffer.shape)}"
            wanted = f"must be {' or '.join(dict.fromkeys(self.dtypes))} of shape {shape} for this launch"
            raise InvalidRequest(name, given, wanted)
        stride = 1
        for axis in range(len(shape) - 1, self.packed - 1, -1):
            if shape[axis] > 1 and buffer.strides[axis] != stride:
                last = self.packed == len(shape) - 1
                which = "the last axis must be contiguous" if last else f"must be contiguous from axis {self.packed} on"
                raise InvalidRequest(name, f"strides {buffer.strides}", which)
            stride *= shape[axis]
        itemsize = ITEMSIZES[buffer.dtype]
        if buffer.address % itemsize:
            raise InvalidRequest(name, hex(buffer.address), f"must start at a multiple of {itemsize} bytes")
        return buffer


class Binder(NamedTuple):
    """Packs the operands of a problem into the bytes of a struct. values: of every field; 0 for those of operands.

    A packer makes its binder at the first launch (`functools.cache`), because a device that runs no kernels needs none.
    Packers raise InvalidRequest for an operand that is missing or not as described.
    """

    layout: ParamsLayout
    values: tuple[int | float, ...]
    operands: tuple[Operand, ...]

    @classmethod
    def of(
        cls,
        layout: ParamsLayout,
        operands: Iterable[Operand],
        scalars: Mapping[str, int | float] = MappingProxyType({}),
    ) -> Binder:
        """scalars: values by the name of their field; fields without a value are 0."""
        values: list[int | float] = [0] * len(layout.fields)
        for name, value in scalars.items():
            values[layout.positions[name]] = value
        return cls(layout, tuple(values), tuple(operands))

    def pack(self, buffers: Mapping[str, Buffer], more: Mapping[str, int | float] = MappingProxyType({})) -> bytes:
        """more: fields by name whose values only a launch knows. Axes of extent 1 may have any stride."""
        values = list(self.values)
        for operand in self.operands:
            buffer = buffers.get(operand.name)
            if buffer is None and operand.optional:
                continue
            buffer = operand.check(buffer)
            if operand.address is not None:
                values[operand.address] = buffer.address
            for axis, index in operand.strides:
                values[index] = buffer.strides[axis]
        for name, value in more.items():
            values[self.layout.positions[name]] = value
        return self.layout.pack(values)


def forward_packer(problem: AttentionProblem) -> Pack:
    """Return what packs the parameters of forward launches of a problem.

    The buffers are those of `forward_operands`, by name. Only buffers that the problem asks for are read.
    """
    layout = forward_layout()
    binder = functools.cache(lambda: Binder.of(layout, forward_operands(problem, layout), forward_scalars(problem)))

    def pack(buffers: Mapping[str, Buffer], values: Values) -> bytes:
        return binder().pack(buffers, launch_values(problem, buffers, values.dropout_seed))

    return pack


row_stats_layout = functools.partial(struct_layout, "RowStats", "common/params.cuh", "common/row_stats.cuh")


def row_stats_packer(problem: AttentionProblem) -> Pack | None:
    """Return what packs RowStats, which follow a launch's Params, or None if the problem has none of these outputs."""
    if not problem.row_stats:
        return None
    layout, shape = row_stats_layout(), problem.lse_shape
    names = [name for name in ("score_max", "score_sum_exp") if getattr(problem, name)]
    operands = [layout.operand(name, "bhr"[3 - len(shape) :], shape, "float32") for name in names]
    binder = Binder.of(layout, operands)
    return lambda buffers, values: binder.pack(buffers)


def launch_values(
    problem: AttentionProblem, buffers: Mapping[str, Buffer], dropout_seed: int = 0, prefix: str = ""
) -> dict[str, int]:
    """The fields of struct Params that a launch decides, not its problem. prefix: of the fields' names."""
    values: dict[str, int] = {}
    if problem.dropout_p:
        if not 0 <= dropout_seed < 1 << 64:
            raise InvalidRequest("dropout_seed", dropout_seed, "the seed is an unsigned 64-bit integer")
        values[f"{prefix}dropout_seed"] = dropout_seed
    if problem.sinks and "sinks" in buffers:
        values[f"{prefix}sinks_are_float"] = buffers["sinks"].dtype == "float32"
    return values


def forward_scalars(problem: AttentionProblem, prefix: str = "") -> dict[str, int | float]:
    """The fields of struct Params that a problem decides."""
    left, right = problem.window_size
    layout = forward_layout()
    scalars = layout.named(problem, "d") | {n: min(value, UNBOUNDED) for n, value in layout.named(problem).items()}
    scalars["window_left"] = UNBOUNDED if left < 0 else min(left, UNBOUNDED)
    scalars["window_right"] = UNBOUNDED if right < 0 else min(right, UNBOUNDED)
    scalars["dropout_scale"] = 1.0 / (1.0 - problem.dropout_p)
    if problem.positions:
        scalars |= {"q_position_words": problem.q_positions, "k_position_words": problem.k_positions}
        scalars["dropout_heads"] = problem.dropout_heads or problem.heads_q
    if problem.dropout_p:
        scalars["dropout_threshold"] = dropout_threshold(problem.dropout_p)
    return {prefix + name: value for name, value in scalars.items()}


def forward_operands(problem: AttentionProblem, layout: ParamsLayout, prefix: str = "") -> Iterator[Operand]:
    """Yield every operand of struct Params that the problem asks for.

    Outer strides may be any; descales may be missing.
    """
    p, varlen = problem, problem.layout == "varlen"
    operand = functools.partial(layout.operand, prefix=prefix)
    packed = varlen or p.varlen_q
    rows = (p.total_q,) if packed else (p.batch, p.seqlen_q)
    axes = "rh." if packed else "brh."
    yield operand("q", axes, (*rows, p.heads_q, p.head_dim), p.dtype)
    yield operand("out", axes, (*rows, p.heads_q, p.head_dim_v), p.out_dtype)
    for side, dim in (("k", p.head_dim), ("v", p.head_dim_v)) if p.layout != "pointers" else ():
        keys, axes = key_rows(p)
        if p.latent:  # values lie where keys do
            yield operand("k_cache", axes, (*keys, p.heads_kv, p.head_dim), p.kv_dtype, field=side)
            continue
        name = f"{side}_cache" if p.decoding else side
        yield operand(name, axes, (*keys, p.heads_kv, dim), p.kv_dtype, field=side)
    if packed:
        yield operand("cu_seqlens_q", ".", (p.batch + 1,), "int32")
    if varlen:
        yield operand("cu_seqlens_k", ".", (p.batch + 1,), "int32")
    if p.return_lse:
        yield operand("lse", "hr" if packed else "bhr", p.lse_shape, p.lse_dtype)
    if p.bias is not None:
        yield operand("bias", "bhr.", p.bias_shape, p.bias[0])
    if p.alibi == "heads":
        yield operand("alibi_slopes", "h", (p.heads_q,), "float32")
    elif p.alibi == "batch":
        yield operand("alibi_slopes", "bh", (p.batch, p.heads_q), "float32")
    for name, words in (("q_positions", p.q_positions), ("k_positions", p.k_positions)):
        if words:
            yield operand(name, "." * words, (p.batch, 2)[:words], "int32")
    if p.sinks:
        yield operand("sinks", "h", (p.heads_q,), "float32", p.out_dtype)
    if p.descales:
        for name in ("q_descale", "k_descale", "v_descale"):
            yield operand(name, "bh", (p.batch, p.heads_kv), "float32", optional=True)


def key_rows(p: AttentionProblem) -> tuple[tuple[int, ...], str]:
    """The outer shape of k and v, and the axes of each as `ParamsLayout.operand` takes them. Pages are a batch."""
    if p.layout == "varlen":
        return (p.total_k,), "rh."
    if p.layout == "paged":
        return (p.total_k // p.page_size, p.page_size), "brh."
    return (p.total_k // p.seqlen_k if p.cache_batch_idx else p.batch, p.seqlen_k), "brh."


# ``ScoreParams`` of a modification's generated header, which follows a kernel's Params.

_SCORE_ALIGNMENT = 8  # of the struct that holds Params and ScoreParams
_SCORE_AXES = "bhrk"


def score_layout(mod: ScoreMod) -> ParamsLayout | None:
    """The layout of struct ScoreParams in the modification's header, or None if it reads no tensor and no scalar."""
    if not mod.tensors and not mod.scalars:
        return None
    return parse_layout(mod.header, "ScoreParams")


def score_packer(problem: AttentionProblem) -> Pack | None:
    """Return what packs ScoreParams, which follow a launch's own parameters, or None if there are none.

    The buffers are ``ScoreMod.tensor_name(n)`` for every tensor, with any strides.
    """
    mod = problem.score_mod
    layout = None if mod is None else score_layout(mod)
    if mod is None or layout is None:
        return None
    binder = functools.cache(lambda: _score_binder(problem, mod, layout))

    def pack(buffers: Mapping[str, Buffer], values: Values) -> bytes:
        packed = binder().pack(buffers, {f"v{n}": value for n, value in enumerate(values.score_scalars)})
        return packed + bytes(-len(packed) % _SCORE_ALIGNMENT)

    return pack


def _score_binder(problem: AttentionProblem, mod: ScoreMod, layout: ParamsLayout) -> Binder:
    lengths = (problem.seqlen_q, problem.seqlen_k)
    extents = dict(zip(_SCORE_AXES, (problem.batch, problem.heads_q, *lengths), strict=True))
    if mod.block_size is not None:
        extents |= {axis: -(-n // step) for axis, n, step in zip("RK", lengths, mod.block_size, strict=True)}
    operands = []
    for n, tensor in enumerate(mod.tensors):
        axes = tensor.blocks or _SCORE_AXES
        wanted = tuple(extents[axis] if axis in tensor.axes else 1 for axis in axes)
        strides = [f"t{n}_{axis}" if axis in tensor.axes else "" for axis in axes]
        operands.append(layout.operand(mod.tensor_name(n), strides, wanted, tensor.dtype, field=f"t{n}"))
    return Binder.of(layout, operands)
