"""What tests take from the inner modules that lie beside the rooms."""

from gpu_actors.clock import SystemClock
from gpu_actors.extras import cuda_hint, install_hint
from gpu_actors.fields import DTYPES, FP8, output_dtype
from gpu_actors.options import Arithmetic, Delivery, Schedule
