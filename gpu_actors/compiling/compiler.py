"""Compiles a KernelSource with NVRTC, through CuPy's bindings. It needs no GPU and no driver.

NVRTC gets every header in memory and does not read the disk, so the cache key covers all of its input.
"""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from gpu_actors.compiling.elf import whole_cubin
from gpu_actors.compiling.headers import include_closure, toolkit_closure
from gpu_actors.compiling.source import Cubin, FrozenMap, KernelSource, parse_resources
from gpu_actors.compiling.toolchain import Toolchain, find_toolchain, load_nvrtc, supported_archs
from gpu_actors.errors import CompileError, Unsupported
from gpu_actors.extras import cuda_hint

__all__ = ["CompileInputs", "Compiler", "compile_inputs", "supported_archs"]


class CompileInputs(NamedTuple):
    """The inputs of NVRTC for a source and an architecture, besides the source and its macros.

    headers: the text of every reachable header, by the name that includes spell. own_headers: those that the source
    has, without the toolkit's.
    """

    options: tuple[str, ...]
    headers: Mapping[str, str]
    own_headers: Mapping[str, str]


@functools.lru_cache(maxsize=512)
def compile_inputs(source: KernelSource, arch: str, toolchain: Toolchain | None) -> CompileInputs:
    """The inputs of a compile. Without a toolchain, only the inputs that the source has.

    Raises CompileError if the source includes a file that no key can cover (see `include_closure`).
    """
    own, missing = include_closure(source.source, source.headers.get)
    if toolchain is None:
        return CompileInputs(source.options, FrozenMap(own), FrozenMap(own))
    toolkit = toolkit_closure(tuple(sorted(missing)), toolchain.include_dirs)
    return CompileInputs(_options(source, arch, toolchain), FrozenMap({**toolkit, **own}), FrozenMap(own))


def _options(source: KernelSource, arch: str, toolchain: Toolchain) -> tuple[str, ...]:
    """The package's options, then the source's own. Arithmetic stays IEEE: no option sets -ftz."""
    picked = [
        # The exact architecture: wgmma and setmaxnreg exist in sm_90a, not in sm_90, and the driver need not compile
        # a cubin, as it would PTX.
        f"-arch={arch}",
        # The standard is fixed, because NVRTC's default changes with its version.
        "-std=c++17",
        # Without it the log lacks registers, spills and the C75xx notes.
        "--ptxas-options=-v",
        # constexpr helpers in headers that the emulated device shares have no __device__.
        "-default-device",
        # Otherwise a missing quoted header would be read from the working directory.
        "--no-source-include",
        # The default raises the whole process's stack limit during a compile. Two at once may leave it raised.
        "--modify-stack-limit=false",
    ]
    if toolchain.release >= (12, 9):
        # NVRTC's own cache keeps a second copy in the home folder, to which this package's limits do not apply.
        picked.append("--no-cache")
    if any(re.match(r"--?std\b", option) for option in source.options):
        picked.remove("-std=c++17")
    # Older NVRTCs refuse an option that is given twice.
    return (*picked, *(option for option in source.options if option not in picked))


class Compiler:
    """Compiles with NVRTC. It has no state: several threads may compile at the same time."""

    def compile(self, source: KernelSource, arch: str | None = None) -> Cubin:
        """Compile ``source`` for ``arch`` (default: the source's own), in 0.03 to 1 s.

        Raises CompileError with ``.log`` and ``.source_line`` if NVRTC refuses the source, an include is missing, an
        entry point is not in it, or no NVRTC is installed. Raises Unsupported for an architecture that NVRTC does not
        know, and InvalidRequest for one that contradicts the source.
        """
        arch = source.resolve_arch(arch)
        nvrtc = load_nvrtc()
        archs = supported_archs()
        if arch not in archs:
            number, *numbers = (int(re.sub(r"\D", "", name)) for name in (arch, *archs))
            nearest = min(zip(numbers, archs, strict=True), key=lambda one: abs(one[0] - number))[1]
            raise Unsupported("arch", arch, f"this NVRTC compiles for {', '.join(archs)}", nearest=nearest)
        inputs = compile_inputs(source, arch, find_toolchain())
        data, log = _run(nvrtc, source, arch, inputs)
        resources = parse_resources(log)
        absent = [entry for entry in source.entry_points if entry not in resources]
        if absent:
            kernels = ", ".join(resources) or "none"
            raise CompileError(
                f"kernel {source.name!r} has no entry point {', '.join(absent)}: "
                f'is it extern "C" __global__? The source holds {kernels}',
                log,
            )
        return Cubin(whole_cubin(data), arch, source.entry_points, log, resources)


def _run(nvrtc: Any, source: KernelSource, arch: str, inputs: CompileInputs) -> tuple[bytes, str]:
    macros = (f"-D{name}={value}" for name, value in source.macros.items())
    program = nvrtc.createProgram(
        source.source,
        _file_name(source),
        [text.encode("utf-8", "surrogateescape") for text in inputs.headers.values()],
        [name.encode("utf-8", "surrogateescape") for name in inputs.headers],
    )
    try:
        try:
            nvrtc.compileProgram(program, (*inputs.options, *macros))
        except nvrtc.NVRTCError as error:
            raise _compile_error(source, arch, inputs.headers, nvrtc.getProgramLog(program), error) from error
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def _file_name(source: KernelSource) -> str:
    # No key covers the caller's path, so the cubin must not contain it. NVRTC reads a name that begins with a dash as
    # an option, which may name a file to write.
    return re.sub(r"[^\w.+-]", "_", PurePosixPath(source.name).name).lstrip("-") or "kernel.cu"


_DIAGNOSTIC = re.compile(
    r"^(?P<file>[^\n()]+)\((?P<line>\d+)\): (?:catastrophic )?error(?: #\S+)?: (?P<text>.+)$", re.M
)
_MISSING = re.compile(r'(?:cannot|could not) open source file "([^"]+)"')
_TOOL_ERROR = re.compile(r"^.*\b(?:error|fatal)\s*:.*$", re.M)


def _compile_error(
    source: KernelSource, arch: str, headers: Mapping[str, str], log: str, error: Exception
) -> CompileError:
    start = f"kernel {source.name!r} does not compile for {arch}: "
    diagnostic = _DIAGNOSTIC.search(log)
    if diagnostic is None:
        first = _TOOL_ERROR.search(log)
        return CompileError(start + (first[0].strip() if first else str(error)), log)
    file, number, text = diagnostic["file"], int(diagnostic["line"]), diagnostic["text"]
    lines = (source.source if file == _file_name(source) else headers.get(file, "")).splitlines()
    line = lines[number - 1] if 0 < number <= len(lines) else None
    if missing := _MISSING.search(text):
        text = _missing_header(missing[1], source.headers)
    return CompileError(f"{start}{text} ({file}, line {number})", log, line)


def _missing_header(name: str, headers: Iterable[str]) -> str:
    alike = [other for other in headers if posixpath.basename(other) == posixpath.basename(name)]
    if alike:
        return f'header "{name}" is missing: headers are named in full, did you mean "{alike[0]}"?'
    toolchain = find_toolchain()
    if toolchain is not None and not toolchain.include_dirs:
        return (
            f'header "{name}" is missing: no headers of CUDA {toolchain.release[0]} are installed here; {cuda_hint()}'
        )
    return f'header "{name}" is missing: neither headers= nor the CUDA toolkit installed here has it'
