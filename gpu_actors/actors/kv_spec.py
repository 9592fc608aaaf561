"""GroupSpec: a group of the layers of a cache, as a `KvCacheSpec` asks for it, checked."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from gpu_actors.arrays.adopt import CallerNotes
from gpu_actors.arrays.request_arrays import adopt_request, changed
from gpu_actors.devices.interface import DeviceInfo
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.fields import FP8, FURTHEST, describe, dtype_of, expect, integer, optional_array
from gpu_actors.kernels.append import AppendProblem, append_variant
from gpu_actors.kv.requests import KvCacheSpec, KvLayer
from gpu_actors.values import show

__all__ = ["GroupSpec", "dtype_text", "groups_of"]

# The fields of `KvLayer` that `KvCacheSpec` has too.
_OF_A_LAYER = tuple(each.name for each in dataclasses.fields(KvLayer) if each.name not in ("window", "slack"))


class GroupSpec(NamedTuple):
    """A group of layers as a spec asks for it. layers: the numbers of the layers."""

    pool: AppendProblem
    descales: dict[str, Any]
    layers: Sequence[int]
    window: int | None = None
    slack: int = 0


def groups_of(spec: object, info: DeviceInfo, notes: CallerNotes | None) -> list[GroupSpec]:
    """The groups of layers that a spec asks for. Raises `InvalidRequest` and `Unsupported`."""
    if not isinstance(spec, KvCacheSpec):
        raise InvalidRequest("spec", spec, "must be a KvCacheSpec")
    if not isinstance(spec.layers, list | tuple):
        pool, descales = _checked(spec, info, notes)
        return [GroupSpec(pool, descales, range(integer("layers", spec.layers, 1)))]
    expect(bool(spec.layers), "layers", spec.layers, "must name one layer at least")
    groups: dict[Hashable, GroupSpec] = {}
    for index, layer in enumerate(spec.layers):
        field = f"layers[{index}]"
        if not isinstance(layer, KvLayer):
            raise InvalidRequest(field, show(layer), "must be a KvLayer")
        own = {name: value for name in _OF_A_LAYER if (value := getattr(layer, name)) is not None}
        try:
            pool, descales = _checked(changed(spec, own), info, notes)
        except (InvalidRequest, Unsupported) as error:
            if error.field in own:
                raise type(error)(f"{field}.{error.field}", *error.args[1:]) from None
            if error.field not in _OF_A_LAYER:
                raise
            reason = f"{error.reason}; {field} leaves it to the cache"
            raise type(error)(error.field, error.value, reason, *error.args[3:]) from None
        width = None if layer.window is None else integer(f"{field}.window", layer.window, 0, FURTHEST)
        if info.invariant and width is not None:
            reason = (
                "the first key of a launch is that of its window, so with invariant=True the bits of a row would change"
            )
            raise Unsupported(f"{field}.window", width, reason, None)
        slack = integer(f"{field}.slack", layer.slack, 0, FURTHEST)
        expect(width is not None or not slack, f"{field}.slack", slack, "goes with a window: others keep all rows")
        key = pool, width, slack, *((name, factors.tobytes()) for name, factors in descales.items())
        layers: Any = groups.setdefault(key, GroupSpec(pool, descales, [], width, slack)).layers
        layers.append(index)
    return list(groups.values())


def _checked(spec: KvCacheSpec, info: DeviceInfo, notes: CallerNotes | None) -> tuple[AppendProblem, dict[str, Any]]:
    """The pool and the descales of one layer, as a spec asks for them. Raises `InvalidRequest` and `Unsupported`."""
    spec = adopt_request(spec, info.device_name, notes)[0]
    blocks = integer("num_blocks", spec.num_blocks, 1, (1 << 31) - 1)
    page_size = integer("page_size", spec.page_size, 1)
    heads = integer("kv_heads", spec.kv_heads, 1)
    dim = integer("head_dim", spec.head_dim, 1)
    dim_v = dim if spec.head_dim_v is None else integer("head_dim_v", spec.head_dim_v, 1)
    latent = integer("latent_dim", spec.latent_dim, 0, dim - 1)
    if latent:
        expect(spec.head_dim_v is None, "head_dim_v", spec.head_dim_v, "and latent_dim both say what values are")
        factors = spec.v_descale
        expect(factors is None, "v_descale", describe(factors), "goes with V: k_descale is a latent cache's")
        dim, dim_v = dim - latent, latent
    dtype = dtype_text(spec.dtype)
    cascade = spec.cascade
    known = isinstance(cascade, bool) or (isinstance(cascade, str) and cascade == "auto")
    expect(known, "cascade", cascade, 'must be "auto", True or False')
    if info.invariant and cascade is True:
        reason = "with ContextOptions(invariant=True) the bits of a row do not depend on what its sequence shares"
        raise Unsupported("cascade", True, reason, "auto")
    descales: dict[str, Any] = {}
    for name in ("k_descale", "v_descale"):
        factors = getattr(spec, name)
        if factors is None:
            continue
        expect(dtype in FP8, name, describe(factors), f"goes with an fp8 pool only, and dtype is {dtype}")
        optional_array(name, factors, ((heads,),), ("float32",))
        sound = isinstance(factors, np.ndarray) and bool((np.isfinite(factors) & (factors > 0)).all())
        expect(sound, name, describe(factors), "must be positive numbers, on the host")
        descales[name] = factors.copy()
    pool = AppendProblem(
        layout="paged", batch=1, total=1, rows=1, heads_kv=heads, head_dim=dim, head_dim_v=dim_v, dtype=dtype,
        cache_dtype=dtype, page_size=page_size, num_blocks=blocks, max_blocks=1, latent=latent > 0,
    )  # fmt: skip
    append_variant(pool, info.arch)
    return dataclasses.replace(pool, descales=bool(descales)), descales


def dtype_text(dtype: Any) -> str:
    """The name of a dtype. dtype: its name, or a dtype of NumPy, ml_dtypes or torch."""
    name = str(dtype).removeprefix("torch.")
    with contextlib.suppress(Exception):  # a foreign object may raise anything; its text is checked below
        name = name if dtype is None else np.dtype(dtype).name  # None would be float64 to NumPy
    return dtype_of("dtype", SimpleNamespace(dtype=name))
