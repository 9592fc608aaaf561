"""The sources of cubins, noted when the package or CuPy compiles a cubin or the package finds it in a cache."""

from __future__ import annotations

import ctypes
import hashlib
import re
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

__all__ = ["Images"]

_INVALID_IMAGE = 200
# CUDA's declaration of dynamic shared memory. The emulation has a function in its place.
_DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+(\w+)\s+(\w+)\s*\[\s*\]\s*;")

# CuPy's headers are for a GPU; one of our own has what its simplest kernels need.
_CUPYS = re.compile(r'#include\s+[<"]cupy/[^>"]+[>"]')
_CUPYS_HEADER = Path(__file__).parent / "kernels" / "cupy.cuh"


class Images:
    """The sources of cubins, by the cubins' hashes. The driver calls `find`."""

    def __init__(self) -> None:
        self._sources: dict[str, tuple[Any, Any]] = {}
        self._answers: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def note(self, source: Any, cubin: Any) -> None:
        """Note what a cubin was made from. source: a KernelSource. cubin: its Cubin."""
        with self._lock:
            self._sources.setdefault(_name(cubin.data), (source, cubin))

    def note_cupys(self, text: str, data: bytes) -> None:
        """Note what CuPy compiled. text: a test's kernel or its own. data: the cubin, perhaps without the last byte."""
        from gpu_actors.compiling.elf import whole_cubin
        from gpu_actors.compiling.source import Cubin, KernelResources, KernelSource
        from gpu_actors.devices.emulation.build import find_entries

        entries = find_entries(text)
        if entries:
            # CuPy asks for no report of ptxas.
            resources = dict.fromkeys(entries, KernelResources(0, 0, 0, 0))
            self.note(KernelSource("cupy.cu", text, entries), Cubin(whole_cubin(data), "", entries, "", resources))

    def find(self, image: int, nbytes: int) -> bytes:
        """The answer to the driver: see `Finder` in driver/module.h."""
        try:
            data = ctypes.string_at(image, nbytes)
            with self._lock:
                found = self._sources.get(_name(data))
            if found is None:
                return _refusal(_INVALID_IMAGE, "a cubin is loaded that neither this package nor a test compiled")
            return self._answer(_name(data), *found)
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            return _refusal(_INVALID_IMAGE, f"a kernel cannot be built for the CPU: {str(error)[:400]}")

    def _answer(self, name: str, source: Any, cubin: Any) -> bytes:
        answer = self._answers.get(name)
        if answer is None:
            from gpu_actors.compiling.elf import parameter_sizes
            from gpu_actors.devices.emulation import build_module

            macros = {macro: str(value) for macro, value in source.macros.items()}
            headers = dict(source.headers)
            if _CUPYS.search(source.source):
                headers["softgpu/cupy.cuh"] = _CUPYS_HEADER.read_text()
            text = _CUPYS.sub('#include "softgpu/cupy.cuh"', source.source)
            text = _DYNAMIC_SHARED.sub(r"\1* \2 = reinterpret_cast<\1*>(::emulation::dynamic_shared());", text)
            module = build_module(text, macros, headers, entries=source.entry_points, name=source.name)
            lines = [f"{module.path}\t{source.name}"]
            for entry in source.entry_points:
                sizes = parameter_sizes(cubin.data, entry) or ()
                resources = cubin.resources[entry]
                lines.append(" ".join(map(str, (entry, resources.registers, resources.shared_bytes, *sizes))))
            answer = self._answers[name] = "\n".join(lines).encode()
        return answer


def _name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _refusal(status: int, why: str) -> bytes:
    return f"error {status}\n{why}".replace("\r", " ").encode()
