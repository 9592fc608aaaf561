"""The transfer of a sequence from one cache to another: its pages, and the launches that read and write them.

Pages are copied as they are, so a sequence has the same bits at its new home, fp8 elements included. Each group of
layers has pages of its own. In a group with a window only the pages that the sequence still holds are copied.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gpu_actors.arrays.adopt import dtype_of, name_of
from gpu_actors.attention.requests import Array
from gpu_actors.devices.interface import Kernel, Launch, Outputs, OutputSpec, Step
from gpu_actors.fields import describe, expect
from gpu_actors.kernels.append import AppendProblem
from gpu_actors.kernels.copy_pages import pack_page_copy, page_copy_geometry
from gpu_actors.kv.layers import before_pages, by_page, each_layer, join_launches, pages_shape
from gpu_actors.kv.requests import KvSequence
from gpu_actors.kv.sequences import first_page
from gpu_actors.values import brief, show

__all__ = [
    "LayerPages",
    "PagedGroup",
    "SequencePages",
    "check_pages",
    "export_launch",
    "exported",
    "import_launch",
    "no_pages",
    "page_checks",
    "prefix_digests_of",
]

# The fields that both `LayerPages` and `SequencePages` have, and their values in `SequencePages` with groups.
_NONE: dict[str, Any] = {
    "pages": (), "kv_heads": 0, "head_dim": 0, "head_dim_v": 0, "dtype": "", "latent_dim": 0,
    "k": None, "v": None, "checks": (), "k_descale": None, "v_descale": None,
}  # fmt: skip
_PAGES = tuple(_NONE)


class PagedGroup(Protocol):
    """A group of layers, such as a `PoolGroup`."""

    @property
    def layers(self) -> Sequence[int]: ...

    @property
    def pool(self) -> AppendProblem: ...

    @property
    def pools(self) -> Mapping[str, Any]: ...

    @property
    def descales(self) -> Mapping[str, Any]: ...

    @property
    def window(self) -> int | None: ...

    @property
    def slack(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerPages:
    """The pages of an exported sequence in one group of equal layers.

    layers: their numbers in the cache. window, slack: as in `KvLayer`.
    first: how many pages before these the source has given back. 0 without a window.
    pages: their ids in the source's pool of the group, in order.
    kv_heads, head_dim, head_dim_v, dtype, latent_dim, k, v, checks, k_descale, v_descale: as in `SequencePages`, of
        these layers. k and v of several layers begin with an axis of the layers.
    """

    __repr__ = brief

    layers: tuple[int, ...]
    window: int | None
    slack: int
    first: int
    pages: tuple[int, ...]
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    latent_dim: int
    k: Array
    v: Array | None
    checks: tuple[bytes, ...]
    k_descale: Array | None = None
    v_descale: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequencePages:
    """A sequence that has been exported, as `KvCache.export_pages` returns it. It can be pickled and sent anywhere.

    lease: a sequence of the source, which holds the pages there until it is freed (`KvCache.release`).
    length: rows. pages: their ids in the source's pool, in order.
    page_size, kv_heads, head_dim, head_dim_v, dtype, latent_dim, layers: the layout of a page, as in `KvCacheSpec`.
    k, v: (pages, page_size, kv_heads, head_dim) and (..., head_dim_v), in the pool's dtype; 0 after the last row. For a
        latent cache k has whole rows, and v is None. For several layers both begin with an axis of the layers.
    k_descale, v_descale: fp32 (kv_heads,), of an fp8 pool that has them.
    checks: of each page, a digest of its bytes in all layers (BLAKE2b, 16 bytes).
    digests: the names of the whole pages whose tokens are known (`prefix_digests`). tail: the known tokens after them.
    groups: if layers differ or have a window, the pages of each group, in the order of the groups' first layers. layers
        is then the number of layers of all groups, and pages, kv_heads, head_dim, head_dim_v, dtype, latent_dim, k, v,
        checks and the descales are empty, 0 or None.
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
    groups: tuple[LayerPages, ...] = ()

    def __setstate__(self, state: list[Any]) -> None:
        # A pickle has the values of the fields in their order. Those of earlier releases end before groups.
        for each, value in zip(dataclasses.fields(self), [*state, ()], strict=False):
            object.__setattr__(self, each.name, value)


def page_checks(*pools: Any) -> tuple[bytes, ...]:
    """A digest of each page's bytes. pools: the pages of K, and those of V if there are any."""
    checks = []
    for pages in zip(*pools, strict=True):
        check = hashlib.blake2b(digest_size=16)
        for page in pages:
            check.update(np.ascontiguousarray(page).view(np.uint8).data)
        checks.append(check.digest())
    return tuple(checks)


