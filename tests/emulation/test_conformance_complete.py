"""Every wrapper of an instruction has a kernel that tries it on the CPU and on a GPU, and is launched as meant."""

from __future__ import annotations

import ctypes
import itertools
import re
from typing import Any

import cupy
import numpy as np
import pytest
from kernel_runs import KERNELS, KernelRun, launch_on_cuda, pointers
from second_reading import FILE as SECOND_READING
from support.service import KERNELS_CU


def wrappers() -> dict[str, str]:
    """The functions of kernels_cu/ptx that hold an asm statement, or a macro that does, with the file they are in."""
    found: dict[str, str] = {}
    for path in sorted((KERNELS_CU / "ptx").glob("*.cuh")):
        text = path.read_text()
        starts = list(re.finditer(r"^(?:WRAPPER|inline) [\w:<>* ]*?\b(\w+)\(", text, re.M))
        macros = re.findall(r"#define (\w+)(?:\([^)]*\))?[^\n]*\\\n(?:[^\n]*\\\n)*?[^\n]*asm", text)
        for start, end in itertools.zip_longest(starts, starts[1:]):
            body = text[start.start() : end.start() if end else len(text)]
            body = re.split(r"^#define|^#undef", body, flags=re.M)[0]
            if "asm" in body or any(re.search(rf"\b{macro}\(", body) for macro in macros):
                found[start[1]] = path.name
    return found


def test_every_wrapper_of_an_instruction_has_a_conformance_kernel() -> None:
    files = (*(KERNELS / "conformance").glob("*.cu"), KERNELS / SECOND_READING)
    tried = "\n".join(path.read_text() for path in files)
    found = wrappers()
    assert {"mma_m16n8k16", "tma_load", "fence_proxy_async_global", "ldmatrix_x4_trans", "wgmma_wait"} <= set(found)
    untried = {name: file for name, file in found.items() if not re.search(rf"\b{name}\b", tried)}
    assert untried == {}


def test_parameters_of_every_size_are_passed_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [bytes(range(128)), b"\x01\x00\x00\x00", bytes(8)]
    seen: dict[str, Any] = {}

    def launch(function: int, *rest: int) -> None:
        *shape, where, extra = rest
        addresses = (ctypes.c_void_p * len(params)).from_address(where)
        seen["params"] = [ctypes.string_at(at, len(data)) for at, data in zip(addresses, params, strict=True)]
        seen["shape"] = (function, *shape, extra)

    monkeypatch.setattr(cupy.cuda.driver, "moduleGetFunction", lambda module, name: (module, name) == (3, "f") and 5)
    monkeypatch.setattr(cupy.cuda.driver, "funcSetAttribute", lambda *given: seen.update(attribute=given))
    monkeypatch.setattr(cupy.cuda.driver, "launchKernel", launch)
    run = KernelRun("any.cu", "f", {"x": np.zeros(1)}, pointers("x"), block=64, grid=(7, 2), shared_bytes=999)
    launch_on_cuda(3, run, params)
    assert seen == {"params": params, "shape": (5, 7, 2, 1, 64, 1, 1, 999, 0, 0), "attribute": (5, 8, 999)}
