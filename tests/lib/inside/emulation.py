"""What tests of other rooms take from inside `emulation`."""

from gpu_actors.devices.emulation import (
    EmulatedBuffer,
    EmulatedModule,
    EmulationFault,
    Toolchain,
    build_module,
    emulated_api,
    module_cache,
)
from gpu_actors.devices.emulation.emulated_api import EmulatedApi
from gpu_actors.devices.emulation.executor import Executor
from gpu_actors.devices.emulation.memory import PAGE, POISON, Mapping
from gpu_actors.devices.emulation.module_cache import ModuleCache
from gpu_actors.devices.emulation.tensor_map import encode_tensor_map
