"""What tests of other rooms take from inside `planning`."""

from gpu_actors.planning import cached, tma_eligibility
from gpu_actors.planning.append_rows import NewRows
from gpu_actors.planning.backward import backward_plan, bind_backward
from gpu_actors.planning.block_masks import masked_problem
from gpu_actors.planning.cached import cached_problem
from gpu_actors.planning.cascade import prefix_problem, tail_problem
from gpu_actors.planning.forward import attention_output
from gpu_actors.planning.kernel_store import KernelStore
from gpu_actors.planning.merging import join, joining_kind, merge, merge_key
