"""What tests of other rooms take from inside `kernels`."""

from gpu_actors.kernels import variants
from gpu_actors.kernels.append.copy_pages import PageCopyKey, pack_page_copy, page_copy_geometry
from gpu_actors.kernels.append.params import pack_append
from gpu_actors.kernels.append.variant import AppendProblem, append_geometry, append_key
from gpu_actors.kernels.backward.launch import BACKWARD_MMA, query_slots
from gpu_actors.kernels.decode.params import decode_layout, pack_decode
from gpu_actors.kernels.decode.schedule import split_decode
from gpu_actors.kernels.decode.simple import SIMPLE, SIMPLE_COMBINE
from gpu_actors.kernels.decode.variant import (
    COMBINE,
    DECODE,
    PLAN,
    decode_keys,
    decode_tile,
    step_geometry,
    usual_decode_problems,
)
from gpu_actors.kernels.dispatch import FAMILIES, REFERENCE, answering_key, dispatch_key, explain, program_of
from gpu_actors.kernels.hopper import variant
from gpu_actors.kernels.hopper.params import COUNTER, pack_sm90
from gpu_actors.kernels.hopper_backward.launch import BACKWARD_SM90
from gpu_actors.kernels.hopper_backward.variant import sm90_backward_refuses
from gpu_actors.kernels.hopper_decode.variant import NAME
from gpu_actors.kernels.keys import check_key
from gpu_actors.kernels.merge import merge
from gpu_actors.kernels.merge.gradients import (
    GRADIENT_TERM_FIELDS,
    MergeGradientKey,
    merge_gradient_geometry,
    merge_gradient_keys,
    pack_gradient_terms,
    pack_merge_gradients,
    sums_dtype,
)
from gpu_actors.kernels.merge.merge import (
    TERM_FIELDS,
    MergeKey,
    MergeProblem,
    merge_geometry,
    merge_key,
    merge_variants,
    pack_merge,
    pack_terms,
)
from gpu_actors.kernels.occupancy import occupancy, shared_a_multiprocessor, shared_mem_limit
from gpu_actors.kernels.option_table import OPTIONS, explain_problem, option_cell, options_of
from gpu_actors.kernels.params import ParamsLayout, forward_layout
from gpu_actors.kernels.program import NO_VALUES, Program, Target, Values
from gpu_actors.kernels.row_stats import row_stats_layout
from gpu_actors.kernels.score_params import pack_score, score_layout
from gpu_actors.kernels.support import ELEMENTS, FIRST_FP8_CAPABILITY, capability, example_problem
from gpu_actors.kernels.tiles import (
    TILES,
    Tile,
    padded_backward_dims,
    padded_head_dim,
    shares_keys,
    tile_of,
    value_pieces,
)
from gpu_actors.kernels.variants import KernelKey, Prepare, block_threads, kernel_source, standard_variants
