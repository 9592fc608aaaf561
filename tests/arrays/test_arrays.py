"""Arrays of any kind are adopted without a copy, or refused by name, and results come back in kind."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.tensor import HostTensor

from gpu_actors.arrays.adopt import (
    adopt,
    check_output,
    restore,
)
from gpu_actors.errors import InvalidRequest

FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]


def refusal(array: Any, field: str = "q", **how: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        adopt(array, field, **how)
    assert caught.value.field == field
    return caught.value


# NumPy


@pytest.mark.parametrize("dtype", [*FLOATS, "bool", "int8", "int32", "uint32", "int64", "uint64"])
def test_an_ndarray_is_adopted_as_it_is(dtype: str) -> None:
    array = np.zeros((2, 3), dtype)[:, ::2]
    adopted = adopt(array, "q")
    assert (adopted.kind, adopted.device) == ("numpy", "cpu")
    assert adopted.array is array
    assert adopted.source is array
    assert restore(array, adopted) is array


@pytest.mark.parametrize(
    ("array", "words"),
    [
        ([1.0, 2.0], "must be an array"),
        (3.0, "must be an array"),
        (None, "must be an array"),
        (np.float32(1), "must be an array"),
        (np.array([object()]), "one of the dtypes"),
        (np.zeros(3, np.complex64), "one of the dtypes"),
        (np.array(["q"]), "one of the dtypes"),
        (np.zeros(3, ml_dtypes.float8_e4m3b11fnuz), "one of the dtypes"),
        (np.zeros(3, [("x", np.float32)]), "one of the dtypes"),
        (np.ma.masked_array(np.zeros(3), [0, 1, 0]), "masked"),
        (np.zeros(3, ">f4"), r"byte order: array\.astype\('float32'\)"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_is_no_usable_array_is_refused_with_a_description(array: Any, words: str) -> None:
    error = refusal(array, "block_table")
    assert type(array).__name__ in str(error.value)
    with pytest.raises(InvalidRequest, match=words):
        raise error


def test_an_array_that_cannot_even_be_described_is_refused() -> None:
    class Hostile:
        @property
        def shape(self) -> None:
            raise RuntimeError("deleted")

        def __dlpack__(self) -> None: ...

        def __dlpack_device__(self) -> None:
            raise RuntimeError("deleted")

    assert refusal(Hostile()).value == "Hostile"


# DLPack on the host


@pytest.mark.parametrize("old", [False, True], ids=["1.x", "0.x"])
def test_a_dlpack_array_on_the_host_is_adopted_without_a_copy(old: bool) -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)[:, ::-1, ::2]
    adopted = adopt(HostTensor(array, old), "q")
    assert (adopted.kind, adopted.device) == ("dlpack", "cpu")
    np.testing.assert_array_equal(adopted.array, array)
    assert np.shares_memory(adopted.array, array)


def test_the_producers_memory_lives_as_long_as_what_was_adopted() -> None:
    class Owner(np.ndarray):  # an ndarray that can be weakly referenced
        pass

    array = np.ones((3, 4), np.float32).view(Owner)
    alive = weakref.ref(array)
    view = adopt(HostTensor(array), "q").array
    del array
    gc.collect()
    assert alive() is not None
    np.testing.assert_array_equal(view, 1)
    del view
    gc.collect()
    assert alive() is None


def test_a_read_only_array_stays_read_only() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    view = adopt(HostTensor(array), "q").array
    with pytest.raises(InvalidRequest, match="writeable"):
        check_output(view, (3,), "float64", "out")


def test_an_empty_dlpack_array_is_adopted() -> None:
    assert adopt(HostTensor(np.zeros((0, 4), np.float32)), "q").array.shape == (0, 4)


def test_a_library_known_by_dlpack_takes_results_through_its_namespace() -> None:
    tensor = HostTensor(np.zeros(3, np.float32))
    result = np.ones(3, np.float32)
    assert restore(result, adopt(tensor, "q")) is result
    namespace = SimpleNamespace(from_dlpack=lambda array: ("theirs", array))
    tensor.__array_namespace__ = lambda: namespace  # type: ignore[attr-defined]
    assert restore(result, adopt(tensor, "q")) == ("theirs", result)


# Outputs


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 2), "float32"), ((2, 3), "float16"), ((6,), "float32")], ids=["shape", "dtype", "rank"]
)
def test_an_output_array_must_fit_exactly(shape: tuple[int, ...], dtype: str) -> None:
    with pytest.raises(InvalidRequest, match=r"must be float32 of shape \(2, 3\)") as caught:
        check_output(np.zeros(shape, dtype), (2, 3), "float32", "out")
    assert caught.value.field == "out"
    check_output(np.zeros((2, 3), np.float32).T.T, (2, 3), "float32", "out")
