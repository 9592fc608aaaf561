"""The transfer of a sequence from one cache to another: its pages, and the launches that read and write them.

Pages are copied as they are, so a sequence has the same bits at its new home, fp8 elements included.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_actors.arrays.adopt import dtype_of, name_of
from gpu_actors.attention.requests import Array
from gpu_actors.devices.interface import Kernel, Launch, Outputs, OutputSpec, Step
from gpu_actors.fields import describe, expect
from gpu_actors.kernels.append import AppendProblem
from gpu_actors.kernels.copy_pages import pack_page_copy, page_copy_geometry
from gpu_actors.kv.layers import before_pages, by_page, each_layer, pages_shape
from gpu_actors.kv.requests import KvSequence
from gpu_actors.values import brief, show

__all__ = [
    "SequencePages",
    "check_pages",
    "export_launch",
    "exported",
    "import_launch",
    "no_pages",
    "page_checks",
]

_LAYOUT = ("page_size", "kv_heads", "head_dim", "head_dim_v", "dtype", "latent_dim", "layers")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequencePages:
    """A sequence that has been exported, as `KvCache.export_pages` gives it. It can be pickled and sent anywhere.

    lease: a sequence of the source, which holds the pages there until it is freed (`KvCache.release`).
    length: rows. pages: their ids in the source's pool, in order.
    page_size, kv_heads, head_dim, head_dim_v, dtype, latent_dim, layers: the layout of a page, as in `KvCacheSpec`.
    k, v: (pages, page_size, kv_heads, head_dim) and (..., head_dim_v), in the pool's dtype; behind the last row 0. Of a
        latent cache k has whole rows, and v is None. Of several layers both have an axis of them first.
    k_descale, v_descale: fp32 (kv_heads,), of an fp8 pool that has them.
    checks: of each page, a digest of its bytes in all layers (BLAKE2b, 16 bytes).
    digests: the names of the whole pages whose tokens are known (`prefix_digests`). tail: the known tokens behind them.
    """

    __repr__ = brief

    lease: KvSequence
    length: int
    pages: tuple[int, ...]
    page_size: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    k: Array
    v: Array | None
    checks: tuple[bytes, ...]
    k_descale: Array | None = None
    v_descale: Array | None = None
    digests: tuple[bytes, ...] = ()
    tail: tuple[int, ...] = ()
    latent_dim: int = 0
    layers: int = 1


def page_checks(*pools: Any) -> tuple[bytes, ...]:
    """A digest of each page's bytes. pools: the pages of K, and those of V if there are any."""
    checks = []
    for pages in zip(*pools, strict=True):
        check = hashlib.blake2b(digest_size=16)
        for page in pages:
            check.update(np.ascontiguousarray(page).view(np.uint8).data)
        checks.append(check.digest())
    return tuple(checks)


def check_pages(pages: Any, pool: AppendProblem, descales: Mapping[str, Any], layers: int) -> None:
    """Check that pages fit a pool of each layer and have not changed since their export. Raises `InvalidRequest`."""
    expect(isinstance(pages, SequencePages), "pages", show(pages), "must be SequencePages, as export_pages() gives")
    for name, expected in zip(_LAYOUT, _layout(pool, layers), strict=True):
        other = getattr(pages, name)
        expect(
            type(other) is type(expected) and other == expected,
            name,
            show(other),
            f"must be that of the cache, {expected}",
        )
    count = _pages(pages.length, pool.page_size) if type(pages.length) is int and pages.length >= 0 else -1
    expect(count >= 0, "length", show(pages.length), "must be a number of rows")
    expect(not pool.latent or pages.v is None, "v", describe(pages.v), "must be None: a latent cache has no V")
    for name, dim in pool.sides.items():
        array, shape = getattr(pages, name), pages_shape(pool, count, dim, layers)
        sound = isinstance(array, np.ndarray) and array.shape == shape and name_of(array.dtype) == pool.cache_dtype
        expect(sound, name, describe(array), f"must be {pool.cache_dtype} {shape}, on the host")
    for name in ("k_descale", "v_descale"):
        expected, other = descales.get(name), getattr(pages, name)
        same = (expected is None) == (other is None) and (expected is None or np.array_equal(expected, other))
        expect(same, name, describe(other), f"must be that of the cache, {describe(expected)}")
    whole = pages.length // pool.page_size
    tokens = len(pages.digests) * pool.page_size + len(pages.tail)
    sound = len(pages.digests) <= whole and tokens <= pages.length and len(pages.tail) < pool.page_size
    expect(sound, "digests", len(pages.digests), f"must be of whole pages, of which there are {whole}")
    checks = page_checks(*(by_page(getattr(pages, name), layers) for name in pool.sides))
    expect(len(pages.checks) == count, "checks", len(pages.checks), f"must be one a page, {count}")
    for index, (check, digest) in enumerate(zip(checks, pages.checks, strict=True)):
        expect(
            check == digest, f"checks[{index}]", show(digest), "is not that of the page, which has changed on its way"
        )


