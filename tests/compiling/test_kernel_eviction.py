"""Loaded kernels are bounded: the one used longest ago is dropped, and none in flight is unloaded."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from fakes.bench import KERNELS, Bench, floats
from inside.compiling import Variant
from inside.devices import Kernel
from inside.emulation import EmulatedBuffer, build_module
from inside.planning import KernelStore
from inside.runtime import Mailbox

from gpu_actors import Call
from gpu_actors.compiling.source import Cubin


def variants(*kernels: str) -> tuple[Variant, ...]:
    return tuple(Variant(kernel, "sm_90a") for kernel in kernels)


def cubin(image: bytes) -> Cubin:
    return Cubin(image, "sm_90a", tuple(KERNELS), "", {})


class Store:
    """A KernelStore whose kernels are compiled when the test says so, and the cell of the actor that asks for them."""

    def __init__(self, capacity: int) -> None:
        self.loads: list[str] = []
        self.compiles: list[str] = []
        self._pending: dict[str, Call[Any]] = {}
        self._mailbox = Mailbox("test", 64, 8)
        environment: Any = SimpleNamespace(device=SimpleNamespace(load=self._load), compiler=self)
        self.mailbox = SimpleNamespace(requeue=lambda calls: None, park=lambda call: None)
        self.cell: Any = self
        self.store = KernelStore(environment, capacity)

    def send(self, message: Any, *_: Any) -> Call[Any]:
        self.compiles.append(message.variant.kernel)
        self._pending[message.variant.kernel] = Call(message, self._mailbox)
        return self._pending[message.variant.kernel]

    def compiled(self, key: str) -> None:
        self._pending.pop(key).resolve(Cubin(key.encode(), "sm_90a", (key,), "", {}))

    def take(self, *keys: str) -> tuple[Kernel, ...]:
        """Ask, have missing kernels compiled, and ask again, as an actor does."""
        expected = variants(*keys)
        while (result := self.store.get(expected, self.cell)) is None:
            self.store.wait_for(expected, Call("request", self._mailbox), self.cell)
            for key in list(self._pending):
                self.compiled(key)
        return result

    def _load(self, cubin: Cubin, entry: str) -> Kernel:
        self.loads.append(entry)
        return Kernel(entry, object())


def test_the_kernel_used_longest_ago_is_let_go() -> None:
    held = Store(2)
    first, second = held.take("a"), held.take("b")
    assert held.take("a") is first
    held.take("c")
    assert held.take("a") is first
    assert held.loads == ["a", "b", "c"]
    assert held.take("b") is not second
    assert held.loads == ["a", "b", "c", "b"]


def test_a_kernel_that_no_request_came_back_for_is_let_go_too() -> None:
    held = Store(2)
    for number in range(10):
        held.store.wait_for(variants(f"k{number}"), Call("request", Mailbox("test", 64, 8)), held.cell)
        held.compiled(f"k{number}")
    assert len(held.store._entries) == 2
    held.take("k0")
    assert held.compiles.count("k0") == 2


def test_kernels_of_one_request_are_held_together() -> None:
    held = Store(3)
    both = held.take("plan", "combine")
    assert [kernel.entry for kernel in both] == ["plan", "combine"]
    held.take("other")
    assert held.take("plan", "combine") is both
    held.take("another")  # replaces the other
    assert held.take("plan", "combine") is both
    assert held.loads == ["plan", "combine", "other", "another"]


def test_a_kernel_is_one_for_all_that_take_it_with_others() -> None:
    held = Store(3)
    (alone,) = held.take("attend")
    assert held.take("append", "attend")[1] is alone
    assert held.loads == ["attend", "append"]


def test_a_set_of_kernels_goes_with_the_first_of_them() -> None:
    held = Store(2)
    (alone,) = held.take("attend")
    held.take("append", "attend")
    held.take("attend")
    held.take("other")  # replaces append
    assert held.take("attend")[0] is alone
    assert held.loads == ["attend", "append", "other"]
    held.take("append", "attend")
    assert held.loads == ["attend", "append", "other", "append"]


# On CUDA


def unloaded(bench: Bench) -> int:
    return bench.cuda.calls.count("unload_module")


def test_a_module_is_unloaded_with_the_last_reference_to_its_kernels() -> None:
    bench = Bench()
    scale, bump = (bench.device.load(cubin(b"first"), entry) for entry in ("scale", "bump"))
    assert bench.device.load(cubin(b"first"), "scale").handle is scale.handle
    del scale
    bench.device.load(cubin(b"second"), "scale")
    assert unloaded(bench) == 0
    del bump
    kept = bench.device.load(cubin(b"third"), "scale")
    assert unloaded(bench) == 2  # the first and the second
    bench.device.close()
    assert unloaded(bench) == 3
    assert bench.cuda.leaks() == {}
    del kept


def test_a_kernel_in_flight_is_not_unloaded() -> None:
    bench = Bench()
    x = floats(8)
    event = bench.launch(x, kernel=bench.device.load(cubin(b"flying"), "scale"))
    gc.collect()
    for image in (b"one", b"two"):
        bench.device.load(cubin(image), "scale")
    before = bench.cuda.calls.count("load_module")
    assert unloaded(bench) == before - 2  # neither the one in flight nor the one loaded last
    event.wait()
    np.testing.assert_array_equal(event.outputs["out"], 2 * x)
    del event
    bench.run(x, kernel=bench.device.load(cubin(b"three"), "scale"))
    assert unloaded(bench) == before


def test_a_kernel_whose_launch_has_no_waiter_is_not_unloaded() -> None:
    bench = Bench()
    bench.launch(floats(8), kernel=bench.device.load(cubin(b"flying"), "scale"))
    gc.collect()
    bench.device.load(cubin(b"other"), "scale")
    assert unloaded(bench) == 0
    bench.cuda.run_all()
    bench.device.close()
    assert bench.cuda.leaks() == {}


# On the emulated device


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_an_emulated_module_is_closed_with_its_last_kernel() -> None:
    source = 'extern "C" __global__ void seven(int* x) { *x = 7; }'
    module = build_module(source)
    path = module.path
    again = build_module(source)
    del module
    assert mapped(path)
    out = EmulatedBuffer(4, "out")
    again.launch("seven", 1, 1, 0, bytes(ctypes.c_uint64(out.address)), [out])
    assert out.view(np.int32)[0] == 7
    del again
    gc.collect()
    assert not mapped(path)
