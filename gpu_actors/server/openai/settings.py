"""ServeSettings: everything that can be set of a server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpu_actors.fields import duration, expect, integer
from gpu_actors.options import ContextOptions
from gpu_actors.server.http.access import checked_hosts, checked_keys, checked_texts

__all__ = ["ServeSettings"]

_ENGINES = ("auto", "numpy", "torch")

# As browsers spell it, but for its case. They leave out the scheme's own port.
_SITE = r"(https?)://([a-z0-9_.-]+|\[[0-9a-f:]+\])(?::([1-9][0-9]{0,4}))?"
_OWN_PORTS = {"http": "80", "https": "443"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Sizes are bounds on one request unless they say otherwise; times are in seconds.

    workers: child processes with a context each, on the device; 0 is one context in this process.
    models: folders or GGUF files, as DIR, FILE.gguf, NAME=DIR or NAME=FILE.gguf; "smollm2" and "minilm" (installed
        models) or "tiny" (a small Llama of random weights). At most one of each kind. None given: "smollm2" where it is
        installed, else "tiny", and "minilm" where it is installed.
    engine: "numpy" computes models of Llama's family in NumPy; "torch" has Transformers run a folder's model by torch
        (extra "serve-torch"). "auto" is "numpy", and "torch" for a folder that "numpy" refuses as unsupported.
    threads: that share each product of the model (see `Llama`).
    max_running: texts that are generated at once.
    max_embedding: requests for embeddings that run at once.
    max_waiting: requests that wait for either.
    queue_seconds: how long each may wait before it is refused with 429.
    max_per_client: requests that a client may have that run, wait or are being read. None: no limit. A client is a key
        of ``api_keys``, or without them an address.
    client_weights: of clients, as `client_of` names them, if not 1. One of 2 gets twice as much while all of them
        wait.
    default_max_tokens: new tokens of a request that does not say how many.
    max_inputs: texts of a request for embeddings.
    cache_mib: memory of the KV cache, for all layers, of each worker.
    page_size: tokens of a page of it.
    dtype, cache_dtype: of attention's operands and of that cache; None as in `generation.Settings`.
    default_timeout, longest_timeout, max_body_bytes: see `Guard` and `Bodies`.
    probe_host, probe_port, exit_when_dead: see `Probes`.
    api_keys, allowed_hosts: see `Doors`.
    cors_origins: sites whose pages may call the server, as "https://example.com", or "*" for all.
    page: whether / is a page that shows the context (see `gpu_actors.asgi.routes`).
    leave_seconds: how long /readyz says that the server is leaving before it stops listening.
    drain_seconds: how long texts go on after that, before they are cut off with an error.

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
