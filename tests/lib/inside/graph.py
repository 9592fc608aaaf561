"""What tests of other rooms take from inside `graph`."""

from gpu_actors.graph.match import match_attention
from gpu_actors.graph.modification import Modification
