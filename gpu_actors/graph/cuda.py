"""Generates the CUDA of a score modification: a header that replaces kernels_cu/common/score_mod.cuh.

Its text depends on the operations and on how tensors broadcast. Extents, strides, numbers and uids are parameters and
not in the text. So equal modifications have equal headers, and share a cubin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpu_actors.attention.score_mod import ScoreMod, ScoreScalar, ScoreTensor
from gpu_actors.graph.derivative import derivative
from gpu_actors.graph.expression import Expression, in_order
from gpu_actors.kernels.support import ELEMENTS

__all__ = ["score_mod"]

_C_TYPES = {**{name: element.c_type for name, element in ELEMENTS.items()}, "int32": "int32_t", "bool": "bool"}
_INDICES = ("batch", "head", "row", "key")

# {0}, {1}, .. stand for the arguments, {real} for the type of the arithmetic.
_CODE = {
    "score": "score",
    "dscore": "dscore",
    "cast": "{real}({0})",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "mod": "modulo({0}, {1})",
    "floordiv": "floor_divide({0}, {1})",
    "max": "maximum_of({0}, {1})",
    "min": "minimum_of({0}, {1})",
    "neg": "-{0}",
    "abs": "abs_of({0})",
    "exp": "exp_of({0})",
    "log": "log_of({0})",
    "sqrt": "sqrt_of({0})",
    "sin": "sin_of({0})",
    "cos": "cos_of({0})",
    "tan": "tan_of({0})",
    "tanh": "tanh_of({0})",
    "sigmoid": "sigmoid_of({0})",
    "gelu": "{0} * normal_cdf({0})",
    "cdf": "normal_cdf({0})",
    "density": "normal_density({0})",
    "sign": "sign_of({0})",
    "floor": "floor_of({0})",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "logical_and": "{0} && {1}",
    "logical_or": "{0} || {1}",
    "logical_not": "!{0}",
    "select": "{0} ? {1} : {2}",
}


def score_mod(
    root: Expression,
    score: Expression,
    tensors: Sequence[ScoreTensor],
    scalars: Sequence[ScoreScalar],
    real: str,
    block_size: tuple[int, int] | None = None,
    full_root: Expression | None = None,
) -> ScoreMod:
    """The modification that computes the expression ``root`` of the leaf ``score``.

    tensors, scalars: the operands of the leaves with these names, by slot.
    real: "float", or "double" for float64 scores.
    block_size: rows and keys of a block of a block mask, whose lists are the last tensors. full_root: the expression
        for its full blocks.
    """
    read = [tensor for tensor in tensors if not tensor.blocks]
    members = _members(read)
    header = _HEADER.format(
        block_mask=int(block_size is not None),
        real=real,
        parameters="".join(f"  {line}\n" for line in _parameters(tensors, scalars, real)),
        members="".join(f"  {line}\n" for line in members),
        binding="".join(f"  {line}\n" for line in _binding(read)),
        body=_body(root, tensors, real),
        shown="" if full_root is None else _SHOWN.format(real=real, body=_body(full_root, tensors, real)),
        gradient=_body(derivative(root, score), tensors, real),
        holder=_HOLDER if tensors or scalars else _EMPTY_HOLDER,
    )
    if block_size is None:
        return ScoreMod(header, tuple(tensors), tuple(scalars), real)
    header += _block_lists(tensors, len(read), block_size, shows=full_root is not None)
    return ScoreMod(header, tuple(tensors), tuple(scalars), real, block_size)


def _parameters(tensors: Sequence[ScoreTensor], scalars: Sequence[ScoreScalar], real: str) -> Iterable[str]:
    for n, tensor in enumerate(tensors):
        yield f"const void* t{n};"
        yield from (f"int64_t t{n}_{axis};" for axis in tensor.axes)
    for n, scalar in enumerate(scalars):
        yield f"{'int32_t' if scalar.dtype == 'int32' else real} v{n};"


def _members(tensors: Sequence[ScoreTensor]) -> Iterable[str]:
    return [f"const {_C_TYPES[tensor.dtype]}* t{n};  // of this sequence and head" for n, tensor in enumerate(tensors)]


def _binding(tensors: Sequence[ScoreTensor]) -> Iterable[str]:
    for n, tensor in enumerate(tensors):
        outer = "".join(f" + {_INDICES['bh'.index(axis)]} * given.t{n}_{axis}" for axis in tensor.axes if axis in "bh")
        yield f"mod.t{n} = static_cast<const {_C_TYPES[tensor.dtype]}*>(given.t{n}){outer};"


def _block_lists(tensors: Sequence[ScoreTensor], first: int, block_size: tuple[int, int], shows: bool) -> str:
    """The code of a block mask's lists from tensor ``first`` on: counts and indices, and those of full blocks.

    The kernel iterates over the first lists. Deterministic gradients also read the lists of keys.
    """

    def place(n: int) -> str:
        names = {"b": "batch", "h": "head", "R": "block", "K": "block"}
        outer = tensors[n].blocks[:3]
        steps = "".join(f" + {names[axis]} * given.t{n}_{axis}" for axis in outer if axis in tensors[n].axes)
        return f"static_cast<const int32_t*>(given.t{n}){steps}"

    lists: dict[str, list[str]] = {}
    for n in range(first, len(tensors), 2):
        indices = f"{{{place(n + 1)}, given.t{n + 1}_{tensors[n + 1].blocks[3]}, *({place(n)})}}"
        lists.setdefault(tensors[n + 1].blocks, []).append(indices)
    written = _BLOCKS.format(rows=block_size[0], keys=block_size[1], shows=int(shows))
    for name, (partial, *full) in zip(("block", "key"), lists.values(), strict=False):
        written += _LIST.format(name=name, partial=partial, full=full[0] if full else "{nullptr, 0, 0}")
    return written


def _body(root: Expression, tensors: Sequence[ScoreTensor], real: str) -> str:
    """Statements that end by returning the root. Every expression with arguments is computed once, into a variable."""
    names: dict[int, str] = {}
    lines: list[str] = []
    for expression in in_order((root,)):
        code = _code(expression, [names[id(arg)] for arg in expression.args], tensors, real)
        if expression.op in ("score", "dscore", "index", "scalar", "literal"):
            names[id(expression)] = code
            continue
        c_type = real if expression.kind == "real" else expression.kind
        name = names[id(expression)] = f"x{len(lines)}"
        lines.append(f"    const {c_type} {name} = {code};\n")
    return "".join(lines) + f"    return {names[id(root)]};\n"


def _code(expression: Expression, args: list[str], tensors: Sequence[ScoreTensor], real: str) -> str:
    slot = expression.slot
    if expression.op == "index":
        return _INDICES[slot]
    if expression.op == "scalar":
        return f"given->v{slot}"
    if expression.op == "literal":
        return f"{real}({expression.value!r})"
    if expression.op == "tensor":
        inner = (axis for axis in tensors[slot].axes if axis in "rk")
        place = " + ".join(f"{_INDICES['bhrk'.index(axis)]} * given->t{slot}_{axis}" for axis in inner) or "0"
        element = f"t{slot}[{place}]"
        return f"{real}(to_real({element}))" if expression.kind == "real" else element
    return _CODE[expression.op].format(*args, real=real)


_HEADER = """\
// Generated from an operation graph: what it does to the scaled product before the softmax, and the derivative of that.
#pragma once

