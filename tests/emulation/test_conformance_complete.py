"""Every wrapper of an instruction has a kernel that tests it on the CPU and on a GPU."""

from __future__ import annotations

import itertools
import re

from kernel_runs import KERNELS
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
