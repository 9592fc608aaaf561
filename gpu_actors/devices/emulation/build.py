"""Compiles a .cu file for the CPU and keeps the shared object in a cache that its whole input names."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import filelock

from gpu_actors.devices.emulation.runtime import EmulatedModule
from gpu_actors.devices.emulation.toolchain import Toolchain, cpu_identity
from gpu_actors.errors import CompileError, GpuActorsError, InvalidRequest

__all__ = ["build_module", "find_entries", "header_closure", "kernel_include_dir"]

_SCHEMA = "emulated-module-1"
_LOCK_SECONDS = 120.0
_log = logging.getLogger(__name__)

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_EXTERN = re.compile(r'\bextern\s+"C"(?=\s+__global__)')
_LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\s*\(")
_ENTRY = re.compile(r"\s*__global__\s+void\s+(\w+)\s*\(")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@functools.cache
def kernel_include_dir() -> Path:
    """The folder kernels_cu: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "kernels_cu", package.parent / "kernels_cu"):
        if (folder / "emulation" / "launch.cuh").is_file():
            return folder
    raise GpuActorsError(f"the kernel sources are missing: no kernels_cu in {package} or beside it")


def _read_header(name: str, headers: Path | Mapping[str, str]) -> str | None:
    if not isinstance(headers, Path):
        text = headers.get(name)
        if text is not None:
            return text
        headers = kernel_include_dir()
    try:
        return (headers / name).read_text(encoding="utf-8")
    except OSError:
        return None


def header_closure(source: str, headers: Path | Mapping[str, str]) -> dict[str, str]:
    """Every header that source includes with quotes, directly or not: name to text, sorted by name.

    headers: a folder, or name to text (completed from kernels_cu). Names that are not found are left to the compiler,
    which will name them.
    """
    found: dict[str, str] = {}
    waiting = [*_INCLUDE.findall(source), "ptx/types.cuh", "emulation/launch.cuh"]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        text = _read_header(name, headers)
        if text is not None:
            found[name] = text
            waiting += _INCLUDE.findall(text)
    return dict(sorted(found.items()))


def find_entries(source: str) -> tuple[str, ...]:
    """Names of the kernels that source declares with extern "C" __global__, in order."""
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
    """Builds source, or finds it built, and loads it.

    source: text of a .cu file. macros: name to value. include_dir: where quoted includes are found, a folder (kernels_cu
    by default) or name to text. toolchain: Toolchain.find() by default. cache_dir: folder of the built modules, the
    user's cache folder by default. entries: the kernels to make launchable, by default every extern "C" __global__ one.
    name: the file name in compiler messages.

    Raises CompileError with the compiler's log, InvalidRequest where source has no entry, GpuActorsError where the
    cache folder is not this user's own.
    """
    compiler = toolchain or Toolchain.find()
    headers = kernel_include_dir() if include_dir is None else include_dir
    names = tuple(entries) if entries is not None else find_entries(source)
    if not names:
        raise InvalidRequest("source", name, 'a kernel file declares at least one extern "C" __global__ function')
    definitions = dict(sorted((macros or {}).items()))
    closure = header_closure(source, headers)
    key = _module_key(source, definitions, closure, names, compiler)
    folder = _private_folder(cache_dir or _default_cache_dir())
    module = _load(folder, key)
    if module is not None:
        return module
    try:
        lock = filelock.FileLock(folder / f"{key}.lock")
        with lock.acquire(timeout=_LOCK_SECONDS):
            return _load(folder, key) or _build(
                folder, key, source, name, definitions, headers, closure, names, compiler
            )
    except filelock.Timeout:
        _log.warning("emulation cache: %s is being built elsewhere for over %.0f s", key[:12], _LOCK_SECONDS)
        return _build(folder, key, source, name, definitions, headers, closure, names, compiler)


def _module_key(
    source: str, macros: Mapping[str, str], closure: Mapping[str, str], entries: Sequence[str], toolchain: Toolchain
) -> str:
    digest = hashlib.sha256()

    def add(*parts: str) -> None:
        for part in parts:
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)

    add(_SCHEMA, toolchain.name, toolchain.version, cpu_identity())
    for group in (toolchain.flags, entries, [x for item in macros.items() for x in item]):
        add(str(len(group)), *group)
    add(source, *(x for item in closure.items() for x in item))
    return digest.hexdigest()


