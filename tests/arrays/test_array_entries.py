"""Every entry answers arrays of every library as it answers NumPy's, in the kind of q, or refuses them by name."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cases.array_entries import ENTRIES, PAGES, Entry
from fakes.cuda import FakeCuda
from fakes.cupy import fake_cupy
from fakes.tensor import HostTensor
from inside.actors import cudnn_like
from inside.attention import array_fields, mha, requests
from inside.kv import requests as cache_messages

import gpu_actors as ga
from gpu_actors.arrays.device_array import DeviceArray
from gpu_actors.arrays.request_arrays import adopt_request


class Subclass(np.ndarray):
    """A subclass of ndarray."""


class OnCpu:
    """A library's arrays on the host. make: one from NumPy's. holds: whether a result has the expected type."""

    def __init__(self, module: str | None, make: Callable[[Any, Any], Any], kind: str) -> None:
        self.module, self._make, self._kind = module, make, kind

    def load(self) -> Any:
        return None if self.module is None else pytest.importorskip(self.module)

    def make(self, array: np.ndarray) -> Any:
        return self._make(self.load(), array)

    def holds(self, result: Any) -> bool:
        return type(result).__name__ == self._kind


KINDS = {
    "NumPy": OnCpu(None, lambda _, array: array, "ndarray"),
    "a subclass of NumPy's": OnCpu(None, lambda _, array: array.view(Subclass), "ndarray"),
    "torch": OnCpu("torch", lambda torch, array: torch.from_numpy(array), "Tensor"),
    "JAX": OnCpu("jax", lambda jax, array: jax.numpy.asarray(array), "ArrayImpl"),
    "DLPack": OnCpu(None, lambda _, array: HostTensor(array), "ndarray"),
}


def changed(entry: Entry, make: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    return {
        name: [make(part) for part in array] if isinstance(array, list) else make(array)
        for name, array in entry.arrays.items()
    }


def flat(result: Any) -> list[Any]:
    """The arrays and numbers of any reply."""
    if isinstance(result, dict):
        return [result[key] for key in sorted(result)]
    if isinstance(result, tuple | list):
        return [part for part in result if part is not None]
    return [result]


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx
        assert [ctx.flash_attn.restarts, ctx.cudnn.restarts] == [0, 0]
        assert ctx.health().ready


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_answers_arrays_of_any_library_as_it_answers_numpys(ctx: ga.GpuContext, name: str, kind: str) -> None:
    entry, library = ENTRIES[name], KINDS[kind]
    expected = flat(entry.ask(ctx, entry.arrays).result(60))
    result = flat(entry.ask(ctx, changed(entry, library.make)).result(60))
    assert len(result) == len(expected)
    for one, other in zip(result, expected, strict=True):
        assert library.holds(one) or isinstance(one, int)
        np.testing.assert_array_equal(np.asarray(one), other)


# On a device, as far as a fake device can show


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[np.ndarray], Any]:
    """Returns a CuPy array with the same contents, on a fake device."""
    cuda = FakeCuda()
    module, inner = fake_cupy(cuda)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupy.cuda", inner)
    return module.asarray  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "execute"])
def test_every_array_of_a_message_is_taken_in_from_cupy(name: str, on_gpu: Callable[[np.ndarray], Any]) -> None:
    entry = ENTRIES[name]
    given = changed(entry, on_gpu)
    kind = entry.message
    required = {field.name: None for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
    message = kind(**{**required, **given})
    before = {field.name: getattr(message, field.name) for field in dataclasses.fields(kind)}
    adopted, like = adopt_request(message, "cuda:0")
    assert type(adopted) is kind
    for field, value in before.items():
        assert getattr(message, field) is value, "the caller's message is as it was"
        assert field in given or getattr(adopted, field) is value
    for field in given:
        found = getattr(adopted, field)
        assert all(isinstance(part, DeviceArray) for part in (found if isinstance(found, list) else [found])), field
    assert (like is not None) == ("q" in given)


@pytest.mark.parametrize("name", ENTRIES)
def test_a_gpus_array_is_refused_by_its_name_where_the_context_is_elsewhere(
    ctx: ga.GpuContext, name: str, on_gpu: Callable[[np.ndarray], Any]
) -> None:
    entry = ENTRIES[name]
    for field in entry.arrays:
        given = dict(entry.arrays)
        several = isinstance(given[field], list)
        given[field] = [on_gpu(part) for part in given[field]] if several else on_gpu(given[field])
        with pytest.raises(ga.InvalidRequest, match="must lie on the host, not on cuda:0") as caught:
            entry.ask(ctx, given).result(60)
        wanted = {"execute": f"tensor {field}"}.get(name, f"{field}[0]" if several else field)
        assert caught.value.field == wanted


# No message is left out


MESSAGES = [
    kind
    for module in (requests.__name__, mha.__name__, cache_messages.__name__, cudnn_like.__name__)
    for kind in vars(importlib.import_module(module)).values()
    if dataclasses.is_dataclass(kind) and kind.__module__ == module and isinstance(kind, type)
]


def test_the_entries_give_every_array_that_a_message_has() -> None:
    # The two kinds of options are bases of messages, which have all of their fields.
    # An AttendLayer is sent between processes, for `KvStep.attend`.
    sent = [kind for kind in MESSAGES if kind.__name__ not in ("RequestOptions", "CacheOptions", "AttendLayer")]
    left = {(kind, field) for kind in sent for field in array_fields(kind)}
    left -= {(entry.message, field) for entry in ENTRIES.values() for field in entry.arrays}
    names = {f"{kind.__name__}.{field}" for kind, field in left}
    descales = {f"{kind}.{side}_descale" for kind in ("FlashForward", "FlashBackward") for side in "qkv"}
    descales |= {f"{kind}.{side}_descale" for kind in ("PagedForward", "BatchedDecode") for side in "qkv"}
    descales |= {"AttendCache.q_descale"}
    pool = {f"{kind}.{side}_descale" for kind in ("KvCacheSpec", "KvLayer") for side in "kv"}
    outputs = {f"{kind}.out" for kind in ("FlashForward", "PagedForward", "BatchedDecode", "AttendCache")}
    bounds = {"FlashBackward.cu_seqlens_q", "FlashBackward.cu_seqlens_k", "AttendCache.tree_mask"}
    assert names == descales | pool | outputs | bounds


@pytest.mark.parametrize("kind", KINDS)
def test_the_factors_of_an_fp8_pool_may_be_of_any_library(ctx: ga.GpuContext, kind: str) -> None:
    make = KINDS[kind].make
    factors = {name: make(np.array([0.5, 2.0], np.float32)) for name in ("k_descale", "v_descale")}
    with ctx.kv_cache(**{**PAGES, "dtype": "float8_e4m3fn"}, **factors) as cache:
        assert cache.stats().blocks == cache_messages.KvCacheSpec(**PAGES).num_blocks
