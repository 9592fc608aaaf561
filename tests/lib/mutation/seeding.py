"""Seeds one bug into the text of kernels, for tests that want it caught."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import emulated.forward as emulated_forward
import pytest
from inside.compiling import kernel_file
from inside.emulation import EmulationFault
from inside.kernels import variants

import gpu_actors as ga
from gpu_actors import KernelSource

__all__ = ["Bug", "caught"]


class Bug(Protocol):
    """old: text of `file`, "" for the kernel itself, that is replaced by `new`."""

    @property
    def file(self) -> str: ...
    @property
    def old(self) -> str: ...
    @property
    def new(self) -> str: ...


@contextlib.contextmanager
def caught(bug: Bug, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, kernels of contexts and of `emulated.forward` have the bug, and a check must fail."""
    found: list[str] = []

    def seeded(text: str, *names: str) -> str:
        if bug.file not in names or bug.old not in text:
            return text
        found.append(bug.file)
        return text.replace(bug.old, bug.new)

    def changed(key: Any) -> KernelSource:
        source = kernel_source(key)
        headers = {name: seeded(text, name) for name, text in source.headers.items()}
        return dataclasses.replace(source, source=seeded(source.source, "", kernel_file(key.kernel)), headers=headers)

    kernel_source = variants.kernel_source
    patch.setattr("gpu_actors.actors.nvrtc.kernel_source", changed)
    patch.setattr(emulated_forward, "kernel_source", changed)
    with pytest.raises((AssertionError, EmulationFault, ga.LaunchError)) as error:
        yield
    assert found, f"{bug.file} has no {bug.old!r}, and failed by {error.value}"
