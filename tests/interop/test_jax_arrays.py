"""JAX arrays on the host: adopted without a copy, results as JAX arrays on the same device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from inside.arrays import adopt, check_output, restore

from gpu_actors.errors import InvalidRequest

jax = pytest.importorskip("jax")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int32"])
def test_an_array_is_adopted_and_a_result_given_back_in_kind(dtype: str) -> None:
    array = jax.numpy.arange(6).reshape(2, 3).astype(dtype)
    adopted = adopt(array, "q")
    assert (adopted.kind, adopted.device, adopted.source is array) == ("jax", "cpu", True)
    assert adopted.array.dtype.name == dtype
    assert adopted.array.ctypes.data == array.unsafe_buffer_pointer()
    result = restore(np.array(adopted.array), adopted)
    assert isinstance(result, jax.Array)
    assert result.dtype == array.dtype
    assert result.devices() == array.devices()
    np.testing.assert_array_equal(np.asarray(result), np.asarray(array))


def test_an_array_cannot_be_written_into() -> None:
    view = adopt(jax.numpy.zeros((2, 3)), "out").array
    with pytest.raises(InvalidRequest, match="writeable"):
        check_output(view, (2, 3), "float32", "out")


def test_a_traced_array_is_refused() -> None:
    def attend(q: Any) -> Any:
        adopt(q, "q")
        return q

    with pytest.raises(InvalidRequest, match=r"outside jax\.jit") as caught:
        jax.jit(attend)(jax.numpy.zeros(3))
    assert caught.value.field == "q"


def test_a_deleted_array_is_refused() -> None:
    array = jax.numpy.zeros(3)
    array.delete()
    with pytest.raises(InvalidRequest, match="cannot be read"):
        adopt(array, "q")


def test_a_complex_array_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="one of the dtypes"):
        adopt(jax.numpy.zeros(3, "complex64"), "q")
