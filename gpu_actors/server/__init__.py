"""Serves contexts: requests over HTTP, OpenAI's API, the status page at /, metrics, and a context in an application.

The public names are `gpu_actors.asgi`, `serving`, `openai_api`, `status`, `metrics` and `otel_metrics`.
"""
