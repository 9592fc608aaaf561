"""The CUDA device. Importing this imports no CuPy; opening a `CudaDevice` does.

device    CudaDevice, cuda_usable        api        the calls it makes of the driver
stream    launches and their events      cupy_api   those calls, through CuPy
operands  the memory of a launch         driver     how each part makes them, and when none may be made
module    loaded cubins                  memory     staging and blocks
probe     proof of progress              errors     what a status means

Only `CudaDevice` knows all parts. A part gets the `Driver`, or the `MemoryPools` over it.
"""

from __future__ import annotations

from gpu_actors.devices.cuda.device import CudaDevice, attention_obstacle, cuda_usable

__all__ = ["CudaDevice", "attention_obstacle", "cuda_usable"]
