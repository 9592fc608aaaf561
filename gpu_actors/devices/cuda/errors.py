"""The meaning of a CUDA status for the request and for the context.

The statuses are those of cudaError_t. Those that CuPy reports as CUresult have the same numbers.
"""

from __future__ import annotations

from gpu_actors.devices.cuda.advice import advice
from gpu_actors.errors import ContextLost, GpuActorsError, LaunchError, OutOfDeviceMemory

__all__ = ["CAPTURE_IMPLICIT", "NOT_READY", "OUT_OF_MEMORY", "STICKY", "CudaFailure", "WorkFailed", "explain"]

OUT_OF_MEMORY = 2
NOT_READY = 600
CAPTURE_IMPLICIT = 906

STICKY: dict[int, str] = {
    214: "cudaErrorECCUncorrectable",
    220: "cudaErrorNvlinkUncorrectable",
    226: "cudaErrorContained",
    700: "cudaErrorIllegalAddress",
    702: "cudaErrorLaunchTimeout",
    709: "cudaErrorContextIsDestroyed",
    710: "cudaErrorAssert",
    714: "cudaErrorHardwareStackError",
    715: "cudaErrorIllegalInstruction",
    716: "cudaErrorMisalignedAddress",
    717: "cudaErrorInvalidAddressSpace",
    718: "cudaErrorInvalidPc",
    719: "cudaErrorLaunchFailure",
    721: "cudaErrorTensorMemoryLeak",
    810: "cudaErrorMpsClientTerminated",
    911: "cudaErrorExternalDevice",
    999: "cudaErrorUnknown",
}
"""Sticky statuses: after these no answer and no memory of the device is reliable.

For most of them driver_types.h (CUDA 13.4) says that the process must be terminated and relaunched. It does not say so
for 709, whose name implies it, for 214 and 220, after which memory may have wrong bits, and for 999, an unknown error.
"""


_STARTING = ("bind", "properties", "load_module")
"""Calls that fail because of what is installed on the machine, and not because of what a program does."""


class CudaFailure(Exception):
    """A CUDA call that did not return success.

    call: the name of the call.
    detail: the driver's message.
    """

    def __init__(self, status: int, call: str, detail: str = "") -> None:
        super().__init__(status, call, detail)
        self.status = status
        self.call = call
        self.detail: str = detail or STICKY.get(status, f"status {status}")

    @property
    def sticky(self) -> bool:
        return self.status in STICKY

    def __str__(self) -> str:
        return f"{self.call} failed: {self.detail}"


class WorkFailed(CudaFailure):
    """Work before an event has failed and ended. The device still works, as the emulated one does after a fault.

    error: the error to answer the launch with.
    """

    def __init__(self, call: str, error: GpuActorsError) -> None:
        super().__init__(0, call, str(error))
        self.error: GpuActorsError = error


def explain(failure: CudaFailure) -> GpuActorsError:
    """The error to answer requests with, for a failed call."""
    if isinstance(failure, WorkFailed):
        return failure.error
    text = str(failure)
    if failure.call in _STARTING and (said := advice(failure.status)):
        text = f"{text}; {said}"
    if failure.sticky:
        return ContextLost(f"the CUDA context is gone: {text}")
    if failure.status == OUT_OF_MEMORY:
        return OutOfDeviceMemory(text)
    return LaunchError(text)
