"""Memory of the emulated device as arrays of the host, which reads and writes it in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from inside.arrays import DeviceArray
from inside.cuda import CudaDevice
from inside.devices import Launch

__all__ = ["host_view", "operand", "run_launch"]


class _Memory:
    """owner: the array on the device. Its memory lives as long as a NumPy array over this object."""

    def __init__(self, owner: DeviceArray) -> None:
        self.owner = owner
        bits = {"version": 3, "typestr": "|u1", "shape": (owner.nbytes,), "data": (owner.address, False)}
        self.__array_interface__ = bits


def host_view(array: Any) -> np.ndarray[Any, Any]:
    """A contiguous array on the device as an ndarray over the same memory. An ndarray is returned as it is."""
    if isinstance(array, np.ndarray):
        return array
    return np.asarray(_Memory(array)).view(array.dtype).reshape(array.shape)


def operand(array: Any) -> Any:
    """An array for a launch: a view of a `host_view` becomes a DeviceArray, and others stay as they are."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if not isinstance(owner, _Memory):
        return array
    return DeviceArray(array.ctypes.data, array.shape, array.strides, array.dtype, 0, owner=owner)


def run_launch(device: CudaDevice, launch: Launch) -> Mapping[str, Any]:
    """The outputs of a launch on a stream of its own."""
    inputs = {name: operand(array) for name, array in launch.inputs.items()}
    stream = device.open_stream("test")
    try:
        event = stream.launch(dataclasses.replace(launch, inputs=inputs))
        event.wait()
        return {name: host_view(array).copy() for name, array in event.outputs.items()}
    finally:
        stream.close()
