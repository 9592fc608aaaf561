"""CupyApi without a GPU: every call exists in CuPy with these arguments, and its errors are translated."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import cupy
import pytest

from gpu_actors.devices.cuda import cupy_api
from gpu_actors.devices.cuda.api import CudaApi
from gpu_actors.devices.cuda.cupy_api import CupyApi
from gpu_actors.devices.cuda.errors import CudaFailure


class Recorder:
    """A module of CuPy whose functions are checked against the signature in their docstring, and not run."""

    def __init__(self, module: ModuleType, answers: dict[str, Any]) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._module = module
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._module, name)
        if isinstance(real, int | type):
            return real
        match = re.match(rf"{name}\((.*)\)", real.__doc__)
        assert match is not None, f"{name} shows no signature"
        parameters = [parameter for parameter in match[1].split(", ") if parameter]
        required = [parameter for parameter in parameters if "=" not in parameter]

        def call(*args: Any) -> Any:
            assert len(required) <= len(args) <= len(parameters), f"{name}({', '.join(parameters)}) given {args}"
            self.calls.append((name, args))
            answer = self._answers.get(name, 77)
            return answer(*args) if callable(answer) else answer

        return call


@pytest.fixture
def answers() -> dict[str, Any]:
    return {}


@pytest.fixture
def calls(answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    runtime, driver = Recorder(cupy.cuda.runtime, answers), Recorder(cupy.cuda.driver, answers)
    monkeypatch.setattr(cupy_api, "runtime", runtime)
    monkeypatch.setattr(cupy_api, "driver", driver)
    return lambda: runtime.calls + driver.calls


CALLS = [  # a call of CupyApi, and the call of CuPy that it makes
    ("bind", (), "setDevice", (3,)),
    ("allocate_pinned", (4096,), "hostAlloc", (4096, 1)),
    ("free_pinned", (1,), "freeHost", (1,)),
    ("create_stream", (), "streamCreateWithFlags", (1,)),
    ("copy_to_device", (11, 12, 13, 14), "memcpyAsync", (11, 12, 13, 1, 14)),
    ("copy_to_host", (21, 22, 23, 24), "memcpyAsync", (21, 22, 23, 2, 24)),
    ("fill", (31, 32, 33, 34), "memsetAsync", (31, 32, 33, 34)),
    ("create_event", (), "eventCreateWithFlags", (1 | 2,)),
    ("record_event", (41, 42), "eventRecord", (41, 42)),
    ("synchronize_event", (43,), "eventSynchronize", (43,)),
    ("wait_event", (44, 45), "streamWaitEvent", (44, 45)),
    ("destroy_event", (46,), "eventDestroy", (46,)),
    ("destroy_stream", (47,), "streamDestroy", (47,)),
    ("load_module", (b"cubin",), "moduleLoadData", (b"cubin",)),
    ("get_function", (51, "name"), "moduleGetFunction", (51, "name")),
    ("allow_shared_memory", (52, 53), "funcSetAttribute", (52, 8, 53)),
    ("unload_module", (54,), "moduleUnload", (54,)),
]


@pytest.mark.parametrize(("call", "given", "name", "passed"), CALLS)
def test_each_call_is_one_call_of_cupy_with_its_arguments_in_order(
    calls: Callable[[], list[Any]], call: str, given: tuple[Any, ...], name: str, passed: tuple[Any, ...]
) -> None:
    answer = getattr(CupyApi(3), call)(*given)
    assert calls() == [(name, passed)]
    if call.startswith(("allocate", "create", "load", "get")):
        assert answer == 77


def test_the_kernels_parameter_is_the_struct_itself_aligned_for_a_tensor_map(
    answers: dict[str, Any], calls: Callable[[], list[Any]]
) -> None:
    params = bytes(range(200))
    seen = []

    def launch(*args: int) -> None:
        address = ctypes.c_void_p.from_address(args[9]).value
        assert address is not None
        seen.append((args[:9], address % 64, ctypes.string_at(address, len(params)), args[10]))

    answers["launchKernel"] = launch
    CupyApi(0).launch_kernel(5, (1, 2, 3), (4, 5, 6), 7, 8, params)
    assert seen == [((5, 1, 2, 3, 4, 5, 6, 7, 8), 0, params, 0)]


def test_each_of_several_parameters_is_passed_by_an_address_of_its_own(
    answers: dict[str, Any], calls: Callable[[], list[Any]]
) -> None:
    seen: list[Any] = []

    def launch(*args: int) -> None:
        addresses = [ctypes.c_void_p.from_address(args[9] + 8 * place).value for place in range(3)]
        for address, nbytes in zip(addresses, (4, 100, 1), strict=True):
            assert address is not None
            seen.append((address % 64, ctypes.string_at(address, nbytes)))

    answers["launchKernel"] = launch
    CupyApi(0).launch_kernel(5, (1, 1, 1), (1, 1, 1), 0, 8, (b"abcd", bytes(range(100)), b"z"))
    assert seen == [(0, b"abcd"), (0, bytes(range(100))), (0, b"z")]
    seen.clear()
    answers["launchKernel"] = lambda *args: seen.append(args[0])
    CupyApi(0).launch_kernel(5, (1, 1, 1), (1, 1, 1), 0, 8, ())
    assert seen == [5]


@pytest.mark.parametrize(("status", "done"), [(0, True), (600, False)])
def test_an_events_status_tells_whether_it_is_over(
    answers: dict[str, Any], calls: Callable[[], list[Any]], status: int, done: bool
) -> None:
    answers["eventQuery"] = status
    assert CupyApi(0).event_done(9) is done
    assert calls() == [("eventQuery", (9,))]


def test_an_events_error_is_raised(answers: dict[str, Any], calls: Callable[[], list[Any]]) -> None:
    answers["eventQuery"] = 700
    answers["check_status"] = cupy.cuda.runtime.check_status
    with pytest.raises(CudaFailure, match="event_done failed: cudaErrorIllegalAddress") as caught:
        CupyApi(0).event_done(9)
    assert caught.value.status == 700
    assert caught.value.sticky


@pytest.mark.parametrize("status", [0, 1, 2, 700])
def test_a_capture_that_an_error_has_invalidated_is_one_until_it_ends(
    answers: dict[str, Any], calls: Callable[[], list[Any]], status: int
) -> None:
    def answer(stream: int) -> bool:
        if status == 700:
            cupy.cuda.runtime.check_status(status)
        if status == 2:  # as CuPy 13 and 14 do for cudaStreamCaptureStatusInvalidated
            raise RuntimeError("the stream was capturing, but an error has invalidated the capture sequence")
        return bool(status)

    answers["streamIsCapturing"] = answer
    if status == 700:
        with pytest.raises(CudaFailure, match="is_capturing failed: cudaErrorIllegalAddress"):
            CupyApi(0).is_capturing(9)
    else:
        assert CupyApi(0).is_capturing(9) is (status != 0)


def test_what_cupy_raises_becomes_a_failure_with_its_status(
    answers: dict[str, Any], calls: Callable[[], list[Any]]
) -> None:
    def refuse(*args: Any) -> None:
        cupy.cuda.runtime.check_status(719)

    answers["memcpyAsync"] = refuse
    with pytest.raises(CudaFailure, match="copy_to_device failed: cudaErrorLaunchFailure") as caught:
        CupyApi(0).copy_to_device(1, 2, 3, 4)
    assert caught.value.status == 719


def test_a_pool_gives_blocks_until_it_is_full_and_takes_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pointer:
        ptr = 4096

    class Pool:
        def malloc(self, nbytes: int) -> Pointer:
            if nbytes > 100:
                raise cupy.cuda.memory.OutOfMemoryError(nbytes, 0, 0)
            pointers.append(weakref.ref(pointer := Pointer()))
            return pointer

    pointers: list[Any] = []
    api = CupyApi(0)
    monkeypatch.setattr(api, "_pool", Pool())
    with pytest.raises(CudaFailure) as caught:
        api.allocate(101)
    assert caught.value.status == 2
    block = api.allocate(100)
    assert block.address == 4096
    assert pointers[0]() is not None
    api.free(block)
    assert pointers[0]() is None


def test_properties_are_read_from_what_cupy_gives(answers: dict[str, Any], calls: Callable[[], list[Any]]) -> None:
    raw = {"name": b"NVIDIA H200", "major": 9, "minor": 0, "totalGlobalMem": 1 << 37, "multiProcessorCount": 132}
    answers["getDeviceProperties"] = {**raw, "uuid": b"\x01\xab"}
    answers["driverGetVersion"] = 13040
    assert CupyApi(0).properties() == ("NVIDIA H200", 90, 1 << 37, 132, "01ab", "13040")


def test_every_call_of_the_seam_is_there() -> None:
    expected = {name for name in vars(CudaApi) if not name.startswith("_")}
    assert expected <= set(dir(CupyApi))
    api: CudaApi = CupyApi(0)
    assert api is not None


def test_importing_the_device_imports_no_gpu_library() -> None:
    code = (
        "import sys, gpu_actors, gpu_actors.devices.cuda;"
        "print([name for name in ('cupy', 'torch', 'jax') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
