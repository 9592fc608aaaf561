"""Compile a kernel, read what ptxas made of it, and judge it: what any gate does."""

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
    """What became of a kernel. text: its machine code, None where no disassembler is installed."""

    resources: KernelResources
    notes: tuple[str, ...]
    text: str | None

    def count(self, pattern: str) -> int | None:
        """How many instructions match, None where no disassembler is installed."""
        return None if self.text is None else len(re.findall(pattern, self.text))


def kernel_source(key: DispatchKey | Variant) -> KernelSource:
    """What is compiled for a key."""
    return variant_of(key).source


def code_of(source: KernelSource, entry: str) -> Code:
    """Compile a source with NVRTC and read the kernel of that name."""
    cubin = Compiler().compile(source)
    text = disassemble(cubin.data) if find_disassembler() is not None else None
    return Code(cubin.resources[entry], cubin.notes, text)


def with_bug(source: KernelSource, file: str, old: str, new: str) -> KernelSource:
    """The same source with a bug in it or in one of its headers: the file must hold the text that is replaced."""
    text = source.source if file == source.name else source.headers[file]
    assert old in text
    if file == source.name:
        return dataclasses.replace(source, source=text.replace(old, new))
    return dataclasses.replace(source, headers={**source.headers, file: text.replace(old, new)})


def register_limit(threads: int, blocks: int = 1) -> int:
    """Registers a thread may have where so many blocks share a multiprocessor."""
    return min(_REGISTERS_PER_THREAD, _REGISTERS_PER_SM // (threads * blocks))


def code_faults(code: Code, registers: int) -> list[str]:
    """What every gate holds against a kernel. registers: the most that a thread may have."""
    resources, local = code.resources, code.count(r"\b(?:LDL|STL)\b")
    checks = {
        f"{resources.spill_bytes} bytes spilled": resources.spill_bytes != 0,
        f"{resources.stack_bytes} bytes of stack": resources.stack_bytes != 0,
        f"notes {code.notes}": code.notes != (),
        f"{resources.registers} registers of {registers}": not 0 < resources.registers <= registers,
        f"{local} accesses to local memory": local not in (None, 0),
    }
    return [text for text, is_wrong in checks.items() if is_wrong]
