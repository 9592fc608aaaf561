"""Failures that stay, in processes of their own: what is reported, and what every later call returns."""

from __future__ import annotations

from typing import Any

import pytest

KERNELS = r"""
source = r'''
extern "C" __global__ void store(float* x, long long i) { if (threadIdx.x == 5) x[i] = 1; }
'''
store = cupy.RawKernel(source, "store")

def fail(x, i):
    store((1,), (32,), (x, np.int64(i)))
    try:
        runtime.deviceSynchronize()
    except runtime.CUDARuntimeError as error:
        print(error.status)
    for call in (lambda: runtime.malloc(16), runtime.deviceSynchronize, lambda: runtime.streamCreate()):
        try:
            call()
        except runtime.CUDARuntimeError as error:
            print(error.status)
    print(*control.take_findings(), sep="\n")
"""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("x = cupy.zeros(128, cupy.float32); fail(x, 128)", "where nothing is allocated"),
        ("x = cupy.zeros(128, cupy.float32); fail(x, -(1 << 20))", "where nothing is allocated"),
        ("p = runtime.malloc(512); runtime.free(p); fail(np.uint64(p), 0)", "which was freed"),
        ("fail(np.uint64(0), 4)", "where nothing is allocated"),
    ],
)
def test_an_access_out_of_bounds_is_found_and_ends_the_device(in_a_process: Any, what: str, words: str) -> None:
    ended = in_a_process(KERNELS + what)
    lines = ended.stdout.splitlines()
    assert lines[:4] == ["700"] * 4, ended.stdout + ended.stderr
    assert lines[4].startswith("out_of_bounds in store, block (0, 0, 0) thread 5 (warp 0 lane 5) at cupy.cu:2: ")
    assert " at address 0x" in lines[4]
    assert words in lines[4]


def test_a_launch_fails_on_demand(in_a_process: Any) -> None:
    ended = in_a_process(KERNELS + "control.fail_launch(719); fail(cupy.zeros(64, cupy.float32), 0)")
    assert ended.stdout.splitlines()[:4] == ["719"] * 4, ended.stderr


def test_device_memory_is_no_memory_of_the_host(in_a_process: Any) -> None:
    ended = in_a_process("import ctypes; p = runtime.malloc(512); print(ctypes.string_at(p, 4))")
    assert ended.returncode == -11


def test_several_devices_have_memory_and_failures_of_their_own(in_a_process: Any) -> None:
    body = """
    print(runtime.getDeviceCount())
    with cupy.cuda.Device(1):
        x = cupy.zeros(4, cupy.float32)
        x += 2
        print(x.device.id, x.get().tolist())
        control.fail_launch(700)
        x += 2
        try:
            runtime.deviceSynchronize()
        except runtime.CUDARuntimeError as error:
            print(error.status)
    print(cupy.ones(2, cupy.float32).get().tolist())
    """
    ended = in_a_process(body, SOFTGPU_DEVICES="2")
    assert ended.stdout.splitlines() == ["2", "1 [2.0, 2.0, 2.0, 2.0]", "700", "[1.0, 1.0]"], ended.stderr


def test_a_program_with_a_hung_kernel_ends(in_a_process: Any) -> None:
    body = """
    source = 'extern "C" __global__ void hang(int* x) { while (*(volatile int*)x == 0) __nanosleep(100); }'
    x = cupy.zeros(1, cupy.int32)
    cupy.RawKernel(source, "hang")((1,), (1,), (x,))
    print("launched")
    """
    ended = in_a_process(body)
    assert (ended.returncode, ended.stdout) == (0, "launched\n"), ended.stderr


@pytest.mark.parametrize("capability", [80, 89])
def test_other_architectures_answer_requests(in_a_process: Any, capability: int) -> None:
    body = """
    import gpu_actors as ga
    from gpu_actors.reference.tolerance import check_output
    q, k, v = (np.random.default_rng(n).standard_normal((1, 64, 2, 64)).astype(np.float16) for n in range(3))
    with ga.open_context("cuda") as context:
        check_output(context.flash_attn.forward(q, k, v).result(60).out, None, q, k, v)
        print(context.info.arch)
    """
    ended = in_a_process(body, SOFTGPU_CAPABILITY=str(capability))
    assert ended.stdout.strip() == f"sm_{capability}", ended.stderr
