"""Servers around contexts: requests over HTTP, OpenAI's API, the page at /, metrics, and a context in an application.

Their public names are `gpu_actors.asgi`, `serving`, `openai_api`, `status`, `metrics` and `otel_metrics`.
"""
