"""Finds the operations of torch that copy from watched tensors. For tests that have torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Copies"]


class Copies(TorchDispatchMode):  # type: ignore[misc]
    """While entered, notes operations that read watched memory and return other memory.

    copies: their names. nbytes: of their results. Operators of this package are requests, not copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[str] = []
        self.nbytes = 0
        self._watched: set[int] = set()

    def watch(self, *tensors: torch.Tensor) -> None:
        """Watch the memory of these tensors alone."""
        self._watched = {_memory(x) for x in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.namespace != "gpu_actors" and any(self._is_watched(x) for x in args):
            for x in made if isinstance(made, tuple | list) else (made,):
                if isinstance(x, torch.Tensor) and not self._is_watched(x):
                    self.copies.append(str(func))
                    self.nbytes += x.nbytes
        return made

    def _is_watched(self, x: object) -> bool:
        return isinstance(x, torch.Tensor) and _memory(x) in self._watched


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
