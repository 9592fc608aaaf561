"""Variant: everything that decides a cubin. Plans, caches, loaded kernels and events are identified by it alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from gpu_actors.compiling.assets import asset_text, completed_headers, kernel_file
from gpu_actors.compiling.source import FrozenMap, KernelSource, MacroValue

__all__ = ["Variant"]


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel as it is compiled: equal variants share one cubin, one compile and one loaded kernel.

    kernel: the entry point. The package's own source files are named after it.
    arch: the exact architecture.
    macros: as in `KernelSource`.
    headers: for the package's own kernels, texts that replace the package's headers, by name.
    own: the source of a user's kernel, None for the package's kernels.
    example: what it was made for, such as a dispatch key. It decides the problems that prove the kernel. None if
        nothing proves it. Equal variants may have different examples.
    """

    kernel: str
    arch: str
    macros: Mapping[str, MacroValue] = field(default_factory=FrozenMap)
    headers: Mapping[str, str] = field(default_factory=FrozenMap, repr=False)
    own: KernelSource | None = None
    example: Hashable = field(default=None, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)
    _source: KernelSource | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fix = object.__setattr__
        fix(self, "macros", FrozenMap(self.macros))
        fix(self, "headers", FrozenMap(self.headers))
        # Cached because every request looks its kernels up.
        fix(self, "_hash", hash(self._fields))
        fix(self, "_source", self.own)

    @classmethod
    def of(cls, source: KernelSource, arch: str | None) -> Variant:
        """The variant of a user's source. Raises as `KernelSource.resolve_arch`."""
        arch = source.resolve_arch(arch)
        source = dataclasses.replace(source, arch=arch)
        return cls(source.entry_points[0], arch, source.macros, source.headers, source)

    @property
    def _fields(self) -> tuple[object, ...]:
        return self.kernel, self.arch, self.macros, self.headers, self.own

    @property
    def source(self) -> KernelSource:
        """The source to compile. Raises InvalidRequest naming the field at fault: "kernel" if it has no file."""
        source = self._source
        if source is None:
            file = kernel_file(self.kernel)
            text = asset_text(file)
            headers = completed_headers(text, self.headers)
            source = KernelSource(file, text, (self.kernel,), headers, self.macros, arch=self.arch)
            object.__setattr__(self, "_source", source)
        return source

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        parts = {"kernel": self.kernel, "arch": self.arch, **self.macros}
        return ",".join(f"{name}={value}" for name, value in parts.items())

    def __reduce__(self) -> tuple[type[Variant], tuple[object, ...]]:
        # It is rebuilt, so that its hash is computed anew: hashes of strings differ between processes.
        return Variant, (*self._fields, self.example)
