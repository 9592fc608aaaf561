"""What makes a request sound, whatever the device: shapes, dtypes, lengths and options that agree.

Checks of what a given device or kernel can do are in `gpu_actors.kernels.support`.

Imports from no other room.
"""

from gpu_actors.validation.backward import backward_problem
from gpu_actors.validation.forward import check_cu_seqlens, check_seed, forward_problem, longest
from gpu_actors.validation.lengths import check_block_table, check_lengths
from gpu_actors.validation.overlap import check_output_memory
from gpu_actors.validation.paged import check_page_size, decode_problem, paged_problem

__all__ = [
    "backward_problem",
    "check_block_table",
    "check_cu_seqlens",
    "check_lengths",
    "check_output_memory",
    "check_page_size",
    "check_seed",
    "decode_problem",
    "forward_problem",
    "longest",
    "paged_problem",
]
