"""What tests of other rooms take from inside `cuda`."""

from gpu_actors.devices.cuda import CudaDevice, cuda_usable, device, tensor_map
from gpu_actors.devices.cuda.api import DeviceProperties, MemoryBlock
from gpu_actors.devices.cuda.errors import CudaFailure, WorkFailed
from gpu_actors.devices.cuda.host_api import (
    ILLEGAL_ADDRESS,
    HostApi,
    HostFunction,
    HostOrder,
    HostQueue,
    Operation,
    driver_call,
)
from gpu_actors.devices.cuda.null_api import NullApi
from gpu_actors.devices.cuda.operands import Operands
from gpu_actors.devices.cuda.stream import CudaStream
