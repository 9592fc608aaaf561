"""What tests take from the inner modules that lie beside the rooms."""

from gpu_actors.attention.key_mask import MASK_OPTIONS, KeyMask, MaskKind, MaskOptions
from gpu_actors.attention.philox import dropout_bits, dropout_keep, dropout_threshold, philox4x32
from gpu_actors.attention.problem import Layout
from gpu_actors.attention.requests import scalars_of
from gpu_actors.attention.score_mod import SCORE_HEADER, ScoreMod
from gpu_actors.clock import SystemClock
from gpu_actors.compiled_kernel import LaunchKernel
from gpu_actors.extras import cuda_hint, install_hint
from gpu_actors.options import Arithmetic, Delivery, Schedule
from gpu_actors.values import StableText
