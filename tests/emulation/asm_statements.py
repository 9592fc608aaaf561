"""The asm statements of the wrappers in kernels_cu/ptx, and the emulated device's judgement of a statement."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from kernel_runs import emulated_module
from support.service import KERNELS_CU

from gpu_actors.devices.emulation import Toolchain
from gpu_actors.devices.emulation.assembly import AsmStatement, statements

Judge = Callable[[AsmStatement], str | None]

_ROOM = 1000


def expanded(text: str, changed: Mapping[str, str] | None = None) -> str:
    """CUDA C++ after the preprocessor, before its asm is captured. changed: headers other than those of kernels_cu."""
    toolchain = Toolchain.find()
    with tempfile.TemporaryDirectory() as folder:
        for name, header in (changed or {}).items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(header)
        unit = Path(folder, "unit.cpp")
        unit.write_text(text)
        command = [*toolchain.command, *toolchain.flags, f"-I{folder}", f"-I{KERNELS_CU}", "-E", str(unit)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.replace(f"{folder}/", "").replace(f"{KERNELS_CU}/", "")


def wrapper_statements(changed: Mapping[str, str] | None = None) -> tuple[AsmStatement, ...]:
    """Every asm statement of kernels_cu/ptx, those of macros in each of their uses."""
    headers = sorted(path.name for path in (KERNELS_CU / "ptx").glob("*.cuh"))
    text = "".join(f'#include "ptx/{name}"\n' for name in headers)
    return statements(expanded(text, changed))


def judge_in(cache: Path) -> Judge:
    """A function that returns what is wrong with a statement, or None. cache: a folder of emulated modules."""
    module = emulated_module("statement_checks.cu", {}, cache)
    check = ctypes.CDLL(str(module.path)).check_statement
    check.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64]

    def judge(statement: AsmStatement) -> str | None:
        error = ctypes.create_string_buffer(_ROOM)
        texts = (statement.template, statement.constraints, ",".join(statement.clobbers))
        known = check(*(text.encode() for text in texts), statement.volatile, error, _ROOM)
        return None if known else error.value.decode()

    return judge
