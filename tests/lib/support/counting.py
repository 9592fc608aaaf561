"""Counts how often emulated kernels reach a line of their source."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
from inside.compiling import Variant

from gpu_actors import KernelSource

__all__ = ["counting"]


def counting(patch: pytest.MonkeyPatch, file: str, place: str, thread: int = 0) -> ctypes.c_longlong:
    """A count that one thread of each block raises at ``place``. file: a header, or "" for the kernel's own source."""
    count = ctypes.c_longlong(0)
    patch.setenv("COUNT_AT", str(ctypes.addressof(count)))
    # An emulated kernel's translation unit includes no header of the C library.
    declared = 'char* variable_named(const char*) __asm__("getenv");\n'
    declared += 'unsigned long long number_in(const char*, char**, int) __asm__("strtoull");\n'
    added = '__atomic_fetch_add((long long*)number_in(variable_named("COUNT_AT"), nullptr, 10), 1, 0);'
    raised = f"if (threadIdx.x == {thread}) {{ {added} }} "

    def counted(name: str, text: str) -> str:
        return declared + text.replace(place, raised + place) if name == file else text

    def changed(variant: Variant) -> KernelSource:
        source = made(variant)
        headers = {name: counted(name, text) for name, text in source.headers.items()}
        return dataclasses.replace(source, source=counted("", source.source), headers=headers)

    made = Variant.source.__get__
    patch.setattr(Variant, "source", property(changed))
    return count
