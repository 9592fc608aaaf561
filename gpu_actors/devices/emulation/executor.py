"""The executor: the code that all emulated modules share. It is built once and linked into each module.

It runs grids and executes asm statements. It does not depend on whether a kernel's products are fused into sums.
"""

from __future__ import annotations

import functools
import logging
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpu_actors.compiling.cubin_entry import digest_of
from gpu_actors.devices.emulation.module_cache import ModuleCache
from gpu_actors.devices.emulation.toolchain import Toolchain, cpu_identity
from gpu_actors.devices.emulation.unit import CompilerFailed, definitions, headers_of, run_compiler, write_headers
from gpu_actors.errors import CompileError

__all__ = ["Executor"]

_SCHEMA = "emulated-executor-1"
_UNIT = '#include "ptx/types.cuh"\n#include "emulation/executor.cuh"\n'
_PREFIX = "GPU_ACTORS_"  # of macros that change the emulation itself
_log = logging.getLogger(__name__)

# The executors that this process has built or read, by key.
_objects: dict[str, bytes] = {}


@dataclass(frozen=True)
class Executor:
    """All that an executor depends on, besides the processor.

    headers, macros: sorted by name.
    """

    toolchain: Toolchain
    macros: Mapping[str, str]
    headers: Mapping[str, str]

    @classmethod
    def of(cls, toolchain: Toolchain, macros: Mapping[str, str], headers: Path | Mapping[str, str]) -> Executor:
        """The executor for a kernel. headers: they take the place of headers of kernels_cu with the same names."""
        emulation_macros = {name: value for name, value in sorted(macros.items()) if name.startswith(_PREFIX)}
        plain = Toolchain(toolchain.name, toolchain.command, toolchain.version)
        return cls(plain, emulation_macros, headers_of(_UNIT, headers))

    @functools.cached_property
    def key(self) -> str:
        """SHA-256 over every part, each with its length."""
        compiler = (self.toolchain.name, self.toolchain.version, cpu_identity())
        texts = ([part for item in pairs.items() for part in item] for pairs in (self.macros, self.headers))
        return digest_of(((_SCHEMA,), compiler, self.toolchain.flags, (_UNIT,), *texts))

    def object_in(self, cache_dir: Path | None) -> bytes:
        """Return the object file. Build it unless this process or the cache has it."""
        if self.key not in _objects:
            cache = ModuleCache(cache_dir, suffix=".o")
            built = cache.load(self.key) or cache.build(self.key, self._compile)
            _objects[self.key] = built.content()
        return _objects[self.key]

    def _compile(self, compiler_cache: Path) -> tuple[bytes, float]:
        with tempfile.TemporaryDirectory(prefix="gpu-actors-build-") as scratch:
            work = Path(scratch)
            (work / "unit.cpp").write_text(_UNIT, encoding="utf-8")
            write_headers(self.headers, work / "include")
            options = [*definitions(self.macros), "-D_GNU_SOURCE", "-Iinclude"]
            options += ["-c", "unit.cpp", "-o", "executor.o"]
            start = time.perf_counter()
            try:
                run_compiler(self.toolchain, options, work, compiler_cache, "the emulated device's executor")
            except CompilerFailed as failure:
                message = f"the emulated device's executor does not compile:\n{failure.log[:4000]}"
                raise CompileError(message, failure.log) from None
            seconds = time.perf_counter() - start
            _log.debug("emulation: compiled the executor with %s in %.2f s", self.toolchain.name, seconds)
            return (work / "executor.o").read_bytes(), seconds
