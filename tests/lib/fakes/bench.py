"""A CudaDevice over a fake driver, with a few kernels and what its tests share."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from fakes.cuda import FakeCuda, Geometry
from fakes.memory import FakeMemory
from fakes.tensor import DeviceTensor
from inside.arrays import DeviceArray
from inside.cuda import CudaDevice
from inside.devices import Buffer, Event, Kernel, Launch, LaunchGeometry, OutputSpec, Step, Stream

from gpu_actors import ContextOptions, Cubin
from gpu_actors.errors import ContextLost

RNG = np.random.default_rng(5)


# Kernels: their parameter struct is JSON with the address, shape, strides and dtype of each operand.


def pack(buffers: Mapping[str, Buffer]) -> bytes:
    return json.dumps({name: [b.address, b.shape, b.strides, b.dtype] for name, b in buffers.items()}).encode()


def views(memory: FakeMemory, params: bytes) -> dict[str, np.ndarray[Any, Any]]:
    arrays = {}
    for name, (address, shape, strides, dtype) in json.loads(params).items():
        kind = np.dtype(dtype)
        reach = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
        flat = memory.at(address, reach * kind.itemsize if 0 not in shape else 0)
        arrays[name] = np.ndarray(shape, kind, flat, 0, [step * kind.itemsize for step in strides])
    return arrays


def scale(memory: FakeMemory, params: bytes, geometry: Geometry) -> None:
    """out = 2 x, in x's dtype."""
    operands = views(memory, params)
    operands["out"][...] = (operands["x"].astype(np.float64) * 2).astype(operands["out"].dtype)


def copy_bits(memory: FakeMemory, params: bytes, geometry: Geometry) -> None:
    operands = views(memory, params)
    bits = f"u{operands['x'].itemsize}"
    operands["out"].view(bits)[...] = operands["x"].view(bits)


def bump(memory: FakeMemory, params: bytes, geometry: Geometry) -> None:
    """cache += 1, in place; out = cache."""
    operands = views(memory, params)
    operands["cache"][...] += 1
    operands["out"][...] = operands["cache"]


KERNELS = {"scale": scale, "copy_bits": copy_bits, "bump": bump}
IMAGE = Cubin(b"image", "sm_90a", tuple(KERNELS), "", {})


class Bench:
    """A device over a fake driver, and the steps that its tests repeat."""

    def __init__(self, cuda: FakeCuda | None = None, **options: Any) -> None:
        self.cuda = cuda or FakeCuda(dict(KERNELS))
        self.device = CudaDevice(0, ContextOptions(**options), api=self.cuda)
        self.stream = self.device.open_stream("test")

    def handle(self, stream: Stream | None = None) -> int:
        return (stream or self.stream).handle  # type: ignore[attr-defined]

    def of(
        self,
        x: Any,
        entry: str = "scale",
        grid: tuple[int, int, int] = (1, 1, 1),
        shared_bytes: int = 0,
        into: Any = None,
        pack: Callable[[Mapping[str, Buffer]], bytes] = pack,
        kernel: Kernel | None = None,
    ) -> Launch:
        spec = OutputSpec(x.shape, x.dtype.name, into)
        kernel = kernel or self.device.load(IMAGE, entry)
        geometry = LaunchGeometry(grid, (32, 1, 1), shared_bytes)
        return Launch(None, {"x": x}, {"out": spec}, lambda inputs: {}, (Step(kernel, geometry, pack),))

    def launch(self, x: Any, stream: Stream | None = None, **how: Any) -> Event:
        return (stream or self.stream).launch(self.of(x, **how))

    def run(self, x: Any, **how: Any) -> Any:
        event = self.launch(x, **how)
        event.wait()
        return event.outputs["out"]


def losses(stray: Callable[[], Event], sound: Callable[[], Event], probe: Callable[[], None]) -> dict[str, str]:
    """The messages of ContextLost of a launch with a stray access, the next launch, and a launch and probe after both.

    A kernel may run at any time after it is enqueued, so any later call may meet the error first: the rest of its own
    launch, the wait for it, or the next launch.
    """
    messages: dict[str, str] = {}

    def attempt(name: str, call: Callable[[], Event | None]) -> Event | None:
        try:
            return call()
        except ContextLost as error:
            messages[name] = str(error)
            return None

    events = {name: attempt(name, launch) for name, launch in (("stray", stray), ("behind", sound))}
    for name, event in events.items():
        if event is not None:
            attempt(name, event.wait)
    attempt("launch", sound)
    attempt("probe", probe)
    return messages


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def late_tensor(bench: Bench, x: np.ndarray[Any, Any]) -> DeviceTensor:
    """A tensor that its producer's stream has not written yet."""
    stream = bench.cuda.new_stream()
    tensor = DeviceTensor(bench.cuda, np.zeros_like(x), stream)

    def write() -> None:
        tensor.read(x.dtype, x.shape)[...] = x

    bench.cuda.enqueue(stream, write)
    return tensor


def on_device(bench: Bench, x: np.ndarray[Any, Any], stream: int | None = None, **more: Any) -> DeviceArray:
    block = bench.cuda.put(x)
    return DeviceArray(block.address, x.shape, x.strides, x.dtype, 0, stream, owner=block, **more)


def in_thread(work: Callable[[], None]) -> tuple[threading.Thread, list[BaseException | None]]:
    outcomes: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            outcomes.append(None)
        except BaseException as error:
            outcomes.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcomes
