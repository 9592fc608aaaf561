"""Returns the variant that is compiled for a key, and the keys and variants worth compiling ahead.

A cubin serves every key with equal macros. What a kernel decides at run time (by the GQA ratio, say) is no macro.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from gpu_actors.attention.key_mask import MaskKind
from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.attention.score_mod import SCORE_HEADER
from gpu_actors.compiling.variant import Variant
from gpu_actors.kernels.append import AppendProblem, Rope, append_variant
from gpu_actors.kernels.copy_pages import page_copy_variant
from gpu_actors.kernels.decode_mma import usual_decode_problems
from gpu_actors.kernels.dispatch import dispatch_key, family_of, program_of
from gpu_actors.kernels.program import ANYWHERE, Program, Target
from gpu_actors.kernels.support import ELEMENTS, FIRST_FP8_CAPABILITY, capability, example_problem

__all__ = [
    "Prepare",
    "block_threads",
    "kv_variants",
    "standard_variants",
    "usual_backward_keys",
    "variant_of",
    "variants_of",
]

_WARP = 32


@dataclass(frozen=True, slots=True)
class Prepare:
    """Asks the actor that compiles to make a kernel ready for its device. The reply is a `Cubin`, or a built `Kernel`.

    Each call that waits for the kernel has its own deadline, so this message has none.
    """

    no_deadline: ClassVar[bool] = True

    variant: Variant


@functools.lru_cache(maxsize=1024)
def variant_of(key: DispatchKey | Variant) -> Variant:
    """The variant of a key. Keys that differ only in fields that no macro depends on have the same one."""
    if isinstance(key, Variant):
        return key
    family = family_of(key)
    headers = {}
    if key.score_mod is not None and key.kernel == family.name:  # its companions know no scores
        headers[SCORE_HEADER] = key.score_mod.header
    return Variant(key.kernel, key.arch, family.macros(key), headers, example=key)


def variants_of(program: Program | None) -> tuple[Variant, ...]:
    """The variants of a program, in the order in which `Program.steps` takes the kernels."""
    return () if program is None else tuple(variant_of(key) for key in program.keys)


def block_threads(key: DispatchKey | Variant) -> int:
    if isinstance(key, DispatchKey):
        return family_of(key).threads(key)
    return _WARP * int(key.macros["WARPS"])


def standard_variants(arch: str) -> list[DispatchKey]:
    """The keys worth compiling ahead: the usual dtypes, head dims and masks, dense, varlen and over caches.

    fp8 is among the dtypes if the architecture has it.
    """
    dtypes = ["bfloat16", "float16"]
    if capability(arch) >= FIRST_FP8_CAPABILITY:
        dtypes.append("float8_e4m3fn")
    shapes: list[tuple[str, int, MaskKind, bool]] = []
    for dtype in dtypes:
        shapes += [(dtype, dim, mask, False) for dim in (64, 128) for mask in ("full", "causal")]
        shapes += [(dtype, dim, "causal", False) for dim in (80, 96, 192, 256)]
        shapes += [(dtype, dim, "causal_window", False) for dim in (64, 128)]
        shapes += [(dtype, dim, "causal", True) for dim in (64, 128)]
    shapes += [("float32", 64, mask, False) for mask in ("full", "causal")]
    shapes.append(("bfloat16", 32, "full", True))  # what `gpu-actors embed` asks for
    # Requests over caches, with the kernels that split and merge their work, wherever lengths lie.
    cached = _keys_of(usual_decode_problems(arch), arch, Target(lengths_on_host=False))
    return _keys_of([_usual_problem(*shape) for shape in shapes], arch) + cached


def usual_backward_keys(arch: str) -> list[DispatchKey]:
    """The kernels of the usual gradients: a key for each cubin."""
    shapes: list[tuple[int, MaskKind, bool]] = [(dim, mask, False) for dim in (64, 128) for mask in ("full", "causal")]
    shapes += [(256, "causal", False), (64, "causal", True), (128, "causal", True)]
    problems = [_usual_problem(dtype, *shape) for dtype in ("bfloat16", "float16") for shape in shapes]
    return _keys_of([replace(problem, direction="backward") for problem in problems], arch)


def kv_variants(arch: str) -> list[Variant]:
    """What a `KvCache` of usual dtypes and head dims launches besides attention, with rotated halves or no rotation."""
    plain = AppendProblem(
        layout="paged", batch=1, total=1, heads_kv=1, head_dim=128, head_dim_v=128, dtype="bfloat16",
        cache_dtype="bfloat16", page_size=16, num_blocks=1, max_blocks=1,
    )  # fmt: skip
    problems = []
    for dim in (64, 128):
        rows = replace(plain, head_dim=dim, head_dim_v=dim)
        turned = replace(rows, rope=Rope(dim=dim), heads_q=1)
        problems += [
            replace(problem, dtype=dtype, cache_dtype=dtype)
            for dtype in ("bfloat16", "float16")
            for problem in (rows, turned)
        ]
        problems.append(replace(turned, cache_dtype="float8_e4m3fn", descales=True))
    return [*(append_variant(problem, arch) for problem in problems), page_copy_variant(arch)]


def _keys_of(problems: Sequence[AttentionProblem], arch: str, target: Target = ANYWHERE) -> list[DispatchKey]:
    """A key for each cubin that the problems launch."""
    found: dict[Variant, DispatchKey] = {}
    for problem in problems:
        for key in program_of(problem, dispatch_key(problem, arch), target).keys:
            found.setdefault(variant_of(key), key)
    return list(found.values())


def _usual_problem(dtype: str, head_dim: int, mask: MaskKind, varlen: bool) -> AttentionProblem:
    return example_problem(
        dtype,
        head_dim,
        layout="varlen" if varlen else "dense",
        causal=mask in ("causal", "causal_window"),
        window_size=(255, 0) if mask in ("window", "causal_window") else (-1, -1),
        descales=ELEMENTS[dtype].fp8,
    )
