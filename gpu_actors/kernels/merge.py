"""The kernels that merge partial results and that compute the gradients of the merge."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpu_actors.compiling.variant import Variant
from gpu_actors.devices.interface import Buffer, LaunchGeometry
from gpu_actors.errors import Unsupported
from gpu_actors.fields import one_of
from gpu_actors.kernels.macros import Macros, flags
from gpu_actors.kernels.params import Binder, Operand, ParamsLayout, struct_layout
from gpu_actors.kernels.program import flat_grid
from gpu_actors.kernels.support import ELEMENTS, check_capability

__all__ = [
    "GRADIENT_TERM_FIELDS",
    "TERM_FIELDS",
    "MergeProblem",
    "example_merge",
    "merge_geometry",
    "merge_gradient_geometries",
    "merge_gradient_variants",
    "merge_trials",
    "merge_variant",
    "merge_variants",
    "pack_gradient_terms",
    "pack_merge",
    "pack_merge_gradients",
    "pack_terms",
    "sums_dtype",
]

_WARPS, _WARP = 4, 32
_MOST_UNITS = (1 << 31) - 1
_DTYPES = ("float16", "bfloat16", "float32", "float64")
_LSE_DTYPES = ("float32", "float64")


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeProblem:
    """A merge of ``count`` partials. Their outs are (batch, rows, heads, columns), their lse (batch, heads, rows).

    batch: 0 if there is no such axis. dtype, lse_dtype: of the partials. out_dtype, out_lse_dtype: of the results.
    sinks: the dtype of the learned sinks, or None.
    """

    count: int
    batch: int
    rows: int
    heads: int
    columns: int
    dtype: str
    lse_dtype: str
    out_dtype: str
    out_lse_dtype: str
    sinks: str | None = None

    @property
    def results(self) -> int:
        return max(1, self.batch) * self.rows * self.heads

    @property
    def units(self) -> int:
        """The groups of all rows. Each group takes one thread."""
        return self.results * self.groups

    @property
    def groups(self) -> int:
        """The threads that share a row. Each takes 16 bytes of the narrower type, or 2 columns if one is float64."""
        sizes = (ELEMENTS[self.dtype].itemsize, ELEMENTS[self.out_dtype].itemsize)
        return -(-self.columns // (2 if max(sizes) == 8 else 16 // min(sizes)))


def merge_variant(problem: MergeProblem, arch: str) -> Variant:
    """The variant for a merge. It does not depend on sizes."""
    _check_merge(problem, arch)
    if problem.dtype == "float64" and ELEMENTS[problem.out_dtype].itemsize == 2:
        reason = "sums in float64 would be rounded twice on their way to 16 bits"
        raise Unsupported("out_dtype", problem.out_dtype, reason, "float32")
    return Variant("merge", arch, _merge_macros(problem), example=problem)


def _merge_macros(problem: MergeProblem) -> Macros:
    p = problem
    types = {"ELEMENT": p.dtype, "OUT_ELEMENT": p.out_dtype, "LSE_ELEMENT": p.lse_dtype}
    macros: Macros = {name: ELEMENTS[dtype].c_type for name, dtype in types.items()}
    return macros | {"WARPS": _WARPS} | flags(SINKS=p.sinks is not None)


def _check_merge(problem: MergeProblem, arch: str) -> None:
    check_capability(arch)
    for field, dtypes in (("dtype", _DTYPES), ("out_dtype", _DTYPES), ("lse_dtype", _LSE_DTYPES)):
        one_of(field, getattr(problem, field), dtypes)


def example_merge(dtype: str, out_dtype: str, sinks: str | None = None) -> MergeProblem:
    """The merge of two partials of one row."""
    return MergeProblem(
        count=2, batch=1, rows=1, heads=1, columns=64, dtype=dtype, lse_dtype="float32", out_dtype=out_dtype,
        out_lse_dtype="float32", sinks=sinks,
    )  # fmt: skip


def merge_variants(arch: str) -> list[Variant]:
    """The variants worth compiling ahead: 16-bit partials to their own type, float32 to it or to either 16-bit type."""
    pairs = [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32")]
    pairs += [("float32", "bfloat16"), ("float32", "float16")]
    return [merge_variant(example_merge(*pair), arch) for pair in pairs]


def merge_trials(problem: MergeProblem) -> list[MergeProblem]:
    """Merges that prove a kernel: of three partials and more, with columns that fill a thread's share or do not."""
    sizes = ((3, 2, 3, 72), (9, 0, 7, 21))
    return [
        dataclasses.replace(problem, count=count, batch=batch, rows=rows, heads=4, columns=columns)
        for count, batch, rows, columns in sizes
    ]


