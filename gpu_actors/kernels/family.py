"""KernelFamily: a kernel that answers problems, with the kernels that are launched beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from gpu_actors.errors import Unsupported
from gpu_actors.kernels.macros import Macros
from gpu_actors.kernels.program import Program, Target
from gpu_actors.problem import AttentionProblem, DispatchKey

__all__ = ["KernelFamily"]

Refuses: TypeAlias = Callable[[AttentionProblem, str], Unsupported | None]
MakeProgram: TypeAlias = Callable[[AttentionProblem, DispatchKey, Target], Program]


@dataclass(frozen=True, slots=True)
class KernelFamily:
    """One kernel and the problems that it is for.

    name: of the kernel, as in DispatchKey. refuses: why it does not take a problem on an architecture, or None.
    reason: a sentence on what it is for, shown where it is taken.
    program: what is launched for a problem whose key names the kernel. macros, threads: what a key's kernel is compiled
    for, and the threads of its block; the key names this kernel or a companion.
    companions: kernels that are launched with it, under keys that differ in the name alone.
    num_splits, persistent: as in DispatchKey. row_tile: likewise, from a problem; None where it is 0.
    score_mods: whether it includes common/score.cuh, and so the score modification of a graph. unscored: companions
    that do not. tma: whether it loads by TMA, which not all strides suit (`kernels.hopper.params.tma_refusal`).
    """

    name: str
    refuses: Refuses
    reason: str
    program: MakeProgram
    macros: Callable[[DispatchKey], Macros]
    threads: Callable[[DispatchKey], int]
    companions: tuple[str, ...] = ()
    num_splits: int = 1
    persistent: bool = False
    row_tile: Callable[[AttentionProblem], int] | None = None
    row_tiles: tuple[int, ...] = (0,)
    score_mods: bool = False
    tma: bool = False
    kernels: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernels", frozenset((self.name, *self.companions)))

    def refusal(self, problem: AttentionProblem, arch: str) -> Unsupported | None:
        """Why the kernel does not take a problem on an architecture, or None."""
        if problem.score_mod is not None and not self.score_mods:
            return Unsupported("score_mod", str(problem.score_mod), f"{self.name} has no place for score modifications")
        return self.refuses(problem, arch)
