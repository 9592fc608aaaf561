"""A Llama decoder in NumPy whose attention runs through gpu_actors, with continuous batching.

config: the sizes of a model. weights: from a seed, or from a folder in Hugging Face's layout. model: the layers without
their attention. plain: the same model without the service, to compare with. tokenizer: text to tokens and back. batch:
the texts of a step. engine: the steps.
"""

from __future__ import annotations

from llama.config import LlamaConfig
from llama.engine import Engine, Generation, Settings
from llama.model import Llama
from llama.plain import plain_logits
from llama.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from llama.weights import load_weights, random_weights

__all__ = [
    "ByteTokenizer",
    "Engine",
    "Generation",
    "Llama",
    "LlamaConfig",
    "Settings",
    "Tokenizer",
    "load_tokenizer",
    "load_weights",
    "plain_logits",
    "random_weights",
]
