"""Compiles a .cu file for the CPU."""

from __future__ import annotations

import functools
import logging
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_actors.compiling.cubin_entry import digest_of
from gpu_actors.devices.emulation import assembly
from gpu_actors.devices.emulation.assembly import UnknownAsm, randomize_contraction, replace_asm
from gpu_actors.devices.emulation.executor import Executor
from gpu_actors.devices.emulation.module_cache import ModuleCache
from gpu_actors.devices.emulation.runtime import EmulatedModule
from gpu_actors.devices.emulation.toolchain import Toolchain, cpu_identity
from gpu_actors.devices.emulation.unit import CompilerFailed, definitions, headers_of, run_compiler, write_headers
from gpu_actors.errors import CompileError, InvalidRequest

__all__ = ["SOURCE", "build_module", "find_entries"]

SOURCE = "gpu_actors_source.cu"
"""The name by which compilers know the file of every kernel."""

_log = logging.getLogger(__name__)

# The headers that the generated unit includes first: names in them may be the same as those of the user's macros.
_OWN_HEADERS = ("ptx/types.cuh", "emulation/launch.cuh", "emulation/parameters.cuh")

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_HEADER_PLACE = re.compile(r'^(# \d+ ")(?:\./)?include/', re.MULTILINE)
_EXTERN = re.compile(r'\bextern\s+"C"(?=\s+__global__)')
_LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\s*\(")
_ENTRY = re.compile(r"\s*__global__\s+void\s+(\w+)\s*\(")
# Finds instructions of tensor cores, which the executor computes, and LITTLE_ARITHMETIC of ptx/types.cuh.
_LITTLE_ARITHMETIC = re.compile(r"\b(?:wg)?mma(?:\.mma_async)?\.sync\b|^#pragma gpu_actors little_arithmetic$", re.M)


def build_module(
    source: str,
    macros: Mapping[str, str] | None = None,
    include_dir: Path | Mapping[str, str] | None = None,
    toolchain: Toolchain | None = None,
    cache_dir: Path | None = None,
    *,
    entries: Sequence[str] | None = None,
    name: str = "kernel.cu",
) -> EmulatedModule:
    """Build source, unless it is cached, and load it.

    source: text of a .cu file.
    macros: name to value.
    include_dir: the quoted includes, a folder or name to text. Headers that are not there come from kernels_cu.
    toolchain: Toolchain.find() by default.
    cache_dir: folder of the built modules, the user's cache folder by default.
    entries: the kernels to make launchable, by default every extern "C" __global__ one.
    name: the file name in compiler messages.

    Raises CompileError with the compiler's log, or for an include of an absolute path, of one with ".." or of a macro.
    Raises InvalidRequest if source has no entry or cache_dir is open to others, and GpuActorsError if no compiler is
    installed.
    """
    names = tuple(entries) if entries is not None else find_entries(source)
    if not names:
        raise InvalidRequest("source", name, 'a kernel file declares at least one extern "C" __global__ function')
    compiler = toolchain or Toolchain.find()
    build = _Build(
        source,
        name,
        dict(sorted((macros or {}).items())),
        headers_of("".join(f'#include "{header}"\n' for header in _OWN_HEADERS) + source, include_dir or {}),
        names,
        compiler,
        Executor.of(compiler, macros or {}, include_dir or {}),
        cache_dir,
    )
    cache = ModuleCache(cache_dir)
    module = cache.load(build.key) or cache.build(build.key, build.compile)
    return EmulatedModule(module.library, names, module.build_seconds, {SOURCE: name})


def find_entries(source: str) -> tuple[str, ...]:
    """The names of the kernels that source declares with extern "C" __global__, in order."""
    names: dict[str, None] = {}
    for declaration in _EXTERN.split(_COMMENT.sub(" ", source))[1:]:
        head = declaration
        while (bounds := _LAUNCH_BOUNDS.search(head)) is not None:
            head = head[: bounds.start()] + _after_parenthesis(head[bounds.end() :])
        entry = _ENTRY.match(head)
        if entry is not None:
            names.setdefault(entry[1])
    return tuple(names)


def _after_parenthesis(text: str) -> str:
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[i + 1 :]
    return ""


@dataclass(frozen=True)
class _Build:
    """All that a built module depends on, besides the processor.

    headers, macros: sorted by name.
    name: the source's name in messages. The compiler gets another one, so that no object depends on it.
    """

    source: str
    name: str
    macros: Mapping[str, str]
    headers: Mapping[str, str]
    entries: tuple[str, ...]
    toolchain: Toolchain
    executor: Executor
    cache_dir: Path | None

    @functools.cached_property
    def key(self) -> str:
        """SHA-256 over every part, each with its length. It contains no path."""
        compiler = (self.toolchain.name, self.toolchain.version, cpu_identity())
        flags = (*self.toolchain.flags, *self.toolchain.checks)
        texts = (self.entries, _flat(self.macros), (self.source,), _flat(self.headers))
        return digest_of((_rewriting(), compiler, flags, (self.executor.key,), *texts))

    def compile(self, compiler_cache: Path) -> tuple[bytes, float]:
        """Compile. Returns the shared object and the seconds. compiler_cache: a folder for the compiler's own cache."""
        start = time.perf_counter()
        executor = self.executor.object_in(self.cache_dir)
        with tempfile.TemporaryDirectory(prefix="gpu-actors-build-") as scratch:
            work = Path(scratch)
            self._write_files(work)
            (work / "executor.o").write_bytes(executor)
            _log.debug("emulation: compiling %s with %s", self.name, self.toolchain.name)
            try:
                self._run_compiler(work, compiler_cache)
            except (CompilerFailed, UnknownAsm) as refusal:
                line, log = self._bad_line(str(refusal)), str(refusal).replace(SOURCE, self.name)
                raise CompileError(f"{self.name} does not compile for the CPU:\n{log[:4000]}", log, line) from None
            seconds = time.perf_counter() - start
            _log.debug("emulation: compiled %s in %.2f s", self.name, seconds)
            return (work / "module.so").read_bytes(), seconds

    def _write_files(self, work: Path) -> None:
        exports = "".join(f"GPU_ACTORS_ENTRY({entry})\n" for entry in self.entries)
        includes = "".join(f'#include "{header}"\n' for header in _OWN_HEADERS)
        defines = "".join(f"#define {name} {value}\n" for name, value in self.macros.items())
        (work / "unit.cpp").write_text(f'{includes}{defines}#include "{SOURCE}"\n{exports}', encoding="utf-8")
        (work / SOURCE).write_text(f'#line 1 "{SOURCE}"\n{self.source}', encoding="utf-8")
        write_headers(self.headers, work / "include")

    def _run_compiler(self, work: Path, compiler_cache: Path) -> None:
        options = [*definitions(self.executor.macros), "-Iinclude"]
        run_compiler(
            self.toolchain, [*options, "-E", "unit.cpp", "-o", "expanded.cpp"], work, compiler_cache, self.name
        )
        text = _HEADER_PLACE.sub(r"\1", (work / "expanded.cpp").read_text(encoding="utf-8"))
        if self.toolchain.fused_places is not None:
            text = randomize_contraction(text, self.toolchain.fused_places)
        (work / "captured.cpp").write_text(replace_asm(text), encoding="utf-8")
        leaner = self.toolchain.leaner_flags if _LITTLE_ARITHMETIC.search(text) else ()
        # With line tables, so that a fault can name its lines.
        options = [*leaner, *self.toolchain.checks, "-g1", f"-fdebug-prefix-map={work}=."]
        run_compiler(
            self.toolchain, [*options, "captured.cpp", "executor.o", "-o", "module.so"], work, compiler_cache, self.name
        )

    def _bad_line(self, log: str) -> str | None:
        match = re.search(rf"{re.escape(SOURCE)}:(\d+):(?:\d+:)? (?:fatal )?(?:error|an asm statement)", log)
        lines = self.source.splitlines()
        return lines[int(match[1]) - 1].strip() if match and 0 < int(match[1]) <= len(lines) else None


@functools.cache
def _rewriting() -> tuple[str, ...]:
    """The text of the two modules that turn a source into the compiler's input. It is a part of the key."""
    return tuple(Path(file).read_text(encoding="utf-8") for file in (__file__, assembly.__file__))


def _flat(mapping: Mapping[str, str]) -> list[str]:
    return [part for item in mapping.items() for part in item]
