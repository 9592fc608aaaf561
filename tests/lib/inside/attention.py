"""What tests of other rooms take from inside `attention`."""

from gpu_actors.attention import mha, requests
from gpu_actors.attention.key_mask import MASK_OPTIONS, KeyMask, MaskKind, MaskOptions
from gpu_actors.attention.philox import dropout_bits, dropout_keep, dropout_threshold, philox4x32
from gpu_actors.attention.problem import Layout
from gpu_actors.attention.requests import array_fields, scalars_of
from gpu_actors.attention.score_mod import SCORE_HEADER, ScoreMod
