"""Picks the kernel that answers a problem, and says why.

`FAMILIES` lists the kernels from the most to the least specialised; the first that does not refuse a problem takes it.
To add a kernel, add its family to the list. Its file holds the rest, except the tiles, which are in `tiles`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from gpu_actors.attention.problem import FLAGS, AttentionProblem, DispatchKey
from gpu_actors.errors import GpuActorsError, InvalidRequest, Unsupported
from gpu_actors.kernels.backward_mma import BACKWARD_MMA
from gpu_actors.kernels.backward_simple import BACKWARD_SIMPLE
from gpu_actors.kernels.backward_sm90 import BACKWARD_SM90
from gpu_actors.kernels.decode_mma import DECODE_MMA
from gpu_actors.kernels.decode_simple import DECODE_SIMPLE
from gpu_actors.kernels.decode_sm90 import DECODE_SM90
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.forward import FORWARD_MMA, FORWARD_SIMPLE, FORWARD_WIDE
from gpu_actors.kernels.forward_sm90 import FORWARD_SM90
from gpu_actors.kernels.program import ANYWHERE, Program, Target
from gpu_actors.kernels.support import find_unsupported

__all__ = [
    "FAMILIES",
    "REFERENCE",
    "WITHOUT_CHUNKS",
    "WITHOUT_TMA",
    "Barred",
    "Verdict",
    "answering_key",
    "dispatch_key",
    "explain",
    "family_of",
    "program_of",
]


class Verdict(NamedTuple):
    """Whether a family was taken. reason: why, in a sentence."""

    family: str
    taken: bool
    reason: str


FAMILIES = (
    FORWARD_SM90,
    FORWARD_MMA,
    FORWARD_WIDE,
    FORWARD_SIMPLE,
    DECODE_SM90,
    DECODE_MMA,
    DECODE_SIMPLE,
    BACKWARD_SM90,
    BACKWARD_MMA,
    BACKWARD_SIMPLE,
)

# The families for operands that TMA cannot move.
WITHOUT_TMA = tuple(family for family in FAMILIES if not family.tma)
# The families for caches whose rows begin between multiples of 16 bytes.
WITHOUT_CHUNKS = tuple(family for family in WITHOUT_TMA if not family.chunks)


def _computed_elsewhere(*_: object) -> Any:
    raise InvalidRequest("kernel", "reference", "is NumPy's: nothing is compiled or launched for it")


# Devices that compute with the NumPy oracle give a key to problems that no kernel takes.
REFERENCE = KernelFamily(
    "reference",
    "computes every problem with NumPy",
    _computed_elsewhere,
    _computed_elsewhere,
    _computed_elsewhere,
    tensor_cores=False,
    score_mods=True,
    invariant=True,
    positions=True,
    row_stats=True,
)

_BY_KERNEL = {kernel: family for family in FAMILIES for kernel in (family.name, *family.companions)}

# Fields that say which kind of kernel a problem needs.
_OTHER_KINDS = ("direction", "layout")


Barred: TypeAlias = Callable[[DispatchKey], GpuActorsError | None]
"""Why the kernel of a key must not run, or None."""


def dispatch_key(
    problem: AttentionProblem,
    arch: str,
    families: tuple[KernelFamily, ...] = FAMILIES,
    barred: Barred | None = None,
) -> DispatchKey:
    """The key of the kernel that answers ``problem`` on ``arch`` ("sm_90a", ...), without a GPU.

    Raises Unsupported if `check_support` refuses the problem. Raises it if every family does, with the reason of the
    last family that is for problems of this kind. If ``barred`` bars every family that takes the problem, raises its
    error for the first of them. An invariant problem takes that first family or none.
    """
    _check_support(problem, arch, families)
    refusal: Unsupported | None = None
    meant = False  # whether the refusal is by a family for problems of this kind
    failed: GpuActorsError | None = None
    for family in families:
        found = family.refusal(problem, arch)
        if found is None:
            key = _key(family, problem, arch)
            why = None if barred is None else barred(key)
            if why is None:
                return key
            if problem.invariant:  # the next family would give other bits
                raise why
            failed = failed or why
            continue
        if problem.invariant and found.field == "batch":  # the size of a batch may not decide either
            raise found
        own = found.field not in _OTHER_KINDS and (found.field != "block_mask" or family.block_masks)
        if own or not meant:
            refusal, meant = found, own
    if failed is not None:
        raise failed
    raise refusal or Unsupported("families", families, "there is no kernel to choose from")


def _check_support(problem: AttentionProblem, arch: str, families: tuple[KernelFamily, ...]) -> None:
    """Like `check_support`, but an error about a head dim names the limit of the kernels for problems of this kind."""
    found = find_unsupported(problem, arch)
    if found is None:
        return
    code, error = found
    if code == "head_dim.range":
        refusals = [family.refusal(problem, arch) for family in families if family is not REFERENCE]
        own = [refusal for refusal in refusals if refusal is None or refusal.field not in _OTHER_KINDS]
        if own and own[-1] is not None and own[-1].field == error.field:
            error = own[-1]
    raise error


def answering_key(
    problem: AttentionProblem,
    arch: str,
    runs_kernels: bool,
    families: tuple[KernelFamily, ...] = FAMILIES,
    barred: Barred | None = None,
) -> DispatchKey:
    """The key that answers a problem on a device. families, barred: as for `dispatch_key`.

    A device that runs no kernels refuses a problem that no kernel takes, except gradients. It computes these in every
    precision, so that programs can check their gradients in float64.
    """
    if runs_kernels or problem.direction == "forward":
        return dispatch_key(problem, arch, families, barred)
    return dispatch_key(problem, arch, (*families, REFERENCE), barred)


def family_of(key: DispatchKey) -> KernelFamily:
    """The family of a key's kernel. Raises InvalidRequest for the oracle's key, for which nothing is compiled."""
    family = _BY_KERNEL.get(key.kernel)
    if family is None:
        raise InvalidRequest("kernel", key.kernel, f"compiled kernels are {', '.join(_BY_KERNEL)}")
    return family


def program_of(problem: AttentionProblem, key: DispatchKey, target: Target = ANYWHERE) -> Program:
    return family_of(key).program(problem, key, target)


def explain(
    problem: AttentionProblem,
    arch: str,
    families: Sequence[KernelFamily] = FAMILIES,
    barred: Barred | None = None,
) -> list[Verdict]:
    """Why each family was or was not taken for a problem, in order."""
    unsupported = find_unsupported(problem, arch)
    if unsupported is not None:
        return [Verdict(family.name, False, str(unsupported[1])) for family in families]
    verdicts: list[Verdict] = []
    taken = kept = ""
    for family in families:
        refusal = family.refusal(problem, arch)
        if refusal is not None:
            verdicts.append(Verdict(family.name, False, str(refusal)))
        elif barred is not None and (why := barred(_key(family, problem, arch))) is not None:
            verdicts.append(Verdict(family.name, False, str(why)))
            kept = kept or (family.name if problem.invariant else "")
        elif kept:
            reason = f"{kept} takes it, and rows of an invariant context have the bits of no other kernel"
            verdicts.append(Verdict(family.name, False, reason))
        elif taken:
            verdicts.append(Verdict(family.name, False, f"{taken} comes first and takes it"))
        else:
            taken = family.name
            verdicts.append(Verdict(family.name, True, family.reason))
    return verdicts


# The fields that a key takes from its problem. The family decides num_splits, and only the dtype of a bias counts.
_CARRIED = tuple(
    field.name
    for field in dataclasses.fields(DispatchKey)
    if hasattr(AttentionProblem, field.name) and field.name not in ("bias", "num_splits")
)


def _key(family: KernelFamily, problem: AttentionProblem, arch: str) -> DispatchKey:
    options = {name: getattr(problem, name) for name in _CARRIED}
    options |= {name: bool(options[name]) for name in FLAGS if name in options}
    return DispatchKey(
        **options,
        kernel=family.name,
        arch=arch,
        bias=None if problem.bias is None else problem.bias[0],
        dropout=problem.dropout_p > 0.0,
        lse=problem.return_lse,
        num_splits=family.num_splits,
        persistent=family.persistent,
        row_tile=0 if family.row_tile is None else family.row_tile(problem),
    )
