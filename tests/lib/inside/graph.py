"""What tests of other rooms take from inside `graph`."""

from gpu_actors.graph.match import match_attention
from gpu_actors.graph.mha_graphs import MhaUid, TensorLayout, mha_backward_graph, mha_forward_graph
from gpu_actors.graph.modification import Modification