def check_pages(pages: Any, groups: Sequence[PagedGroup]) -> Sequence[LayerPages]:
    """The pages of each group of a cache. Raises `InvalidRequest` for pages that do not fit the cache, or have changed
    since their export."""
    expect(isinstance(pages, SequencePages), "pages", show(pages), "must be SequencePages, as export_pages() gives")
    expect(type(pages.length) is int and pages.length >= 0, "length", show(pages.length), "must be a number of rows")
    sound = isinstance(pages.groups, tuple) and all(isinstance(each, LayerPages) for each in pages.groups)
    expect(sound, "groups", show(pages.groups), "must be a tuple of LayerPages")
    page_size, layers = groups[0].pool.page_size, [tuple(group.layers) for group in groups]
    sizes = {"page_size": page_size, "layers": sum(map(len, layers))}
    _expect_same("", pages, sizes)
    parts = pages.groups or (_alone(pages),)
    expect(len(parts) == len(groups), "groups", len(parts), f"must be those of the cache, of layers {layers}")
    for index, (part, group) in enumerate(zip(parts, groups, strict=True)):
        _check_group(f"groups[{index}]." if pages.groups else "", part, group, pages.length)
    whole = pages.length // page_size
    tokens = len(pages.digests) * page_size + len(pages.tail)
    sound = len(pages.digests) <= whole and tokens <= pages.length and len(pages.tail) < page_size
    expect(sound, "digests", len(pages.digests), f"must be of whole pages, of which there are {whole}")
    return parts


