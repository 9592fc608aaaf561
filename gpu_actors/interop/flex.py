"""flex_attention: torch's FlexAttention through a context.

``score_mod`` and ``mask_mod`` are traced with `torch.fx` on scalars into operations of ATen, as in torch (Dong et al.,
"Flex Attention", arXiv 2412.05496). Each becomes an operation of a `gpu_actors.OperationGraph`. Kernels compile these
operations between the product and the softmax. A captured tensor that is read at an index becomes a tensor beside the
scores, with the axes on which that index depends. Needs torch, which nothing else of this package imports.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, noop_mask
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_actors.attention.mha import Mask
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.fields import expect, flag, real
from gpu_actors.graph.graph import OperationGraph
from gpu_actors.graph.match import match_attention
from gpu_actors.graph.tensor import GraphTensor
from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.interop.contexts import check_context
from gpu_actors.interop.flex_cache import cached
from gpu_actors.interop.flex_ops import Lowering
from gpu_actors.interop.torch_attention import check_not_dual, lse_dtype, refuse_second
from gpu_actors.process import refuse_on_loop

__all__ = ["flex_attention"]

ScoreMod = Callable[..., Any]

_DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int32: "int32",
    torch.bool: "bool",
}
_Q, _K, _V, _OUT, _STATS, _DOUT = range(6)
_CAPTURED, _GRADIENTS = 100, 200  # the first uids of captured tensors and of gradients
_BLOCK = 128  # kernels iterate over blocks whose sizes are multiples of it
_LISTS = tuple(
    f"{full}{axis}_{what}" for axis in ("kv", "q") for full in ("", "full_") for what in ("num_blocks", "indices")
)


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | ScoreMod | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    *,
    context: GpuContext,
    return_aux: AuxRequest | None = None,
) -> Any:
    """``torch.nn.attention.flex_attention.flex_attention`` through a running context, with its arguments and shapes.

    query: (batch, heads, L, E); key: (batch, heads_kv, S, E); value: (batch, heads_kv, S, Ev), of one dtype, float16,
    bfloat16, float32 or float64. With ``enable_gqa`` heads_kv divides heads, else it equals heads.
    score_mod: maps ``(score, b, h, q_idx, kv_idx)`` to the score. block_mask: a BlockMask, or a
    ``mask_mod(b, h, q_idx, kv_idx)``, True for keys that are seen. A BlockMask's ``mask_mod`` is used. Its lists are
    used if blocks are multiples of 128 rows and keys: kernels skip blocks that are not listed, and Hopper's forward
    kernel skips the ``mask_mod`` in full blocks.
    scale: None takes 1 / sqrt(E).

    Both functions are traced at their first call, and again once a number, a tensor or a function that they read has
    changed. They may read captured tensors at indices that do not depend on the score: all axes in one ``[]``, as in
    ``slopes[h]`` or ``ids[b, q_idx]``. The values read are written out along the axes that their indices depend on.
    Kernels compute with integers of 32 bits. An operation that could exceed them, given the values of the captured
    tensors, is refused.
    Differentiable once, backwards, with respect to query, key, value and captured tensors.

    Returns (batch, heads, L, Ev). With ``return_lse`` also returns the natural-log LSE (batch, heads, L), float32, or
    float64 for float64 inputs, which has no gradient. With ``return_aux`` returns an ``AuxOutput`` in its place. A row
    that sees no key is 0 and has LSE -inf.

    Blocks the calling thread, and raises `WouldBlock` on the thread of a running event loop. Raises `InvalidRequest`
    for shapes that do not fit and an index outside of its tensor. Raises `Unsupported`, with the operation and its
    line, for an operation that no graph has and for Python control flow on a traced value. Also raises what
    ``ctx.cudnn.execute`` raises.
    """
    _check(query, key, value, context)
    flag("enable_gqa", enable_gqa)
    flag("return_lse", return_lse)
    expect(not (return_lse and return_aux), "return_lse", return_lse, "must be False beside return_aux")
    if return_aux is not None and return_aux.max_scores:
        raise Unsupported("return_aux", "max_scores", "the largest scores stay on chip", "AuxRequest(lse=True)")
    heads, shared = query.shape[1], key.shape[1]
    if enable_gqa:
        expect(heads % max(shared, 1) == 0, "enable_gqa", (heads, shared), "wants heads_kv to divide the query's heads")
    else:
        expect(heads == shared, "key", shared, f"must have the query's {heads} heads, or enable_gqa")
    if key.shape[0] == 1 != query.shape[0]:
        key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    expect(key.shape[0] == query.shape[0], "key", tuple(key.shape), f"must have the query's batch, {query.shape[0]}")
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else real("scale", scale)
    mask_mod = _mask_of(block_mask, (*query.shape[:3], key.shape[2]))
    given = [_laid_out(x) for x in (query, key, value)]
    program = _Program(
        None if score_mod is None else _traced("score_mod", score_mod, query, with_score=True),
        None if mask_mod is None else _traced("mask_mod", mask_mod, query, with_score=False),
        scale,
        given,
        _lists_of(block_mask, (*query.shape[:3], key.shape[2])),
        tuple(getattr(block_mask, "BLOCK_SIZE", (_BLOCK, _BLOCK))),
    )
    if not context.info.runs_kernels:
        match_attention(program.forward)  # a program that kernels refuse is refused on every device
    out, lse = _Flex.apply(context, program, *given, *program.captured)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _check(query: Any, key: Any, value: Any, context: object) -> None:
    check_context(context)
    _check_no_loop()
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        sound = isinstance(tensor, torch.Tensor) and tensor.dim() == 4
        shown = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        expect(sound, name, shown, "must be a tensor (batch, heads, rows, dim)")
        expect(0 not in tensor.shape, name, shown, "must have no axis of 0")
        check_not_dual(**{name: tensor})
        if tensor.dtype not in _DTYPES or not tensor.is_floating_point():
            raise Unsupported(name, str(tensor.dtype), "operation graphs compute attention on floats", "float16")
        expect(tensor.dtype == query.dtype, name, str(tensor.dtype), f"must be of the query's dtype, {query.dtype}")
        expect(tensor.device == query.device, name, str(tensor.device), f"must be on {query.device}, as the query is")
    expect(key.shape[3] == query.shape[3], "key", tuple(key.shape), f"must have head dim {query.shape[3]}")
    expect(key.shape[:3] == value.shape[:3], "value", tuple(value.shape), f"must begin {tuple(key.shape[:3])}")


def _check_no_loop() -> None:
    refuse_on_loop("flex_attention()", "a worker thread, as with asyncio.to_thread, or await ctx.cudnn.execute")


def _mask_of(block_mask: Any, scores: tuple[int, ...]) -> ScoreMod | None:
    if block_mask is None or not isinstance(block_mask, BlockMask):
        expect(
            block_mask is None or callable(block_mask), "block_mask", block_mask, "must be a BlockMask or a mask_mod"
        )
        return block_mask
    batch, heads, rows, keys = block_mask.shape
    # A BlockMask of one block does not state the lengths.
    if block_mask.seq_lengths != scores[2:] and min(block_mask.BLOCK_SIZE) < 1 << 30:
        raise InvalidRequest("block_mask", (rows, keys), f"must be made for {scores[2:]} rows and keys")
    for name, made, given in (("batch", batch, scores[0]), ("heads", heads, scores[1])):
        expect(made in (1, given), "block_mask", made, f"must be made for 1 or {given} in its {name}")
    if block_mask.mask_mod is noop_mask and block_mask.sparsity() > 0 and not _lists_of(block_mask, scores):
        reason = "hides blocks without a mask_mod that says which keys they hold"
        raise Unsupported("block_mask", "BlockMask", reason, "create_block_mask")
    mask_mod: ScoreMod = block_mask.mask_mod
    return None if mask_mod is noop_mask else mask_mod


def _lists_of(block_mask: Any, scores: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The lists of a BlockMask that kernels iterate over, by their names in graphs. Empty if kernels use none."""
    if not isinstance(block_mask, BlockMask) or block_mask.q_indices is None:
        return {}
    blocks = tuple(-(-extent // step) for extent, step in zip(scores[2:], block_mask.BLOCK_SIZE, strict=True))
    if any(size % _BLOCK for size in block_mask.BLOCK_SIZE) or block_mask.kv_indices.shape[2:] != blocks:
        return {}
    found = {name: getattr(block_mask, name) for name in _LISTS}
    return {name: tensor.to(torch.int32) for name, tensor in found.items() if tensor is not None}


# Tracing


class _Places(TorchDispatchMode):  # type: ignore[misc]
    """Notes for each traced operation the line of the caller's code that called it.

    folded: whether an operation was computed during the trace, because it reads captured tensors alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folded: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mode = get_proxy_mode()
        before = len(mode.tracer.graph.nodes)
        found = func(*args, **(kwargs or {}))
        added = len(mode.tracer.graph.nodes) - before
        self.folded |= not added
        place = _caller()
        for node, _ in zip(reversed(mode.tracer.graph.nodes), range(added), strict=False):
            node.meta["place"] = place
        return found


_OURS = (torch.__path__[0], __file__)


def _caller() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _traced(name: str, function: ScoreMod, query: torch.Tensor, *, with_score: bool) -> torch.fx.GraphModule:
    """The operations of a score_mod or mask_mod on scalars. Raises Unsupported if it cannot be traced."""
    wide = query.dtype == torch.float64
    traced: torch.fx.GraphModule = cached(
        function, (wide, query.device, with_score), lambda: _trace(name, function, query, with_score=with_score)
    )
    return traced


def _trace(
    name: str, function: ScoreMod, query: torch.Tensor, *, with_score: bool
) -> tuple[torch.fx.GraphModule, bool]:
    """The operations, and whether they stay valid until something that the function reads changes."""
    kind = torch.float64 if query.dtype == torch.float64 else torch.float32
    indices = [torch.zeros((), dtype=torch.int32, device=query.device) for _ in range(4)]
    given = [torch.zeros((), dtype=kind, device=query.device), *indices] if with_score else indices

    places = _Places()

    def placed(*values: Any) -> Any:
        with places:
            return function(*values)

    try:
        with torch.no_grad(), TransformGetItemToIndex():
            traced = make_fx(placed)(*given)
    except Exception as error:
        place = _place_of(error)
        if "data-dependent" in str(error):
            reason = "Python decides by the value of a traced tensor, as an if or an int() of it does"
            raise Unsupported(name, place, reason, "torch.where") from error
        shown = str(error).strip().splitlines()
        reason = f"cannot be traced: {type(error).__name__}: {shown[0] if shown else ''}"
        raise Unsupported(name, place, reason, "operations on tensors") from error
    traced.graph.eliminate_dead_code()
    return traced, not places.folded


def _place_of(error: BaseException) -> str:
    """The deepest line of the caller's own code in an error's traceback."""
    place = "unknown"
    frame = error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        if not code.co_filename.startswith(_OURS) and not code.co_filename.startswith("<"):
            place = f"{code.co_filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    return place


# The graph


class _Program:
    """The operation graphs of a call.

    captured: the tensors that score_mod and mask_mod read, with four axes, and the block mask's lists, in uid order.
    """

    def __init__(
        self,
        score_mod: Any,
        mask_mod: Any,
        scale: float,
        operands: Sequence[torch.Tensor],
        lists: dict[str, torch.Tensor],
        block_size: tuple[int, int],
    ) -> None:
        self._functions = {"score_mod": score_mod, "mask_mod": mask_mod}
        self._scale = scale
        self._lists, self._block_size = lists, block_size
        self._device = operands[0].device
        self._scores = (*operands[0].shape[:3], operands[1].shape[2])
        self._places: dict[tuple[str, str], int] = {}
        self._bounds: dict[int, tuple[int, int]] = {}
        self.captured: list[torch.Tensor] = []
        self.forward = OperationGraph()
        scores, v = self._modified(self.forward, operands)
        weights, stats = self.forward.softmax_with_stats(scores)
        self.forward.output(self.forward.matmul(weights, v), uid=_OUT, dtype=_DTYPES[operands[0].dtype])
        self.forward.output(stats, uid=_STATS, dtype=_DTYPES[lse_dtype(operands[0])])
        _prune(self.forward)

    def backward(self, operands: Sequence[torch.Tensor], out: torch.Tensor, wanted: Sequence[int]) -> OperationGraph:
        """The graph of the gradients of the ``wanted`` operands. The uid of operand n's gradient is _GRADIENTS + n."""
        graph = OperationGraph()
        scores, v = self._modified(graph, operands)
        again = graph.matmul(graph.softmax(scores), v)
        dtype = _DTYPES[out.dtype]
        given, dout = (graph.tensor(uid=uid, dims=out.shape, dtype=dtype) for uid in (_OUT, _DOUT))
        stats = graph.tensor(uid=_STATS, dims=(*out.shape[:3], 1), dtype=_DTYPES[lse_dtype(out)])
        wrt = [graph.tensors[_uid(number)] for number in wanted]
        found = graph.gradient(again, dout, wrt, forward=(given, stats))
        for number, gradient in zip(wanted, found, strict=True):
            graph.output(gradient, uid=_GRADIENTS + number, dtype=_DTYPES[operands[number].dtype])
        _prune(graph)
        return graph

    def _modified(self, graph: OperationGraph, operands: Sequence[torch.Tensor]) -> tuple[GraphTensor, GraphTensor]:
        q, k, v = (_declared(graph, number, operands[number]) for number in (_Q, _K, _V))
        scores = graph.matmul(q, graph.transpose(k)) * self._scale
        indices = tuple(graph.index(scores, axis) for axis in range(4))
        rows = indices[2]
        if self._functions["score_mod"] is not None:
            score_mod = self._lowering("score_mod", graph, (scores, *indices))
            found = score_mod.result()
            if not score_mod.depends_on_score or not isinstance(found, GraphTensor):
                # Attention needs the product of q and k in its graph, even if the scores do not depend on it.
                found = graph.select(rows >= 0, found, scores)
            scores = found
        causal = False
        if self._functions["mask_mod"] is not None:
            mask_mod = self._lowering("mask_mod", graph, indices)
            seen: Any = True
            for node in mask_mod.conjuncts():
                if mask_mod.is_causal(node):
                    causal = True
                    continue
                condition = mask_mod.value(node) if isinstance(node, torch.fx.Node) else node
                boolean = isinstance(condition, bool) or getattr(condition, "dtype", "") == "bool"
                expect(boolean, "mask_mod", str(condition), "must return a bool tensor")
                if isinstance(condition, bool):
                    seen = seen if condition else rows < 0
                else:
                    seen = condition if seen is True else seen & condition
            if seen is not True:
                scores = graph.mask_mod(scores, lambda *_: seen)
        if self._lists:
            lists = {name: self._read(graph, ("block_mask", name), t.contiguous) for name, t in self._lists.items()}
            scores = graph.block_mask(scores, **lists, block_size=self._block_size)
        if causal:
            scores = graph.mask(scores, Mask.causal())
        return scores, v

    def _bounds_of(self, number: int) -> tuple[int, int]:
        """The bounds of the integers of a captured tensor, as powers of two, so that few graphs differ in them.

        Kernels compute with 32 bits, and refuse operations that could exceed them. Without bounds, the sum of an int32
        and an index could.
        """
        if number not in self._bounds:
            least, most = (int(end) for end in self.captured[number].aminmax())
            reach = 1 << (max(abs(least), abs(most), 1) - 1).bit_length()
            low = 1 if least > 0 else 0 if least == 0 else -reach
            high = -1 if most < 0 else 0 if most == 0 else min(reach, (1 << 31) - 1)
            self._bounds[number] = low, high
        return self._bounds[number]

    def _read(self, graph: OperationGraph, place: tuple[str, str], make: Callable[[], torch.Tensor]) -> GraphTensor:
        number = self._places.get(place)
        if number is None:
            number = self._places[place] = len(self.captured)
            self.captured.append(_laid_out(make()))
        return graph.tensors.get(_CAPTURED + number) or _declared(graph, number + 3, self.captured[number])

    def _lowering(self, name: str, graph: OperationGraph, inputs: tuple[GraphTensor, ...]) -> Lowering:
        known: dict[str, GraphTensor] = {}

        def read(place: str, make: Callable[[], torch.Tensor], bounded: bool) -> GraphTensor:
            if place not in known:
                known[place] = self._read(graph, (name, place), make)
                if bounded and known[place].dtype == "int32":
                    low, high = self._bounds_of(self._places[name, place])
                    known[place] = graph.min(graph.max(known[place], low), high)
            return known[place]

        return Lowering(name, self._functions[name], graph, inputs, self._scores, self._device, read)


def _prune(graph: OperationGraph) -> None:
    """Remove what the lowering made and nothing reads. A sound graph has no such nodes."""
    kept: list[Any] = []
    read: set[int] = set()
    for node in reversed(graph.nodes):
        if any(uid in read or not graph.tensors[uid].virtual for uid in node.outputs):
            kept.append(node)
            read.update(node.inputs)
    graph.nodes = kept[::-1]
    written = {uid for node in kept for uid in node.outputs}
    graph.tensors = {uid: tensor for uid, tensor in graph.tensors.items() if uid in read | written}


def _uid(number: int) -> int:
    """The uid of an operand. Operands are numbered in this order: q, k, v, the captured tensors."""
    return number if number < 3 else _CAPTURED + number - 3


def _declared(graph: OperationGraph, number: int, tensor: torch.Tensor) -> GraphTensor:
    uid, dtype = _uid(number), _DTYPES[tensor.dtype]
    return graph.tensor(uid=uid, dims=tuple(tensor.shape), dtype=dtype, strides=tensor.stride())


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a layout that kernels read: rows are contiguous, and no axis is expanded."""
    spread = any(step == 0 and extent > 1 for step, extent in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.contiguous() if spread or tensor.stride(-1) != 1 else tensor


class _Flex(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, context: GpuContext, program: _Program, *operands: torch.Tensor) -> Any:
        arrays: dict[int, Any] = {_uid(number): operand.detach() for number, operand in enumerate(operands)}
        found = context.cudnn.execute(program.forward, arrays).result()
        ctx.context, ctx.program = context, program
        lse = found[_STATS].squeeze(-1)
        ctx.save_for_backward(found[_OUT], lse, *operands)
        ctx.mark_non_differentiable(lse)
        return found[_OUT], lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, _: Any) -> Any:
        wanted = [number for number, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        found = _FlexBackward.apply(ctx.context, ctx.program, wanted, dout, *ctx.saved_tensors)
        by_number = dict(zip(wanted, found, strict=True))
        return None, None, *(by_number.get(number) for number in range(len(ctx.needs_input_grad) - 2))


class _FlexBackward(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        context: GpuContext,
        program: _Program,
        wanted: list[int],
        dout: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *operands: torch.Tensor,
    ) -> Any:
        _check_no_loop()
        graph = program.backward(operands, out, wanted)
        arrays: dict[int, Any] = {_uid(number): operand.detach() for number, operand in enumerate(operands)}
        arrays |= {_OUT: out.contiguous(), _STATS: lse.unsqueeze(-1).contiguous(), _DOUT: dout.contiguous()}
        found = context.cudnn.execute(graph, arrays).result()
        return tuple(found[_GRADIENTS + number] for number in wanted)

    backward = staticmethod(refuse_second)
