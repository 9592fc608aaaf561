"""What tests of other rooms take from inside `compiling`."""

from gpu_actors.compiling import cubin_cache, cubin_folder, toolchain
from gpu_actors.compiling.assets import asset_headers, asset_text, asset_texts, kernel_file
from gpu_actors.compiling.compiler import Compiler, supported_archs
from gpu_actors.compiling.elf import parameter_sizes
from gpu_actors.compiling.signature import kernel_signature
from gpu_actors.compiling.source import exact_arch, parse_resources
from gpu_actors.compiling.toolchain import Toolchain, find_toolchain, load_nvrtc
from gpu_actors.compiling.variant import Variant