def _check_group(prefix: str, part: LayerPages, group: PagedGroup, length: int) -> None:
    """Check the pages of one group. prefix: of the fields' names in errors."""
    pool, layers = group.pool, len(group.layers)
    _expect_same(prefix, part, _layout(group))
    least, most = (first_page(length, pool.page_size, group.window, slack) for slack in (group.slack, 0))
    sound = type(part.first) is int and least <= part.first <= most
    expect(sound, f"{prefix}first", show(part.first), f"must be from {least} to {most} in a sequence of {length} rows")
    count = -(-length // pool.page_size) - part.first
    expect(not pool.latent or part.v is None, f"{prefix}v", describe(part.v), "must be None: a latent cache has no V")
    for name, dim in pool.sides.items():
        array, shape = getattr(part, name), pages_shape(pool, count, dim, layers)
        sound = isinstance(array, np.ndarray) and array.shape == shape and name_of(array.dtype) == pool.cache_dtype
        expect(sound, f"{prefix}{name}", describe(array), f"must be {pool.cache_dtype} {shape}, on the host")
    for name in ("k_descale", "v_descale"):
        factors, other = group.descales.get(name), getattr(part, name)
        same = (factors is None) == (other is None) and (factors is None or np.array_equal(factors, other))
        expect(same, f"{prefix}{name}", describe(other), f"must be that of the cache, {describe(factors)}")
    checks = page_checks(*(by_page(getattr(part, name), layers) for name in pool.sides))
    expect(len(part.checks) == count, f"{prefix}checks", len(part.checks), f"must be one a page, {count}")
    for index, (check, digest) in enumerate(zip(checks, part.checks, strict=True)):
        reason = "is not that of the page, which has changed on its way"
        expect(check == digest, f"{prefix}checks[{index}]", show(digest), reason)


def prefix_digests_of(pages: SequencePages) -> tuple[bytes, ...]:
    """The digests of the longest prompt that can begin with the pages of this sequence alone.

    After a shorter prompt, rows may need pages that a group with a window has given back.
    """
    size = pages.page_size
    for count in range(len(pages.digests), 0, -1):
        if all(each.first <= first_page(count * size, size, each.window, each.slack) for each in pages.groups):
            return pages.digests[:count]
    return ()


def export_launch(groups: Sequence[PagedGroup], pages: Sequence[Sequence[int]], kernels: Sequence[Kernel]) -> Launch:
    """A launch that copies ``pages`` of each group's pools to the host, for `exported`."""
    parts = []
    for index, (group, ids) in enumerate(zip(groups, pages, strict=True)):
        pool, layers = group.pool, len(group.layers)
        outputs = {
            f"{side}_pages": OutputSpec(pages_shape(pool, len(ids), dim, layers), pool.cache_dtype)
            for side, dim in pool.sides.items()
        }
        # The pairs come first: outputs lie where the first input lies, on the host.
        inputs = {"page_pairs": np.array([(page, place) for place, page in enumerate(ids)], np.int32), **group.pools}
        steps = each_layer(_steps(pool, len(ids), kernels, "cache", "pages"), layers)
        launch = Launch(None, inputs, outputs, functools.partial(_read, before_pages(layers)), steps)
        parts.append((launch, _names(index, launch)))
    return join_launches(parts)


def import_launch(
    groups: Sequence[PagedGroup],
    contents: Sequence[LayerPages],
    pages: Sequence[Sequence[int]],
    kernels: Sequence[Kernel],
) -> Launch:
    """A launch that copies the last pages of ``contents`` to ``pages`` of each group's pools. A group may get none."""
    parts = []
    for index, (group, content, ids) in enumerate(zip(groups, contents, pages, strict=True)):
        if not ids:
            continue
        pool, layers = group.pool, len(group.layers)
        last = (*before_pages(layers), slice(-len(ids), None))
        inputs = {"page_pairs": np.array([(place, page) for place, page in enumerate(ids)], np.int32), **group.pools}
        inputs |= {f"{side}_pages": np.ascontiguousarray(getattr(content, side)[last]) for side in pool.sides}
        steps = each_layer(_steps(pool, len(ids), kernels, "pages", "cache"), layers)
        write = functools.partial(_write, before_pages(layers))
        launch = Launch(None, inputs, {}, write, steps, updates=tuple(group.pools))
        parts.append((launch, _names(index, launch)))
    return join_launches(parts)


def exported(
    lease: KvSequence,
    groups: Sequence[PagedGroup],
    firsts: Sequence[int],
    pages: Sequence[Sequence[int]],
    outputs: Outputs,
    digests: Sequence[bytes],
    tail: Sequence[int],
    length: int,
) -> SequencePages:
    """The message for the pages that `export_launch` has read. firsts, pages: of each group."""
    parts = []
    for index, (group, first, ids) in enumerate(zip(groups, firsts, pages, strict=True)):
        pool, layers = group.pool, len(group.layers)
        arrays = {side: outputs[f"group{index}.{side}_pages"] for side in pool.sides}
        rest = length % pool.page_size
        if rest:  # rows that were not written hold old data
            for array in arrays.values():
                by_page(array, layers)[-1, ..., rest:, :, :].view(np.uint8)[...] = 0
        part = LayerPages(
            first=first,
            pages=tuple(ids),
            k=arrays["k"],
            v=arrays.get("v"),
            checks=page_checks(*(by_page(array, layers) for array in arrays.values())),
            **_layout(group),
            **group.descales,
        )
        parts.append(part)
    alone = len(parts) == 1 and groups[0].window is None
    fields = {name: getattr(parts[0], name) for name in _PAGES} if alone else _NONE
    return SequencePages(
        lease=lease,
        length=length,
        page_size=groups[0].pool.page_size,
        layers=sum(len(group.layers) for group in groups),
        digests=tuple(digests),
        tail=tuple(tail),
        groups=() if alone else tuple(parts),
        **fields,
    )


def no_pages(groups: Sequence[PagedGroup]) -> Outputs:
    """The outputs of `export_launch` for a sequence without rows."""
    specs = export_launch(groups, [()] * len(groups), ()).outputs
    return {name: np.zeros(spec.shape, dtype_of(spec.dtype)) for name, spec in specs.items()}


def _alone(pages: SequencePages) -> LayerPages:
    """The pages of a sequence in a cache of one group without a window."""
    fields = {name: getattr(pages, name) for name in _PAGES}
    return LayerPages(layers=tuple(range(pages.layers)), window=None, slack=0, first=0, **fields)


def _expect_same(prefix: str, pages: object, expected: Mapping[str, Any]) -> None:
    """Check that fields have the cache's values. prefix: of the fields' names in errors."""
    for name, value in expected.items():
        other = getattr(pages, name)
        same = type(other) is type(value) and other == value
        expect(same, f"{prefix}{name}", show(other), f"must be that of the cache, {value}")


def _layout(group: PagedGroup) -> dict[str, Any]:
    """The fields of `LayerPages` that are the same for all sequences of a group."""
    pool = group.pool
    return {
        "kv_heads": pool.heads_kv,
        "head_dim": pool.sides["k"],
        "head_dim_v": pool.head_dim_v,
        "dtype": pool.cache_dtype,
        "latent_dim": pool.head_dim_v if pool.latent else 0,
        "layers": tuple(group.layers),
        "window": group.window,
        "slack": group.slack,
    }


def _names(index: int, launch: Launch) -> dict[str, str]:
    """The names of the operands of a group's launch in the joined launch, by their own names."""
    return {name: f"group{index}.{name}" for name in (*launch.inputs, *launch.outputs)}


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
