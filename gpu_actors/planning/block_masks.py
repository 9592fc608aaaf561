"""Block masks of requests: the modification that kernels compile, the lists that a launch reads, and NumPy's mask.

A mask becomes the score modification of a graph with the problem's sequences, rows and keys. In every layout, kernels
count rows and keys from the beginning of a sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from gpu_actors.attention.block_mask import LISTS, BlockMask
from gpu_actors.attention.problem import AttentionProblem
from gpu_actors.attention.requests import FlashForward, PagedForward
from gpu_actors.attention.score_mod import ScoreMod
from gpu_actors.devices.interface import Kernel, Launch, Outputs
from gpu_actors.errors import GpuActorsError, InvalidRequest
from gpu_actors.fields import describe, expect
from gpu_actors.graph.graph import OperationGraph
from gpu_actors.graph.lists import agree, listing_counts
from gpu_actors.graph.modification import ScoreInputs
from gpu_actors.graph.ops import Node
from gpu_actors.graph.tensor import GraphTensor
from gpu_actors.kernels.program import Values
from gpu_actors.planning.plan import Oracle, Plan, PlannedMask, described
from gpu_actors.values import show

__all__ = ["launch_masked", "mask_signature", "masked_problem", "planned_mask"]

_SCORES, _MASKED, _FIRST = 1, 2, 10  # uids


def masked_problem(request: FlashForward | PagedForward, problem: AttentionProblem) -> AttentionProblem:
    """The problem of an adopted request with its block mask."""
    planned = planned_mask(request, problem)
    return problem if planned is None else dataclasses.replace(problem, score_mod=planned.mod)


def planned_mask(request: FlashForward | PagedForward, problem: AttentionProblem) -> PlannedMask | None:
    """The block mask of a request as kernels take it; None if the request has no mask, no rows or no keys.

    Raises `InvalidRequest` for lists that do not fit, and `Unsupported` for a mask_mod that no kernel computes.
    """
    mask = request.block_mask
    if mask is None:
        return None
    expect(isinstance(mask, BlockMask), "block_mask", show(mask), "must be a BlockMask")
    gradients = problem.direction == "backward"
    _check(mask, problem, gradients)
    if not (problem.batch and problem.seqlen_q and problem.seqlen_k):
        return None
    graph, root, node = _graph(mask, problem)
    inputs = ScoreInputs(graph, _SCORES, graph.tensors[_SCORES].dims)
    found = inputs.modification(root, node, gradients=gradients, deterministic=problem.deterministic)
    given = [name for name in LISTS if getattr(mask, name) is not None]
    return PlannedMask(
        found.mod, tuple(given[uid - _FIRST] for uid in found.tensors), tuple(value for _, value in found.scalars)
    )


def mask_signature(mask: BlockMask | None) -> Hashable:
    """The part of a block mask that decides a plan. The numbers in its lists are not read."""
    if mask is None:
        return None
    lists = tuple(described(getattr(mask, name)) for name in LISTS)
    # 128 == 128.0, and a size that is refused must not find the plan of one that is accepted.
    return lists, mask.block_size, tuple(map(type, mask.block_size)), mask.mask_mod


def launch_masked(
    plan: Plan,
    mask: BlockMask,
    inputs: Mapping[str, Any],
    oracle: Oracle,
    kernels: Sequence[Kernel],
    seed: int = 0,
    into: Any = None,
) -> Launch:
    """Like `Plan.launch`, with an adopted block mask. inputs, oracle: those without the mask. seed: dropout's."""
    problem, planned = plan.problem, plan.block_mask
    if planned is None:  # there are no rows or no keys
        return plan.launch(inputs, oracle, kernels, Values(seed), into)
    shapes = _shapes(mask, problem)
    _check_numbers(mask, {name: shapes[name] for name in planned.lists})
    if problem.deterministic:
        _check_turns([_cut(getattr(mask, name), shapes[name]) for name in LISTS if name in shapes])
    _check_once(mask, {name: shapes[name] for name in planned.lists})
    lists = {ScoreMod.tensor_name(n): _cut(getattr(mask, name), shapes[name]) for n, name in enumerate(planned.lists)}

    def answer(given: Mapping[str, Any]) -> Outputs:
        unmasked = {name: array for name, array in given.items() if name not in lists}
        return oracle({**unmasked, "bias": _visible(mask, problem)})

    return plan.launch({**inputs, **lists}, answer, kernels, Values(seed, planned.numbers), into)


def _visible(mask: BlockMask, problem: AttentionProblem) -> Any:
    """Which keys each row sees, bool (batch, heads, rows, keys)."""
    # Imported here because only programs on a mock device compute in NumPy.
    from gpu_actors.reference.graph import evaluate_graph

    shapes = _shapes(mask, problem)
    graph, _, _ = _graph(mask, problem)
    given = [name for name in LISTS if getattr(mask, name) is not None]
    arrays = {_FIRST + n: _cut(getattr(mask, name), shapes[name]) for n, name in enumerate(given)}
    arrays[_SCORES] = np.zeros(graph.tensors[_SCORES].dims, problem.dtype if problem.dtype == "float64" else "float32")
    return np.isfinite(evaluate_graph(graph, arrays)[_MASKED])


def _graph(mask: BlockMask, problem: AttentionProblem) -> tuple[OperationGraph, int, Node]:
    """Return the mask as a graph over scores, the uid of the scores that its node of lists reads, and that node."""
    graph = OperationGraph()
    dims = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    dtype = "float64" if problem.dtype == "float64" else "float32"
    scores = graph.tensor(uid=_SCORES, dims=dims, dtype=dtype)
    root = scores if mask.mask_mod is None else _modified(graph, scores, mask.mask_mod)
    lists: dict[str, GraphTensor] = {}
    shapes = _shapes(mask, problem)
    for name in LISTS:
        if getattr(mask, name) is not None:
            lists[name] = graph.tensor(uid=_FIRST + len(lists), dims=shapes[name], dtype="int32")
    masked = graph.block_mask(root, **lists, block_size=mask.block_size)
    node = graph.nodes[-1]
    graph.output(masked, uid=_MASKED)
    return graph, root.uid, next(n for n in graph.order().nodes if n.name == node.name)


