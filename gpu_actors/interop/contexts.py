"""Checks of the context that interfaces for other libraries make before they submit anything."""

from __future__ import annotations

from gpu_actors.errors import ActorStopped
from gpu_actors.fields import expect
from gpu_actors.handles.gpu_context import GpuContext, open_contexts

__all__ = ["check_context", "open_context_of"]


def check_context(context: object) -> None:
    """Raise `InvalidRequest` for an object that is no context."""
    sound = isinstance(context, GpuContext)
    expect(sound, "context", type(context).__name__, "must be a GpuContext, as open_context gives it")


def open_context_of(number: int) -> GpuContext:
    """The open context with that number. Raises `ActorStopped` if there is none."""
    context = open_contexts().get(number)
    if context is None:
        raise ActorStopped(f"context {number}, which this call was made or traced for, is not open in this process")
    return context
