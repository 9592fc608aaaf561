"""Quarantine: the kernels that have failed their proof on a device, and are launched there no more."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from gpu_actors.attention.problem import DispatchKey
from gpu_actors.compiling.variant import Variant
from gpu_actors.errors import Unqualified
from gpu_actors.kernels.dispatch import family_of
from gpu_actors.kernels.variants import variant_of

__all__ = ["Quarantine"]


class Quarantine:
    """The quarantined variants of a context. For any thread: it only grows."""

    def __init__(self) -> None:
        self._failed: dict[Variant, Unqualified] = {}

    def add(self, variant: Variant, error: Unqualified) -> None:
        self._failed[variant] = error

    def of(self, variants: Iterable[Variant]) -> Unqualified | None:
        """The failure of the first of the variants that has one."""
        return next((error for variant in variants if (error := self._failed.get(variant)) is not None), None)

    def bars(self, key: DispatchKey) -> Unqualified | None:
        """The failure of the kernel of a key, or of one that may be launched beside it."""
        family = family_of(key)
        names = (key.kernel, *family.companions)
        return self.of(
            variant_of(key if name == key.kernel else dataclasses.replace(key, kernel=name)) for name in names
        )

    def failures(self) -> tuple[Unqualified, ...]:
        return tuple(self._failed.values())