def _modified(graph: OperationGraph, scores: GraphTensor, mask_mod: Callable[..., Any]) -> GraphTensor:
    try:
        return graph.mask_mod(scores, mask_mod)
    except GpuActorsError:
        raise
    except Exception as error:
        error.__traceback__ = None  # it holds this frame, and so the plan's objects
        raise InvalidRequest("block_mask", show(mask_mod), f"mask_mod raised {show(error)}") from error


def _shapes(mask: BlockMask, problem: AttentionProblem) -> dict[str, tuple[int, ...]]:
    rows, keys = (-(-n // step) for n, step in zip((problem.seqlen_q, problem.seqlen_k), mask.block_size, strict=True))
    shapes = {}
    for name in LISTS:
        if (array := getattr(mask, name)) is not None:
            along = (keys, rows) if name.removeprefix("full_").startswith("q") else (rows, keys)
            shapes[name] = (*array.shape[:2], *(along if name.endswith("indices") else along[:1]))
    return shapes


def _check(mask: BlockMask, problem: AttentionProblem, gradients: bool) -> None:
    size = mask.block_size
    sound = isinstance(size, tuple) and len(size) == 2 and all(type(extent) is int and extent > 0 for extent in size)
    expect(sound, "block_mask", size, "block_size must be two positive ints, rows and keys of a block")
    given = {name: getattr(mask, name) for name in LISTS}
    if mask.mask_mod is not None:
        expect(callable(mask.mask_mod), "block_mask", mask.mask_mod, "mask_mod must be a function, or None")
    for name in LISTS[::2]:
        indices = name.replace("num_blocks", "indices")
        paired = (given[name] is None) == (given[indices] is None)
        expect(paired, "block_mask", name, f"must have {name} and {indices}, or neither")
    expect(given["kv_indices"] is not None, "block_mask", None, "must have kv_num_blocks and kv_indices")
    transposed = given["q_indices"] is not None
    if gradients and not transposed:
        reason = "must have q_num_blocks and q_indices: kernels of gradients walk along the lists of rows"
        raise InvalidRequest("block_mask", None, reason)
    alike = (given["full_q_indices"] is not None) == (transposed and given["full_kv_indices"] is not None)
    expect(alike, "block_mask", "full_q_indices", "must have full_q_indices where it has full_kv_indices and q_indices")
    for name, array in given.items():
        if array is None:
            continue
        dims = 4 if name.endswith("indices") else 3
        shape = tuple(getattr(array, "shape", ()))
        outer = f"(1 or {problem.batch}, 1 or {problem.heads_q}, {'..' if dims == 3 else '.., ..'})"
        sound = len(shape) == dims and shape[0] in (1, problem.batch) and shape[1] in (1, problem.heads_q)
        sound = sound and str(array.dtype) == "int32"
        expect(sound, "block_mask", describe(array), f"{name} must be int32 {outer}")
    for name, shape in _shapes(mask, problem).items():
        least = all(own >= extent for own, extent in zip(given[name].shape, shape, strict=True))
        expect(least, "block_mask", describe(given[name]), f"{name} must be at least {shape}")


def _check_numbers(mask: BlockMask, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check lists on the host. The caller answers for lists on a device."""
    for name in LISTS[::2]:
        indices = name.replace("num_blocks", "indices")
        if name not in shapes or not isinstance(getattr(mask, name), np.ndarray):
            continue
        counts, blocks = _cut(getattr(mask, name), shapes[name]), shapes[indices][-1]
        least, most = int(counts.min(initial=0)), int(counts.max(initial=0))
        expect(least >= 0 and most <= blocks, "block_mask", (least, most), f"{name} must be from 0 to {blocks}")
        listed = getattr(mask, indices)
        if isinstance(listed, np.ndarray):
            listed = _cut(listed, shapes[indices])
            counted = np.arange(blocks) < counts[..., None]
            outside = (counted & ((listed < 0) | (listed >= blocks))).any()
            reason = f"must name blocks from 0 to {blocks - 1}, those of the longest sequence"
            expect(not outside, "block_mask", indices, reason)


def _check_once(mask: BlockMask, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that lists on the host name no block of a row or column twice: kernels would count its keys twice."""
    for side in ("kv", "q"):
        names = [name for name in shapes if name.removeprefix("full_").startswith(side)]
        arrays = [_cut(getattr(mask, name), shapes[name]) for name in names]
        if not names or not all(isinstance(array, np.ndarray) for array in arrays):
            continue
        found = listing_counts(arrays)
        twice = found is not None and (found > 1).any()
        expect(not twice, "block_mask", " and ".join(names[1::2]), "must name each block once")


def _check_turns(lists: Sequence[Any]) -> None:
    """Check that kv and q lists on the host name the same blocks, because deterministic gradients wait by both."""
    half = len(lists) // 2
    if all(isinstance(array, np.ndarray) for array in lists) and not agree(lists[:half], lists[half:]):
        reason = "q_indices must name the blocks of kv_indices the other way round, each once"
        raise InvalidRequest("block_mask", "q_indices", f"{reason}: deterministic gradients wait by both")


def _cut(array: Any, shape: tuple[int, ...]) -> Any:
    """Cut a list along its last axes to its beginning, of ``shape``."""
    return array if tuple(array.shape) == shape else array[tuple(slice(extent) for extent in shape)]