def merge_geometry(problem: MergeProblem) -> LaunchGeometry:
    units, threads = problem.units, _WARPS * _WARP
    if units > _MOST_UNITS:
        reason = f"a launch merges at most {_MOST_UNITS} groups of columns, and a row has {problem.groups}"
        raise Unsupported("partials", problem.results, reason, _MOST_UNITS // problem.groups)
    return LaunchGeometry((-(-units // threads), 1, 1), (threads, 1, 1), 0)


TERM_FIELDS = 8
"""64-bit fields of an entry of the table of terms."""


def pack_terms(problem: MergeProblem, buffers: Mapping[str, Buffer]) -> bytes:
    """The table of terms, uint64 (count, TERM_FIELDS): where out.N and lse.N of each partial lie."""
    layout = struct_layout("Term", "merge/terms.cuh")
    table = []
    for index in range(problem.count):
        operands = _result_operands(problem, layout, problem.dtype, problem.lse_dtype, f".{index}")
        table.append(Binder.of(layout, operands).pack(buffers))
    return b"".join(table)


def pack_merge(problem: MergeProblem, buffers: Mapping[str, Buffer]) -> bytes:
    """buffers: terms uint64 (count, TERM_FIELDS), from `pack_terms`; out and lse; sinks (heads,), if asked for."""
    return _binder(problem).pack(buffers)


@functools.lru_cache(maxsize=256)
def _binder(p: MergeProblem) -> Binder:
    layout = struct_layout("Params", "merge/terms.cuh", "merge/merge.cu")
    operands = [*_result_operands(p, layout, p.out_dtype, p.out_lse_dtype)]
    operands.append(layout.operand("terms", "..", (p.count, TERM_FIELDS), "uint64"))
    if p.sinks is not None:
        operands.append(layout.operand("sinks", ("sinks_stride",), (p.heads,), p.sinks))
    return Binder.of(layout, operands, layout.named(p) | {"sinks_are_float": int(p.sinks == "float32")})


def _result_operands(
    p: MergeProblem, layout: ParamsLayout, dtype: str, lse_dtype: str, suffix: str = "", prefix: str = ""
) -> Iterator[Operand]:
    """The operands out and lse plus the suffix. Their fields of the struct are the prefix plus out and lse."""
    outer, axes = ((p.batch,), "b") if p.batch else ((), "")
    out, lse = (*outer, p.rows, p.heads, p.columns), (*outer, p.heads, p.rows)
    yield layout.operand(f"out{suffix}", f"{axes}rh.", out, dtype, prefix=prefix, field="out")
    yield layout.operand(f"lse{suffix}", f"{axes}hr", lse, lse_dtype, prefix=prefix, field="lse")


# The gradient

_GRADIENT_SOURCES = ("merge/terms.cuh", "merge/merge_gradients.cu")

GRADIENT_TERM_FIELDS = 10
"""64-bit fields of an entry of the table of terms."""


def merge_gradient_variants(problem: MergeProblem, arch: str) -> tuple[Variant, ...]:
    """The variants in the order of the launches. With sinks, the second sums the rows of each. out_dtype: dout's."""
    _check_merge(problem, arch)
    if problem.out_dtype == "float64" and ELEMENTS[problem.dtype].itemsize == 2:
        reason = "gradients in float64 would be rounded twice on their way to 16 bits"
        raise Unsupported("dout", problem.out_dtype, reason, "float32")
    macros, passes = _merge_macros(problem), (False, True) if problem.sinks is not None else (False,)
    return tuple(Variant("merge_gradients", arch, macros | flags(SUM_SINKS=last), example=problem) for last in passes)


def sums_dtype(problem: MergeProblem) -> str:
    """The dtype of sums: float64 if an operand has it, else float32."""
    return "float64" if "float64" in (problem.dtype, problem.lse_dtype, problem.out_dtype) else "float32"


def _lanes(problem: MergeProblem) -> int:
    """The threads that share a row: a power of 2, so that a warp has whole rows."""
    return min(_WARP, 1 << (problem.groups - 1).bit_length())


def merge_gradient_geometries(problem: MergeProblem) -> list[LaunchGeometry]:
    threads, most = _WARPS * _WARP, (1 << 31) - 1
    if problem.results > most:
        raise Unsupported("partials", problem.results, f"a launch takes at most {most} rows of all heads", most)
    counts = [-(-problem.results * _lanes(problem) // threads)]
    if problem.sinks is not None:
        counts.append(problem.heads)
    return [flat_grid(blocks, threads, 0, "partials", problem.results) for blocks in counts]


def pack_gradient_terms(problem: MergeProblem, buffers: Mapping[str, Buffer]) -> bytes:
    """The table of terms, uint64 (count, GRADIENT_TERM_FIELDS): where each partial and its gradients lie.

    buffers: out.N and lse.N; dout.N and dlse.N like them, without gaps.
    """
    p, layout = problem, struct_layout("GradientTerm", *_GRADIENT_SOURCES)
    table = []
    for index in range(p.count):
        operands = [*_result_operands(p, layout, p.dtype, p.lse_dtype, f".{index}", "seen.")]
        for operand in _result_operands(p, layout, p.dtype, p.lse_dtype, f".{index}", "seen."):
            address = layout.positions["d" + operand.name.split(".")[0]]
            operands.append(operand._replace(name="d" + operand.name, address=address, strides=(), packed=0))
        table.append(Binder.of(layout, operands).pack(buffers))
    return b"".join(table)


def pack_merge_gradients(problem: MergeProblem, buffers: Mapping[str, Buffer]) -> bytes:
    """The parameters of either launch.

    buffers: terms uint64 (count, GRADIENT_TERM_FIELDS), from `pack_gradient_terms`; dout; dlse, or none; with sinks
    also sinks (heads,), dsinks (heads,) in float32, and sink_parts (heads, batch * rows) of the sums' dtype.
    """
    return _gradient_binder(problem).pack(buffers)


@functools.lru_cache(maxsize=256)
def _gradient_binder(p: MergeProblem) -> Binder:
    layout = struct_layout("GradientParams", *_GRADIENT_SOURCES)
    operands = [layout.operand("terms", "..", (p.count, GRADIENT_TERM_FIELDS), "uint64")]
    merged = _result_operands(p, layout, p.out_dtype, p.out_lse_dtype, prefix="d")
    operands += [operand._replace(name="d" + operand.name, optional=operand.name == "lse") for operand in merged]
    if p.sinks is not None:
        operands.append(layout.operand("sinks", ("sinks_stride",), (p.heads,), p.sinks))
        operands.append(layout.operand("sink_parts", "..", (p.heads, p.results // p.heads), sums_dtype(p)))
        operands.append(layout.operand("dsinks", ".", (p.heads,), "float32"))
    scalars = {"lanes": _lanes(p), "sinks_are_float": int(p.sinks == "float32")}
    return Binder.of(layout, operands, layout.named(p) | scalars)
