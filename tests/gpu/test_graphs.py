"""Kernels in CUDA graphs: the service's launches can be captured and replayed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases.gpu_candidates import REPEATABLE, Candidate
from inside.arrays import adopt
from inside.bench import RecordingContext
from inside.cuda import CudaDevice, CudaStream, Operands

from gpu_actors import ContextOptions
from gpu_actors.errors import Unsupported

pytestmark = pytest.mark.gpu

# A few forward candidates are enough; each of the others has another kernel.
_FORWARD = [candidate for candidate in REPEATABLE if candidate.name.startswith("forward")]
REPLAYED = [*_FORWARD[::5], *(candidate for candidate in REPEATABLE if candidate not in _FORWARD)]


def on_device(array: Any) -> Any:
    import cupy

    bits = cupy.asarray(np.ascontiguousarray(array).view(f"u{array.itemsize}"))
    return adopt(bits, "array").array.view(array.dtype)


@pytest.mark.parametrize("candidate", REPLAYED, ids=str)
def test_a_captured_launch_gives_the_same_bits_when_it_is_replayed(candidate: Candidate) -> None:
    import cupy
    from cupy.cuda import runtime

    asked = candidate.make()
    opening = RecordingContext("cuda", ContextOptions(qualify="off"))
    with opening as context:
        if not candidate.runs_on(context.info.arch):
            pytest.skip(f"{context.info.arch} is below compute capability {candidate.first / 10}")
        try:
            with opening.recorder.recording() as launches:
                answer = context.flash_attn.submit(asked.request).result(120)
        except Unsupported:
            pytest.skip("no kernel takes it")
        (launch,) = launches
        device = opening.recorder.inner
        assert isinstance(device, CudaDevice)
        stream = device.open_stream("capture")
        assert isinstance(stream, CudaStream)
        assert stream.handle is not None
        # Operands must stay in place as long as the graph is replayed.
        launch.inputs = {name: on_device(array) for name, array in launch.inputs.items()}
        placement = stream._placement(launch)
        memory = stream._take_memory((placement.pieces, placement.armed_pieces))
        operands = Operands(device.memory, launch, placement, memory)
        runtime.deviceSynchronize()
        for function, geometry, _ in operands.bound.kernels:
            function.prepare(device.driver.api, geometry.shared_bytes)
        runtime.streamBeginCapture(stream.handle, runtime.streamCaptureModeRelaxed)
        operands.upload(device.driver.api, stream.handle)
        operands.launch(device.driver.api, stream.handle)
        graph = runtime.streamEndCapture(stream.handle)
        replay = runtime.graphInstantiate(graph)
        out = operands.results()[answer._fields[0]]
        memory = cupy.cuda.UnownedMemory(out.address, out.nbytes, out, out.device)
        bits = cupy.ndarray((out.nbytes,), np.uint8, cupy.cuda.MemoryPointer(memory, 0))
        for _ in range(3):
            bits.data.memset(0xFF, bits.nbytes)
            runtime.deviceSynchronize()
            runtime.graphLaunch(replay, stream.handle)
            runtime.streamSynchronize(stream.handle)
            assert cupy.asnumpy(bits).tobytes() == np.asarray(answer[0]).tobytes()
        runtime.graphExecDestroy(replay)
        runtime.graphDestroy(graph)
        operands.release()
