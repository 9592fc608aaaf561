"""Compiles a kernel, reads what ptxas made of it, and judges it: shared by all gates."""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple

from inside.compiling import Compiler, Variant, supported_archs
from inside.kernels import variant_of

from benchmarks.sass import disassemble, find_disassembler
from gpu_actors import DispatchKey, KernelResources, KernelSource

__all__ = ["ARCHS", "Code", "code_faults", "code_of", "kernel_source", "register_limit", "with_bug"]

_WITH_KERNELS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
ARCHS = tuple(arch for arch in _WITH_KERNELS if arch in supported_archs())
_REGISTERS_PER_THREAD, _REGISTERS_PER_SM = 255, 65536


class Code(NamedTuple):
    """A compiled kernel. text: its machine code, None if no disassembler is installed."""

    resources: KernelResources
    notes: tuple[str, ...]
    text: str | None

    def count(self, pattern: str) -> int | None:
        """How many instructions match, None if no disassembler is installed."""
        return None if self.text is None else len(re.findall(pattern, self.text))


def kernel_source(key: DispatchKey | Variant) -> KernelSource:
    """The source of a key."""
    return variant_of(key).source


def code_of(source: KernelSource, entry: str) -> Code:
    """Compile a source with NVRTC and read the kernel of that name."""
    cubin = Compiler().compile(source)
    text = disassemble(cubin.data) if find_disassembler() is not None else None
    return Code(cubin.resources[entry], cubin.notes, text)


def with_bug(source: KernelSource, file: str, old: str, new: str) -> KernelSource:
    """The source with a bug in it or in one of its headers. ``file`` must contain ``old``."""
    text = source.source if file == source.name else source.headers[file]
    assert old in text
    if file == source.name:
        return dataclasses.replace(source, source=text.replace(old, new))
    return dataclasses.replace(source, headers={**source.headers, file: text.replace(old, new)})


def register_limit(threads: int, blocks: int = 1) -> int:
    """The most registers of a thread with which so many blocks share a multiprocessor."""
    return min(_REGISTERS_PER_THREAD, _REGISTERS_PER_SM // (threads * blocks))


def code_faults(code: Code, registers: int) -> list[str]:
    """The faults of a kernel in any gate. registers: the most that a thread may have."""
    resources, local = code.resources, code.count(r"\b(?:LDL|STL)\b")
    checks = {
        f"{resources.spill_bytes} bytes spilled": resources.spill_bytes != 0,
        f"{resources.stack_bytes} bytes of stack": resources.stack_bytes != 0,
        f"notes {code.notes}": code.notes != (),
        f"{resources.registers} registers of {registers}": not 0 < resources.registers <= registers,
        f"{local} accesses to local memory": local not in (None, 0),
    }
    return [text for text, is_wrong in checks.items() if is_wrong]
