"""What tests of other rooms take from inside `kernels`."""

from gpu_actors.kernels import decode_tiles, forward_sm90, merge, variants
from gpu_actors.kernels.append import AppendProblem, append_geometry, append_variant, pack_append
from gpu_actors.kernels.backward_mma import BACKWARD_MMA, query_slots
from gpu_actors.kernels.backward_sm90 import BACKWARD_SM90, sm90_backward_refuses
from gpu_actors.kernels.copy_pages import pack_page_copy, page_copy_geometry, page_copy_variant
from gpu_actors.kernels.decode_mma import (
    COMBINE,
    DECODE,
    PLAN,
    decode_keys,
    decode_layout,
    decode_packer,
    step_geometry,
    usual_decode_problems,
)
from gpu_actors.kernels.decode_schedule import splitter
from gpu_actors.kernels.decode_simple import SIMPLE, SIMPLE_COMBINE
from gpu_actors.kernels.decode_sm90 import NAME
from gpu_actors.kernels.decode_tiles import decode_tile
from gpu_actors.kernels.dispatch import FAMILIES, REFERENCE, answering_key, dispatch_key, explain, family_of, program_of
from gpu_actors.kernels.forward_sm90 import COUNTER, sm90_packer
from gpu_actors.kernels.key_checks import check_key
from gpu_actors.kernels.merge import (
    GRADIENT_TERM_FIELDS,
    TERM_FIELDS,
    MergeProblem,
    example_merge,
    merge_geometry,
    merge_gradient_geometries,
    merge_gradient_variants,
    merge_variant,
    merge_variants,
    pack_gradient_terms,
    pack_merge,
    pack_merge_gradients,
    pack_terms,
    sums_dtype,
)
from gpu_actors.kernels.occupancy import occupancy, shared_a_multiprocessor, shared_mem_limit
from gpu_actors.kernels.option_table import OPTIONS, explain_problem, option_cell, options_of
from gpu_actors.kernels.params import ParamsLayout, forward_layout, row_stats_layout, score_layout, score_packer
from gpu_actors.kernels.program import NO_VALUES, Program, Target, Values
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
from gpu_actors.kernels.variants import (
    Prepare,
    block_threads,
    kv_variants,
    standard_variants,
    usual_backward_keys,
    variant_of,
)
