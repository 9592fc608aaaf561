"""What tests of other rooms take from inside `devices`."""

from gpu_actors.devices import cuda, mock, select
from gpu_actors.devices.faulty import FaultyDevice
from gpu_actors.devices.forwarding import ForwardingDevice
from gpu_actors.devices.host import HostEvent
from gpu_actors.devices.interface import (
    Buffer,
    Device,
    Event,
    Kernel,
    Kernels,
    Launch,
    LaunchGeometry,
    Outputs,
    OutputSpec,
    Params,
    Step,
    Stream,
    TensorMap,
    zero_launch,
)
from gpu_actors.devices.mock import MockDevice
from gpu_actors.devices.select import choose_device
