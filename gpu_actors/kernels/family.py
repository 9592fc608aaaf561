"""KernelFamily: a kernel that answers problems, with the kernels that are launched beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from gpu_actors.attention.problem import AttentionProblem, Direction, DispatchKey, Layout
from gpu_actors.errors import Unsupported
from gpu_actors.kernels.macros import Macros
from gpu_actors.kernels.program import Program, Target
from gpu_actors.kernels.support import ELEMENTS, LATENT_DIM, order_refusal
from gpu_actors.kernels.trials import Trial

__all__ = ["GREATEST_DIM", "KernelFamily"]

Refuses: TypeAlias = Callable[[AttentionProblem, str], Unsupported | None]
MakeProgram: TypeAlias = Callable[[AttentionProblem, DispatchKey, Target], Program]


_POSITIONS = ("q_positions", "k_positions", "dropout_first_head", "dropout_heads")
GREATEST_DIM = 256  # head dim of kernels that multiply on tensor cores
_BLOCK_MASK = 128  # a number of rows or keys that every tile divides, except one of 48 keys
_CHUNK = 16  # bytes; rows of a dtype of more than 16 bits are multiples of 8 elements, too


@dataclass(frozen=True, slots=True)
class KernelFamily:
    """One kernel and the problems that it is for.

    name: the kernel's, as in DispatchKey. reason: a sentence on what the kernel is for, shown where it is taken.
    direction, layouts, dtypes: those that it is for, None for all; the last layout and dtype are the usual ones.
    tensor_cores: whether it multiplies there. It then takes head dims in whole chunks, and no products in full float32.
    refuses: returns why the kernel does not take a problem of this kind on an architecture, or None.
    program: returns what is launched for a problem whose key names the kernel. macros, threads: return what a key's
    kernel is compiled for, and the threads of its block; the key names this kernel or a companion.
    companions: kernels that are launched with it, under keys that differ in the name alone.
    num_splits, persistent: as in DispatchKey. row_tile: returns that of a problem's key; None stands for 0.
    score_mods: whether it includes common/score.cuh, and so the score modification of a graph; companions do not.
    block_masks: whether it follows the lists of a block mask, whose blocks its tiles divide.
    positions: whether rows, keys and heads may belong to a larger problem. row_stats: whether it stores a row's largest
    score and the sum of its exponentials. lacks: further fields of a problem that it does not take. greatest_dim: the
    widest head on tensor cores, except over a latent cache. tma: whether it loads by TMA, which not all strides suit
    (`kernels.forward_sm90.tma_refusal`). chunks: whether it copies rows of caches in chunks of 16 bytes, so that rows
    must begin at multiples of 16; TMA needs this, too. invariant: whether a row's bits depend only on it and its keys.
    """

    name: str
    reason: str
    program: MakeProgram
    macros: Callable[[DispatchKey], Macros]
    threads: Callable[[DispatchKey], int]
    direction: Direction | None = None
    layouts: tuple[Layout, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    tensor_cores: bool = True
    refuses: Refuses = lambda problem, arch: None
    companions: tuple[str, ...] = ()
    num_splits: int = 1
    persistent: bool = False
    row_tile: Callable[[AttentionProblem], int] | None = None
    row_tiles: tuple[int, ...] = (0,)
    score_mods: bool = False
    block_masks: bool = False
    tma: bool = False
    chunks: bool = False
    invariant: bool = False
    positions: bool = False
    row_stats: bool = False
    lacks: tuple[str, ...] = ()
    greatest_dim: int = GREATEST_DIM
    trials: Callable[[DispatchKey], Iterable[Trial]] = lambda key: ()

    def refusal(self, problem: AttentionProblem, arch: str) -> Unsupported | None:
        """Why the kernel does not take a problem on an architecture, or None."""
        if problem.invariant and not self.invariant:
            reason = f"{self.name} sums a row in another order than the kernel that takes any number of rows"
            return Unsupported("invariant", True, reason, False)
        size = None if problem.score_mod is None else problem.score_mod.block_size
        if size is not None and not self.block_masks:
            return Unsupported("block_mask", size, f"{self.name} walks along no lists of blocks")
        if problem.score_mod is not None and not self.score_mods:
            return Unsupported("score_mod", str(problem.score_mod), f"{self.name} has no place for score modifications")
        if size is not None and (size[0] % _BLOCK_MASK or size[1] % _BLOCK_MASK):
            reason = f"{self.name} divides blocks into its tiles: they must be multiples of {_BLOCK_MASK}"
            return Unsupported("block_mask", size, reason, (_BLOCK_MASK, _BLOCK_MASK))
        if problem.positions and not self.positions:
            field = next(name for name in _POSITIONS if getattr(problem, name))
            reason = f"{self.name} counts rows, keys and heads from the beginning of their sequence"
            return Unsupported(field, getattr(problem, field), reason)
        rows_apart = problem.q_positions == 2 and problem.sliding_window
        if rows_apart and problem.deterministic and self.direction == "backward":
            reason = "blocks take turns by ranges of rows, and between rows that stand apart a window may see none"
            return order_refusal(problem, reason, "q_positions", (problem.batch, 2), (problem.batch,))
        for name in self.lacks:
            if value := getattr(problem, name):
                return Unsupported(name, value, f"{self.name} has no code for it")
        if self.direction not in (None, problem.direction):
            reason = f"{self.name} computes {'no gradients' if self.direction == 'forward' else 'gradients alone'}"
            return Unsupported("direction", problem.direction, reason, self.direction)
        for name, known in (("layout", self.layouts), ("dtype", self.dtypes)):
            if known is not None and (value := getattr(problem, name)) not in known:
                return Unsupported(name, value, f"{self.name} computes {', '.join(known)}", known[-1])
        if problem.row_stats and not self.row_stats:
            field = "score_max" if problem.score_max else "score_sum_exp"
            return Unsupported(field, True, f"{self.name} stores no stats of rows but the LSE", False)
        return self.refuses(problem, arch) or (self._chunk_refusal(problem) if self.tensor_cores else None)

    def _chunk_refusal(self, problem: AttentionProblem) -> Unsupported | None:
        """The error's nearest head dim is the next larger one, because rows can be padded but not shortened."""
        if problem.compute == "f32":
            return Unsupported("compute", problem.compute, "tensor cores have no float32 products", "tf32")
        chunk = _CHUNK if ELEMENTS[problem.kv_dtype].fp8 else _CHUNK // 2
        greatest = LATENT_DIM if problem.latent else self.greatest_dim
        dims = range(chunk, greatest + 1, chunk)
        for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if dim not in dims:
                reason = f"{self.name} copies rows of {problem.kv_dtype} in whole chunks: multiples of {dims.step} from"
                nearest = min((known for known in dims if known >= dim), default=dims[-1])
                return Unsupported(name, dim, f"{reason} {dims[0]} to {dims[-1]}", nearest)
        return None