def export_launch(
    pool: AppendProblem, pools: Mapping[str, Any], pages: Sequence[int], kernels: Sequence[Kernel], layers: int
) -> Launch:
    """Copies these pages of a pool to k_pages and v_pages on the host. pools: k_cache, and v_cache if there is one."""
    count = len(pages)
    outputs = {
        f"{side}_pages": OutputSpec(pages_shape(pool, count, dim, layers), pool.cache_dtype)
        for side, dim in pool.sides.items()
    }
    # The pairs come first: outputs are in the memory of the first input, on the host.
    inputs = {"page_pairs": np.array([(page, index) for index, page in enumerate(pages)], np.int32), **pools}
    steps = each_layer(_steps(pool, count, kernels, "cache", "pages"), layers)
    return Launch(None, inputs, outputs, functools.partial(_read, before_pages(layers)), steps)


def import_launch(
    pool: AppendProblem,
    pools: Mapping[str, Any],
    contents: Sequence[Any],
    pages: Sequence[int],
    kernels: Sequence[Kernel],
    layers: int,
) -> Launch:
    """Copies ``contents``, pages of K and perhaps V, to these pages of a pool. pools: as in `export_launch`."""
    inputs = {"page_pairs": np.array([(index, page) for index, page in enumerate(pages)], np.int32), **pools}
    inputs |= {f"{side}_pages": np.ascontiguousarray(one) for side, one in zip(pool.sides, contents, strict=True)}
    steps = each_layer(_steps(pool, len(pages), kernels, "pages", "cache"), layers)
    return Launch(None, inputs, {}, functools.partial(_write, before_pages(layers)), steps, updates=tuple(pools))


def exported(
    lease: KvSequence,
    pool: AppendProblem,
    descales: Mapping[str, Any],
    pages: Sequence[int],
    outputs: Outputs,
    digests: Sequence[bytes],
    tail: Sequence[int],
    length: int,
    layers: int,
) -> SequencePages:
    """The message for the pages that `export_launch` has read."""
    arrays = {side: outputs[f"{side}_pages"] for side in pool.sides}
    rest = length % pool.page_size
    if rest:  # rows that were not written hold old data
        for array in arrays.values():
            by_page(array, layers)[-1, ..., rest:, :, :].view(np.uint8)[...] = 0
    return SequencePages(
        lease=lease,
        length=length,
        pages=tuple(pages),
        **dict(zip(_LAYOUT, _layout(pool, layers), strict=True)),
        k=arrays["k"],
        v=arrays.get("v"),
        checks=page_checks(*(by_page(array, layers) for array in arrays.values())),
        digests=tuple(digests),
        tail=tuple(tail),
        **descales,
    )


def no_pages(pool: AppendProblem, layers: int) -> Outputs:
    """The outputs of `export_launch` for no pages."""
    dtype: Any = dtype_of(pool.cache_dtype)
    return {f"{side}_pages": np.zeros(pages_shape(pool, 0, dim, layers), dtype) for side, dim in pool.sides.items()}


def _layout(pool: AppendProblem, layers: int) -> tuple[Any, ...]:
    """The values of `_LAYOUT`."""
    latent = pool.head_dim_v if pool.latent else 0
    return pool.page_size, pool.heads_kv, pool.sides["k"], pool.head_dim_v, pool.cache_dtype, latent, layers


def _pages(length: int, page_size: int) -> int:
    return -(-length // page_size)


def _steps(pool: AppendProblem, count: int, kernels: Sequence[Kernel], source: str, target: str) -> tuple[Step, ...]:
    pack = functools.partial(pack_page_copy, count, pool, source=source, target=target)
    return tuple(Step(kernel, page_copy_geometry(count, pool), pack) for kernel in kernels)


def _read(place: tuple[slice, ...], inputs: Mapping[str, Any]) -> Outputs:
    pages = (*place, inputs["page_pairs"][:, 0])
    return {f"{side}_pages": inputs[f"{side}_cache"][pages] for side in "kv" if f"{side}_cache" in inputs}


def _write(place: tuple[slice, ...], inputs: Mapping[str, Any]) -> Outputs:
    pages = (*place, inputs["page_pairs"][:, 1])
    for side in "kv":
        if f"{side}_cache" in inputs:
            inputs[f"{side}_cache"][pages] = inputs[f"{side}_pages"]
    return {}
