"""Serialization: which objects of a context may go to another process, and in which form."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gpu_actors.actors.cudnn_like import ExecuteGraph
from gpu_actors.actors.nvrtc import Warm
from gpu_actors.arrays.adopt import Adopted, CallerNotes, adopt, check_device, restore
from gpu_actors.arrays.request_arrays import adopt_request
from gpu_actors.attention.requests import BatchedDecode, PagedForward
from gpu_actors.clock import SYSTEM_CLOCK
from gpu_actors.errors import GpuActorsError, InvalidRequest
from gpu_actors.graph.graph import OperationGraph
from gpu_actors.graph.match import match_attention
from gpu_actors.isolation.imports import refuse_unfinished
from gpu_actors.kv.requests import (
    BeginStep,
    CloseCache,
    CreateSequence,
    EndStep,
    ExportSequence,
    ForkSequence,
    FreeSequence,
    ImportSequence,
    OpenCache,
)
from gpu_actors.options import ContextOptions
from gpu_actors.partial import MergeBackward, MergePartials, adopt_partials
from gpu_actors.planning.cached import adopt_cache_request
from gpu_actors.values import show

__all__ = ["check_options", "outbound", "sendable_error", "side_effect_free", "undo_message"]

Restore = Callable[[Any], Any]

_ELSEWHERE = "cannot cross to the context's process"


def check_options(options: ContextOptions) -> ContextOptions:
    """Return the options for the context's process. Raises `InvalidRequest` for options that cannot cross."""
    if options.clock is not SYSTEM_CLOCK:
        raise InvalidRequest(
            "clock", show(options.clock), f'must be left out with isolation="process": it {_ELSEWHERE}'
        )
    if options.on_event is not None:
        reason = f'must be left out with isolation="process": it {_ELSEWHERE}, whose events it would be called with'
        raise InvalidRequest("on_event", show(options.on_event), reason)
    for kind in options.actors:
        if kind.__module__ == "__main__":
            reason = f"{_ELSEWHERE}: define it in a module, which that process can import, and not in __main__"
            raise InvalidRequest("actors", kind, reason)
        try:
            _Pickler(io.BytesIO()).dump(kind)
        except Exception as error:
            raise InvalidRequest("actors", kind, f"{_ELSEWHERE}: {error}") from error
    # The program's own timers enforce time limits. Each request has the seconds that are left.
    worker_options = dataclasses.replace(options, default_timeout=None)
    try:
        _Pickler(io.BytesIO()).dump(worker_options)
    except Exception as error:
        raise InvalidRequest("options", show(options), f"{_ELSEWHERE}: {error}") from error
    return worker_options


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        refuse_unfinished(getattr(value, "__module__", None))
        return NotImplemented


def side_effect_free(message: Any) -> bool:
    """Whether a request writes only into its own answer, so that it may be dropped at any time."""
    kind = type(message).__name__
    if kind in ("FlashForward", "PagedForward", "BatchedDecode"):
        return message.out is None
    kinds = ("FlashBackward", "MhaForward", "MhaBackward", "MergePartials", "MergeBackward", "ExecuteGraph")
    return kind in (*kinds, "Compile", "Warm")


def undo_message(message: Any, result: Any) -> Any:
    """The message that frees the object that a request made, or None for a request that makes only its answer."""
    match message:
        case OpenCache():
            return CloseCache(result)
        case CreateSequence() | ForkSequence() | ImportSequence():
            return FreeSequence(message.cache, result)
        case ExportSequence():
            return FreeSequence(message.cache, result.lease)
        case BeginStep():
            return EndStep(message.cache, result.number, False)
    return None


def outbound(message: Any, notes: CallerNotes | None) -> tuple[Any, Restore | None]:
    """Return a message over NumPy arrays, and a function that converts its answer to the kind of the caller's arrays.

    Raises `InvalidRequest`, naming the argument, for an array that does not lie on the host.
    """
    if isinstance(message, ExecuteGraph):
        return _graph(message, notes)
    if isinstance(message, Warm) and message.progress is not None:
        raise InvalidRequest("progress", show(message.progress), f"must be left out: a function {_ELSEWHERE}")
    if isinstance(message, BeginStep):
        return dataclasses.replace(message, on_host=True), None
    if not dataclasses.is_dataclass(message) or isinstance(message, type):
        return message, None
    adopted: Any
    try:
        if isinstance(message, PagedForward | BatchedDecode):
            adopted, template = adopt_cache_request(message, "cpu", notes)
        elif isinstance(message, MergePartials | MergeBackward):
            adopted, template = adopt_partials(message, "cpu", notes)
        else:
            adopted, template = adopt_request(message, "cpu", notes)
    except InvalidRequest as error:
        raise error.named_for(message) from error.__cause__
    if adopted is message:
        return message, None
    out = getattr(message, "out", None)

    def answer(value: Any) -> Any:
        if not hasattr(value, "_replace"):
            return value
        parts = [_restored(part, template) for part in value]
        if out is not None and hasattr(value, "out"):
            parts[0] = out
        return type(value)(*parts)

    return adopted, answer


def _graph(message: ExecuteGraph, notes: CallerNotes | None) -> tuple[Any, Restore | None]:
    graph = message.graph
    arrays: Any = message.arrays
    if not isinstance(arrays, Mapping):
        return message, None
    foreign: dict[Any, Adopted] = {}
    for uid, array in arrays.items():
        if type(array) is not np.ndarray and hasattr(array, "__dlpack__"):
            foreign[uid] = adopt(array, f"tensor {uid}", notes)
            check_device(foreign[uid], f"tensor {uid}", "cpu")
    if not foreign:
        return message, None
    template = foreign.get(_first(graph))
    outbound_message = ExecuteGraph(graph, {**arrays, **{uid: adopted.array for uid, adopted in foreign.items()}})
    return outbound_message, lambda results: {uid: _restored(array, template) for uid, array in results.items()}


def _first(graph: OperationGraph) -> Any:
    """The uid of the array whose kind the answer takes: q, else the first input."""
    try:
        return match_attention(graph).q.uid
    except GpuActorsError:
        return next((uid for uid in graph.order().inputs), None)


def _restored(array: Any, template: Adopted | None) -> Any:
    if isinstance(array, tuple):
        parts = [_restored(part, template) for part in array]
        return type(array)(*parts) if hasattr(array, "_replace") else tuple(parts)
    return array if template is None or not isinstance(array, np.ndarray) else restore(array, template)


def sendable_error(error: BaseException) -> BaseException:
    """Return the error, or a `GpuActorsError` with its text if it cannot be pickled."""
    if isinstance(error, GpuActorsError):
        return error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return GpuActorsError(f"{type(error).__name__}: {error}")
    return error
