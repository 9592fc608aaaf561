"""What tests of other rooms take from inside `generation`."""

from gpu_actors.generation.loading import installed
from gpu_actors.generation.tokenizer import ByteTokenizer, TextStream
from gpu_actors.generation.weights import tensor_names
