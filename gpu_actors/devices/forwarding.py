"""ForwardingDevice: forwards all calls to another device. A base for devices that change some of the calls."""

from __future__ import annotations

from typing import Any

from gpu_actors.compiling.source import Cubin, KernelSource
from gpu_actors.devices.interface import Device, DeviceInfo, Kernel, Stream, TensorMap

__all__ = ["ForwardingDevice"]


class ForwardingDevice(Device):
    """Forwards all calls. inner: the device that does the work."""

    def __init__(self, inner: Device) -> None:
        self.inner = inner
        self.info: DeviceInfo = inner.info
        self.builds_kernels: bool = inner.builds_kernels

    @property
    def identity(self) -> tuple[str, ...]:
        return self.inner.identity

    def open_stream(self, name: str) -> Stream:
        return self.inner.open_stream(name)

    def build(self, source: KernelSource, arch: str) -> Kernel:
        return self.inner.build(source, arch)

    def load(self, cubin: Cubin, entry: str) -> Kernel:
        return self.inner.load(cubin, entry)

    def allocate(self, shape: tuple[int, ...], dtype: str, zero: bool = False) -> Any:
        return self.inner.allocate(shape, dtype, zero)

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        return self.inner.encode_tensor_map(tensor_map)

    def probe(self) -> None:
        self.inner.probe()

    def note_caller(self) -> Any:
        return self.inner.note_caller()

    def bind_thread(self) -> None:
        self.inner.bind_thread()

    def is_current(self) -> bool:
        return self.inner.is_current()

    def close(self) -> None:
        self.inner.close()