def _default_cache_dir() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("gpu-actors")) / "emulation"


def _private_folder(folder: Path) -> Path:
    """Makes folder (mode 0700) where it is missing; refuses one that somebody else could put code into."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise GpuActorsError(
            f"cache_dir {str(folder)!r} holds code that will be run: it must be a folder that belongs to this user "
            "and that nobody else may write to"
        )
    return folder


def _load(folder: Path, key: str) -> EmulatedModule | None:
    """The module of that key, or None where it is missing or damaged."""
    library, record = folder / f"{key}.so", folder / f"{key}.json"
    try:
        facts = json.loads(record.read_text(encoding="utf-8"))
        data = library.read_bytes()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("emulation cache: %s cannot be read (%s), building it anew", key[:12], error)
        return None
    if hashlib.sha256(data).hexdigest() != facts.get("sha256"):
        _log.warning("emulation cache: %s is damaged, building it anew", key[:12])
        return None
    return EmulatedModule(library, tuple(facts["entries"]), facts["build_seconds"])


def _build(
    folder: Path,
    key: str,
    source: str,
    name: str,
    macros: Mapping[str, str],
    headers: Path | Mapping[str, str],
    closure: Mapping[str, str],
    entries: Sequence[str],
    toolchain: Toolchain,
) -> EmulatedModule:
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        work = Path(scratch)
        include = [headers] if isinstance(headers, Path) else [_write_headers(work / "include", closure)]
        (work / "source.cu").write_text(f'#line 1 "{name}"\n{source}', encoding="utf-8")
        (work / "unit.cpp").write_text(_unit(entries), encoding="utf-8")
        command = [
            *toolchain.command,
            *toolchain.flags,
            *(f"-D{k}={v}" for k, v in macros.items()),
            *(f"-I{folder}" for folder in include),
            str(work / "unit.cpp"),
            "-o",
            str(work / "module.so"),
        ]
        _log.debug("emulation: building %s (%s)", name, key[:12])
        start = time.perf_counter()
        _compile(command, folder, name, source)
        seconds = time.perf_counter() - start
        _log.debug("emulation: built %s in %.2f s", name, seconds)
        data = (work / "module.so").read_bytes()
        facts = {"sha256": hashlib.sha256(data).hexdigest(), "entries": list(entries), "build_seconds": seconds}
        (work / "module.json").write_text(json.dumps(facts), encoding="utf-8")
        for made, kept in (("module.so", f"{key}.so"), ("module.json", f"{key}.json")):
            with open(work / made, "rb") as file:
                os.fsync(file.fileno())
            os.replace(work / made, folder / kept)
    return EmulatedModule(folder / f"{key}.so", tuple(entries), seconds)


def _unit(entries: Sequence[str]) -> str:
    exports = "".join(f"GPU_ACTORS_ENTRY({entry})\n" for entry in entries)
    return f'#include "ptx/types.cuh"\n#include "source.cu"\n#include "emulation/launch.cuh"\n{exports}'


def _write_headers(folder: Path, closure: Mapping[str, str]) -> Path:
    for name, text in closure.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def _compile(command: Sequence[str], cache: Path, name: str, source: str) -> None:
    zig_cache = {"ZIG_GLOBAL_CACHE_DIR": str(cache / "zig"), "ZIG_LOCAL_CACHE_DIR": str(cache / "zig")}
    result = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env={**os.environ, **zig_cache}, check=False
    )
    if result.returncode == 0:
        return
    log = result.stdout + result.stderr
    raise CompileError(f"{name} does not compile for the CPU:\n{log[:4000]}", log, _first_bad_line(log, name, source))


def _first_bad_line(log: str, name: str, source: str) -> str | None:
    match = re.search(rf"{re.escape(name)}:(\d+):(?:\d+:)? (?:fatal )?error", log)
    lines = source.splitlines()
    return lines[int(match[1]) - 1].strip() if match and 0 < int(match[1]) <= len(lines) else None
