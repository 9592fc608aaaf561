"""A score modification in a kernel's source: its header, and its parameters behind the kernel's own."""

from __future__ import annotations

import dataclasses

from gates.score_mods import Modified, matched
from inside.compiling import Compiler
from support.gate import kernel_source

from gpu_actors import KernelSource
from gpu_actors.kernels.dispatch import dispatch_key
from gpu_actors.kernels.params import forward_layout, score_layout


def variant(name: str) -> Modified:
    return Modified("sm_80", name, 64, "none")


def source_of(name: str) -> KernelSource:
    return kernel_source(dispatch_key(matched(variant(name)), "sm_80"))


def test_the_modification_is_in_the_kernel() -> None:
    """Its header replaces the empty one, and the kernel's source stays the same."""
    source = source_of("tanh gating")
    assert "tanh_of" in source.headers["common/score_mod.cuh"]
    plain = source_of("t5 relative bias")
    assert "#define SCORE_MOD 0" in plain.headers["common/score_mod.cuh"]
    assert source.source == plain.source


def test_the_compiler_lays_the_parameters_out_as_they_are_packed() -> None:
    source = source_of("document mask")
    layout, own = score_layout(matched(variant("document mask")).score_mod), forward_layout().size
    checks = [
        f'static_assert(sizeof(ScoreParams) == {layout.size}, "what is read");',
        f'static_assert(sizeof(LaunchParams) == {own + -(-layout.size // 8) * 8}, "what a launch passes");',
        f'static_assert(__builtin_offsetof(LaunchParams, score) == {own}, "where it begins");',
    ]
    checks += [
        f'static_assert(__builtin_offsetof(ScoreParams, {field.name}) == {field.offset}, "{field.name}");'
        for field in layout.fields
    ]
    Compiler().compile(dataclasses.replace(source, source=source.source + "\n".join(checks)))
