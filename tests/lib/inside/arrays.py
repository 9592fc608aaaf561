"""What tests of other rooms take from inside `arrays`."""

from gpu_actors.arrays.adopt import CallerNotes, adopt, caller_streams, check_output, restore
from gpu_actors.arrays.device_array import DeviceArray, Joined
from gpu_actors.arrays.dlpack import contiguous_strides
