"""OpenAI's HTTP API over a context: embeddings, completions and chat completions with streaming.

    app = create_app(ServeSettings(device="cuda", models=("llama=/models/llama",)))

``gpu-actors serve`` runs it. Needs the extra "serve".
"""

from __future__ import annotations

from gpu_actors.server.openai.app import create_app
from gpu_actors.server.openai.server import Tls, serve
from gpu_actors.server.openai.settings import ServeSettings

__all__ = ["ServeSettings", "Tls", "create_app", "serve"]
