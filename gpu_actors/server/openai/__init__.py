"""OpenAI's HTTP API over a context: embeddings, completions and chat completions with streaming.

    app = create_app(ServeSettings(device="cuda", models=("llama=/models/llama",)))

``gpu-actors serve`` runs it. settings: what can be set. requests, responses: the bodies. parsing: bodies to requests.
unsupported: what is refused, and which servers have it. models: what is loaded. engines: one model over several
workers. detokenizer: tokens to text. stream: server-sent events. completions, embeddings, vllm: the endpoints. errors:
errors in OpenAI's form. state: what the endpoints share. collector: metrics. app: all of it together. server: the
process.
Needs the extra "serve".
"""

from __future__ import annotations

from gpu_actors.server.openai.app import create_app
from gpu_actors.server.openai.server import Tls, serve
from gpu_actors.server.openai.settings import ServeSettings

__all__ = ["ServeSettings", "Tls", "create_app", "serve"]
