"""A Llama decoder in NumPy whose attention runs through the service, with continuous batching.

async with Engine.open(ctx, Llama(config, weights), Settings()) as engine:
    async for token in engine.submit(prompt, max_new_tokens=32):
        ...

torch_engine has the same interface for a model that Transformers runs with torch; no other module imports torch.
"""

from __future__ import annotations

from gpu_actors.generation.chat import Chat, ChatTemplate, PlainChat, chat_template_of, load_chat_template
from gpu_actors.generation.config import LlamaConfig
from gpu_actors.generation.engine import Engine, Settings
from gpu_actors.generation.generation import Generation
from gpu_actors.generation.gguf import GgufFile
from gpu_actors.generation.interface import EngineStats
from gpu_actors.generation.loading import RANDOM, LoadedModel, default_model, load_model, with_blocks
from gpu_actors.generation.model import Llama, plain_logits
from gpu_actors.generation.sampling import Sampling, TokenScores
from gpu_actors.generation.stops import StopStrings
from gpu_actors.generation.tokenizer import (
    ByteTokenizer,
    FolderTokenizer,
    TextStream,
    Tokenizer,
    ended_by,
    load_tokenizer,
)
from gpu_actors.generation.weights import load_weights, random_weights

__all__ = [
    "RANDOM",
    "ByteTokenizer",
    "Chat",
    "ChatTemplate",
    "Engine",
    "EngineStats",
    "FolderTokenizer",
    "Generation",
    "GgufFile",
    "Llama",
    "LlamaConfig",
    "LoadedModel",
    "PlainChat",
    "Sampling",
    "Settings",
    "StopStrings",
    "TextStream",
    "TokenScores",
    "Tokenizer",
    "chat_template_of",
    "default_model",
    "ended_by",
    "load_chat_template",
    "load_model",
    "load_tokenizer",
    "load_weights",
    "plain_logits",
    "random_weights",
    "with_blocks",
]
