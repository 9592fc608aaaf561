"""What tests of other rooms take from inside `reference`."""

from gpu_actors.reference.append import append_rows, appended_rows, cast_saturating, copy_pages
from gpu_actors.reference.arguments import Arguments, pose
from gpu_actors.reference.backward import GradientSums, GradientTile, Incoming, gradient_tiles
from gpu_actors.reference.cache_tolerance import assert_rows_close, assert_same_bits
from gpu_actors.reference.forward import attention_forward, identity, visible_keys
from gpu_actors.reference.gradient_tolerance import gradient_row_bound
from gpu_actors.reference.graph import evaluate_graph, record
from gpu_actors.reference.low_precision import intermediate_dtype, rounder
from gpu_actors.reference.merge_tolerance import assert_merge_close, assert_merge_gradients_close
from gpu_actors.reference.rope import apply_rope, rope_angles
from gpu_actors.reference.tolerance import COMPUTE, UNIT_ROUNDOFF, compare, round_inputs, row_bound
