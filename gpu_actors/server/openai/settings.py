"""ServeSettings: all settings of a server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpu_actors.fields import duration, expect, integer
from gpu_actors.options import ContextOptions
from gpu_actors.server.http.access import checked_hosts, checked_keys, checked_texts

__all__ = ["ServeSettings"]

_ENGINES = ("auto", "numpy", "torch")

# An origin as browsers write it, in lower case. Browsers leave out the scheme's own port.
_SITE = r"(https?)://([a-z0-9_.-]+|\[[0-9a-f:]+\])(?::([1-9][0-9]{0,4}))?"
_OWN_PORTS = {"http": "80", "https": "443"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The settings of a server. Sizes bound one request unless they say otherwise; times are in seconds.

    workers: child processes, each with a context on the device; 0 is one context in this process.
    models: folders or GGUF files, as DIR, FILE.gguf, NAME=DIR or NAME=FILE.gguf; "smollm2" and "minilm" (installed
        models) or "tiny" (a small Llama of random weights). At most one that generates and one that embeds. Default:
        "smollm2" if it is installed, else "tiny", and "minilm" if it is installed.
    engine: "numpy" computes models of Llama's family in NumPy; "torch" runs a folder's model by Transformers and torch
        (extra "serve-torch"). "auto" is "numpy", or "torch" for a folder that "numpy" refuses as unsupported.
    threads: how many threads share each product of the model (see `Llama`).
    max_running: the most texts that are generated at once.
    max_embedding: the most requests for embeddings that run at once.
    max_waiting: the most requests that wait for a text, and the most that wait for embeddings.
    queue_seconds: how long a request may wait before it is refused with 429.
    max_per_client: the most requests of one client that run, wait or are being read. None: no limit. A client is a key
        of ``api_keys``, or an address if there are no keys.
    client_weights: by client name (see `client_of`); 1 for absent ones. A client of weight 2 gets twice the share of a
        client of weight 1 while both wait.
    default_max_tokens: the most new tokens of a request that sets no limit.
    max_inputs: the most texts of a request for embeddings.
    cache_mib: MiB of each worker's KV cache, for all layers.
    page_size: tokens per page of the KV cache.
    dtype, cache_dtype: of attention's operands and of the KV cache; None as in `generation.Settings`.
    default_timeout, longest_timeout, max_body_bytes: see `Guard` and `Bodies`.
    probe_host, probe_port, exit_when_dead: see `Probes`.
    api_keys, allowed_hosts: see `Doors`.
    cors_origins: sites whose pages may call the server, as "https://example.com", or "*" for all.
    page: whether / shows a page about the context (see `gpu_actors.asgi.routes`).
    leave_seconds: how long /readyz says "draining" before the server stops listening.
    drain_seconds: how long texts go on after the server stops listening. Then they end with an error.

    Raises `InvalidRequest` for a value out of its range.
    """

    device: str = "auto"
    options: ContextOptions = field(default_factory=ContextOptions)
    workers: int = 0
    models: tuple[str, ...] = ()
    engine: str = "auto"
    max_running: int = 256
    max_embedding: int = 4
    max_waiting: int = 1024
    queue_seconds: float = 30.0
    max_per_client: int | None = None
    client_weights: Mapping[str, float] = field(default_factory=dict)
    default_max_tokens: int = 256
    max_inputs: int = 256
    cache_mib: int = 512
    page_size: int = 16
    dtype: str | None = None
    cache_dtype: str | None = None
    threads: int = 1
    max_body_bytes: int = 4 << 20
    default_timeout: float = 300.0
    longest_timeout: float = 3600.0
    probe_host: str = "127.0.0.1"
    probe_port: int | None = None
    exit_when_dead: bool = False
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    page: bool = True
    leave_seconds: float = 2.0
    drain_seconds: float = 20.0

    def __post_init__(self) -> None:
        counts = ("max_running", "max_embedding", "threads", "default_max_tokens", "max_inputs")
        for name in (*counts, "cache_mib", "page_size", "max_body_bytes"):
            integer(name, getattr(self, name), 1)
        for name in ("max_waiting", "workers"):
            integer(name, getattr(self, name), 0)
        if self.max_per_client is not None:
            integer("max_per_client", self.max_per_client, 1)
        checked_keys("api_keys", self.api_keys)
        checked_hosts("allowed_hosts", self.allowed_hosts)
        checked_texts("models", self.models)
        expect(self.engine in _ENGINES, "engine", self.engine, f"must be {', '.join(_ENGINES)}")
        for origin in checked_texts("cors_origins", self.cors_origins):
            site = re.fullmatch(_SITE, origin.lower())
            sound = site is not None and site[3] != _OWN_PORTS[site[1]] and int(site[3] or 1) < 1 << 16
            reason = (
                'must be a scheme, a host and a port that is not the scheme\'s own, as "https://example.com", or "*"'
            )
            expect(sound or origin == "*", "cors_origins", origin, reason)
        for name in ("queue_seconds", "leave_seconds", "drain_seconds"):
            duration(name, getattr(self, name))
