"""Picks the kernel that answers a problem, and says why.

`FAMILIES` lists the kernels from the most to the least specialised; the first that does not refuse a problem takes it.
To add a kernel, add a row here, its tiles to `tiles`, and its macros and geometry to `variants`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpu_actors.errors import Unsupported
from gpu_actors.kernels.backward_variants import BACKWARD_PARTS
from gpu_actors.kernels.decode_variants import COMBINE, DECODE, PLAN, decode_refuses, row_tile_of
from gpu_actors.kernels.sm90_variants import sm90_refuses
from gpu_actors.kernels.support import check_support, find_unsupported
from gpu_actors.kernels.transposition import TRANSPOSE
from gpu_actors.problem import AttentionProblem, DispatchKey

__all__ = [
    "FAMILIES",
    "REFERENCE",
    "WITHOUT_TMA",
    "KernelFamily",
    "Verdict",
    "answering_key",
    "dispatch_key",
    "explain",
]


class KernelFamily(NamedTuple):
    """One kernel and the problems that it is for.

    name: of the kernel, as in DispatchKey. refuses: why it does not take a problem on an architecture, or None.
    reason: a sentence on what it is for, shown where it is taken. num_splits, persistent: as in DispatchKey.
    score_mods: whether it includes score.cuh, and so the score modification of a graph. tma: whether it loads by TMA,
    which not all strides suit (`gpu_actors.kernels.sm90_arguments.tma_refusal`). companions: kernels that are launched
    with it, under keys that differ in the name alone.
    """

    name: str
    refuses: Callable[[AttentionProblem, str], Unsupported | None]
    reason: str
    num_splits: int = 1
    persistent: bool = False
    score_mods: bool = False
    tma: bool = False
    companions: tuple[str, ...] = ()

    def refusal(self, problem: AttentionProblem, arch: str) -> Unsupported | None:
        """Why the kernel does not take a problem on an architecture, or None."""
        if problem.score_mod is not None and not self.score_mods:
            return Unsupported("score_mod", str(problem.score_mod), f"{self.name} has no place for score modifications")
        return self.refuses(problem, arch)


class Verdict(NamedTuple):
    """What became of a family. reason: a sentence."""

    family: str
    taken: bool
    reason: str


def _simple_refuses(problem: AttentionProblem, arch: str) -> Unsupported | None:
    if problem.direction != "forward":
        return Unsupported("direction", problem.direction, "forward_simple computes no gradients", "forward")
    if problem.layout not in ("dense", "varlen"):
        return Unsupported("layout", problem.layout, "forward_simple reads no caches", "varlen")
    return None


_MMA_HEAD_DIMS = range(32, 257, 8)
_SMALLEST_SCALE = 2.0**-100


def _mma_refuses(problem: AttentionProblem, arch: str) -> Unsupported | None:
    if problem.direction != "forward":
        return Unsupported("direction", problem.direction, "forward_mma computes no gradients", "forward")
    if problem.layout not in ("dense", "varlen"):
        return Unsupported("layout", problem.layout, "forward_mma reads no caches", "varlen")
    if problem.dtype not in ("float16", "bfloat16", "float32"):
        return Unsupported("dtype", problem.dtype, "forward_mma multiplies f16, bf16 and tf32", "bfloat16")
    if problem.compute == "f32":
        return Unsupported("compute", problem.compute, "tensor cores have no float32 products", "tf32")
    for field, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if dim not in _MMA_HEAD_DIMS:
            nearest = min(_MMA_HEAD_DIMS, key=lambda known: abs(known - dim))
            reason = "forward_mma copies rows in whole chunks: multiples of 8 from 32 to 256"
            return Unsupported(field, dim, reason, nearest)
    if problem.softmax_scale < _SMALLEST_SCALE:
        reason = "forward_mma takes maxima before it scales, which needs a positive scale"
        return Unsupported("softmax_scale", problem.softmax_scale, reason, _SMALLEST_SCALE)
    return None


def _backward_mma_refuses(problem: AttentionProblem, arch: str) -> Unsupported | None:
    if problem.direction != "backward":
        return Unsupported("direction", problem.direction, "backward_mma computes gradients alone", "backward")
    if problem.layout == "paged":
        return Unsupported("layout", problem.layout, "backward_mma reads no block tables", "varlen")
    if problem.dtype not in ("float16", "bfloat16", "float32"):
        return Unsupported("dtype", problem.dtype, "backward_mma multiplies f16, bf16 and tf32", "bfloat16")
    if problem.compute == "f32":
        return Unsupported("compute", problem.compute, "tensor cores have no float32 products", "tf32")
    for field, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if dim not in _MMA_HEAD_DIMS:
            nearest = min(_MMA_HEAD_DIMS, key=lambda known: abs(known - dim))
            reason = "backward_mma copies rows in whole chunks: multiples of 8 from 32 to 256"
            return Unsupported(field, dim, reason, nearest)
    return None


FAMILIES = (
    KernelFamily(
        "forward_sm90",
        sm90_refuses,
        "computes 16-bit and e4m3 batches, and many new rows over caches, on Hopper with TMA and wgmma",
        persistent=True,
        tma=True,
        companions=(TRANSPOSE,),
    ),
    KernelFamily(
        "forward_mma",
        _mma_refuses,
        "computes every forward option of dense and varlen batches on tensor cores, with mma.sync",
        score_mods=True,
    ),
    KernelFamily(
        "forward_simple",
        _simple_refuses,
        "computes every forward option of dense and varlen batches on CUDA cores",
        score_mods=True,
    ),
    KernelFamily(
        DECODE,
        decode_refuses,
        "computes every option of new rows over pages, caches and pointers on tensor cores, splitting the keys",
        companions=(PLAN, COMBINE),
    ),
    KernelFamily(
        "backward_mma",
        _backward_mma_refuses,
        "computes the gradients of every option of dense and varlen batches on tensor cores, with mma.sync",
        score_mods=True,
        companions=tuple(BACKWARD_PARTS),
    ),
)

# For operands that TMA cannot move.
WITHOUT_TMA = tuple(family for family in FAMILIES if not family.tma)

# For devices that compute with the NumPy oracle rather than with kernels: what no kernel takes still gets a key.
REFERENCE = KernelFamily("reference", lambda problem, arch: None, "computes every problem with NumPy", score_mods=True)


# Fields on whose account a kernel leaves a problem to kernels of another kind.
_OTHER_KINDS = ("direction", "layout")


@functools.lru_cache(maxsize=4096)
def dispatch_key(problem: AttentionProblem, arch: str, families: tuple[KernelFamily, ...] = FAMILIES) -> DispatchKey:
    """The key of the kernel that answers ``problem`` on ``arch`` ("sm_90a", ...), without a GPU.

    Raises Unsupported for what `check_support` refuses, and where every family does: then with the reason of the last
    that is for problems of this kind at all. InvalidRequest where ``arch`` is no architecture.
    """
    check_support(problem, arch)
    refusal: Unsupported | None = None
    for family in families:
        found = family.refusal(problem, arch)
        if found is None:
            return _key(family, problem, arch)
        if refusal is None or found.field not in _OTHER_KINDS or refusal.field in _OTHER_KINDS:
            refusal = found
    raise refusal or Unsupported("families", families, "there is no kernel to choose from")


def answering_key(
    problem: AttentionProblem, arch: str, runs_kernels: bool, families: tuple[KernelFamily, ...] = FAMILIES
) -> DispatchKey:
    """The key that answers a problem on a device. families: to choose from. Raises as `dispatch_key`.

    A device that runs no kernels refuses what no kernel does, but for caches and for gradients: those it gives in every
    precision, for programs whose gradients are to be checked in float64.
    """
    if runs_kernels or (problem.direction == "forward" and not problem.decoding):
        return dispatch_key(problem, arch, families)
    return dispatch_key(problem, arch, (*families, REFERENCE))


def explain(problem: AttentionProblem, arch: str, families: Sequence[KernelFamily] = FAMILIES) -> list[Verdict]:
    """Why each family was or was not taken for a problem, in the order in which they are asked."""
    unsupported = find_unsupported(problem, arch)
    if unsupported is not None:
        return [Verdict(family.name, False, str(unsupported[1])) for family in families]
    verdicts: list[Verdict] = []
    taken = ""
    for family in families:
        refusal = family.refusal(problem, arch)
        if refusal is not None:
            verdicts.append(Verdict(family.name, False, str(refusal)))
        elif taken:
            verdicts.append(Verdict(family.name, False, f"{taken} comes first and takes it"))
        else:
            taken = family.name
            verdicts.append(Verdict(family.name, True, family.reason))
    return verdicts


def _key(family: KernelFamily, problem: AttentionProblem, arch: str) -> DispatchKey:
    return DispatchKey(
        kernel=family.name,
        arch=arch,
        direction=problem.direction,
        layout=problem.layout,
        dtype=problem.dtype,
        kv_dtype=problem.kv_dtype,
        out_dtype=problem.out_dtype,
        compute=problem.compute,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        mask=problem.mask,
        alignment=problem.alignment,
        gqa_ratio=problem.gqa_ratio,
        softcap=problem.softcap != 0.0,
        alibi=problem.alibi is not None,
        sinks=problem.sinks,
        sink_tokens=problem.sink_tokens > 0,
        bias=None if problem.bias is None else problem.bias[0],
        dropout=problem.dropout_p > 0.0,
        descales=problem.descales,
        lse=problem.return_lse,
        page_size=problem.page_size,
        varlen_q=problem.varlen_q,
        tree_mask=problem.tree_mask,
        num_splits=family.num_splits,
        persistent=family.persistent,
        deterministic=problem.deterministic,
        score_mod=problem.score_mod,
        row_tile=row_tile_of(problem) if family.name == DECODE else 0,
    )
