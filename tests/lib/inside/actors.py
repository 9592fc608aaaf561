"""What tests of other rooms take from inside `actors`."""

from gpu_actors.actors import caller_launch, context, cudnn_like, kv_moving
from gpu_actors.actors.compiled_kernel import LaunchKernel
from gpu_actors.actors.kv_cache import _KvCoalescer
from gpu_actors.actors.kv_order import KvOrder
from gpu_actors.actors.kv_store import OpenedCache
