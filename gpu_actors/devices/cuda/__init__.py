"""The CUDA device. Importing this package does not import CuPy; opening a `CudaDevice` does.

device    CudaDevice, cuda_usable        api        the driver calls that it makes
stream    launches and their events      cupy_api   those calls, through CuPy
operands  the memory of a launch         host_api   streams, events and graphs without a GPU
module    loaded cubins                  null_api   calls that do nothing, to measure the host
probe     proof of progress              driver     how each part makes calls, and when none may be made
memory    staging and blocks             errors     what a status means
                                         advice     what to do about one

The emulated device is a `CudaDevice` too, over `emulation.EmulatedApi`.

Only `CudaDevice` knows all parts. Each part gets the `Driver`, or the `MemoryPools`, which have the `Driver`.
"""

from __future__ import annotations

from gpu_actors.devices.cuda.device import CudaDevice, attention_obstacle, cuda_usable

__all__ = ["CudaDevice", "attention_obstacle", "cuda_usable"]
