"""Sentence embeddings with all-MiniLM-L6-v2: matrix products in NumPy, every attention through the service.

async with ga.open_context("auto") as ctx:
    embedder = await Embedder.open(ctx)
    vectors = (await embedder.embed(["a text", "another"])).vectors
"""

from __future__ import annotations

from gpu_actors.embedding.blas import limit_blas_threads
from gpu_actors.embedding.embedder import Embedded, Embedder
from gpu_actors.embedding.minilm import MiniLM
from gpu_actors.embedding.passages import Hit, Passage, rank, read_passages, split_passages
from gpu_actors.embedding.tokens import TokenBatch, Tokenizer
from gpu_actors.embedding.weights import find_weights

__all__ = [
    "Embedded",
    "Embedder",
    "Hit",
    "MiniLM",
    "Passage",
    "TokenBatch",
    "Tokenizer",
    "find_weights",
    "limit_blas_threads",
    "rank",
    "read_passages",
    "split_passages",
]
