"""What has to be known of the thread that submits a request: the streams and the grad mode of its libraries."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["CallerNotes", "caller_streams", "loaded", "with_grad_mode"]


@dataclass(frozen=True, slots=True)
class CallerNotes:
    """What has to be known of the thread that submits a request.

    torch, cupy: the streams that those libraries would enqueue on; None where that library is not in use.
    grad: whether torch recorded a history of what it computed.
    """

    torch: Any = None
    cupy: Any = None
    grad: bool = True


def caller_streams(device: int) -> CallerNotes | None:
    """The streams of CUDA device ``device`` that are current on this thread. Touches no device."""
    torch, cupy = loaded("torch"), loaded("cupy")
    torch_stream = torch.cuda.current_stream(device) if torch and torch.cuda.is_initialized() else None
    cupy_stream = cupy.cuda.get_current_stream(device) if cupy else None
    if torch_stream is None and cupy_stream is None:
        return None
    return CallerNotes(torch_stream, cupy_stream)


def with_grad_mode(notes: CallerNotes | None) -> CallerNotes | None:
    """The notes of the calling thread, with torch's grad mode."""
    torch = loaded("torch")
    if torch is None or torch.is_grad_enabled():
        return notes
    return dataclasses.replace(notes or CallerNotes(), grad=False)


def loaded(name: str) -> Any:
    """The library if the program has imported it, all of it."""
    module = sys.modules.get(name)
    if module is None or getattr(module.__spec__, "_initializing", False):
        return None
    return module