#include "common/score_ops.cuh"

#define SCORE_MOD 1
#define BLOCK_MASK {block_mask}

struct ScoreParams {{
{parameters}}};

struct ScoreMod {{
  const ScoreParams* given;
  int batch, head;
{members}
  __device__ __forceinline__ {real} operator()({real} score, int row, int key) const {{
{body}  }}

  __device__ __forceinline__ {real} gradient({real} score, {real} dscore, int row, int key) const {{
{gradient}  }}
{shown}}};

DEVICE ScoreMod bind_score_mod(const ScoreParams& given, int batch, int head) {{
  ScoreMod mod;
  mod.given = &given;
  mod.batch = batch;
  mod.head = head;
{binding}  return mod;
}}

template <class Params>
struct WithScoreMod : Params {{
{holder}}};
"""
_SHOWN = """\

  // In full blocks, whose keys are all shown.
  __device__ __forceinline__ {real} shown({real} score, int row, int key) const {{
{body}  }}
"""
_BLOCKS = """
#define BLOCK_MASK_ROWS {rows}
#define BLOCK_MASK_KEYS {keys}
#define BLOCK_MASK_SHOWS {shows}

#include "common/block_list.cuh"
"""
_LIST = """
DEVICE BlockList bind_{name}_list(const ScoreParams& given, int batch, int head, int block) {{
  return {{{partial}, {full}}};
}}
"""
_HOLDER = """\
  ScoreParams score;

  __device__ __forceinline__ const ScoreParams& score_params() const { return score; }
"""
_EMPTY_HOLDER = """\
  __device__ __forceinline__ ScoreParams score_params() const { return {}; }
"""
