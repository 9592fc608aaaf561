"""``gpu-actors serve``: OpenAI's HTTP API over a context."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer

from gpu_actors.cli.output import CacheDtypeOption, DeviceOption, DtypeOption
from gpu_actors.errors import InvalidRequest
from gpu_actors.options import ContextOptions
from gpu_actors.tracing import StreamedTrace

__all__ = ["serve"]

_KEYS = "GPU_ACTORS_API_KEY"


def serve(
    device: DeviceOption = "auto",
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="smollm2, tiny, minilm, FILE.gguf, DIR, or NAME= and one of these; may be given twice: "
            "one generates, one embeds."
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="numpy (Llama's family), torch (what Transformers runs, by torch), or auto: torch for a folder that "
            "numpy does not support."
        ),
    ] = "auto",
    host: Annotated[str, typer.Option(help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Clients need one of these; else of $GPU_ACTORS_API_KEY, separated by spaces."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="More of them, one a line, which no list of processes shows.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A name by which clients may call the server; *.NAME for all below it, * for all."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="A site whose pages may call the server; * for all.")
    ] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="Serve https with this certificate (PEM).")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its key, where it is a file of its own.")] = None,
    ssl_keyfile_password: Annotated[
        str | None, typer.Option(envvar="GPU_ACTORS_SSL_KEYFILE_PASSWORD", help="Of the key.")
    ] = None,
    ssl_ca_certs: Annotated[Path | None, typer.Option(help="Take only clients with a certificate of these.")] = None,
    probe_port: Annotated[
        int | None, typer.Option(help="/livez, /readyz and /metrics from a thread of their own.")
    ] = None,
    probe_host: Annotated[str, typer.Option(help="Where the probe port listens.")] = "127.0.0.1",
    workers: Annotated[
        int, typer.Option(help="Child processes with a context each; 0 is one context in this process.")
    ] = 0,
    max_running: Annotated[int, typer.Option(help="Texts generated at once.")] = 256,
    max_waiting: Annotated[int, typer.Option(help="Requests that wait; the next one gets 429.")] = 1024,
    queue_seconds: Annotated[float, typer.Option(help="A request that waits longer gets 429.")] = 30.0,
    max_per_client: Annotated[
        int | None, typer.Option(help="Requests of one key or address under way; the next gets 429.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for a request without X-Deadline-Ms.")] = 300.0,
    max_tokens: Annotated[int, typer.Option(help="New tokens where a request does not say how many.")] = 256,
    cache_mib: Annotated[int, typer.Option(help="Memory of the KV cache, of each worker.")] = 512,
    hang_seconds: Annotated[
        float | None,
        typer.Option(help="A launch or a worker without an answer for so long is lost. Default: by the device."),
    ] = None,
    dtype: DtypeOption = None,
    cache_dtype: CacheDtypeOption = None,
    leave_seconds: Annotated[float, typer.Option(help="After SIGTERM: not ready, but listening.")] = 2.0,
    drain_seconds: Annotated[float, typer.Option(help="After that: texts go on, then end with an error.")] = 20.0,
    page: Annotated[bool, typer.Option(help="A page at / that shows the context, with errors in full.")] = True,
    exit_when_dead: Annotated[
        bool, typer.Option("--exit-when-dead", help="Exit with 70 once the device is lost.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a trace of requests and steps to this file as they happen."),
    ] = None,
    log: Annotated[str, typer.Option(help="json or text, on standard error.")] = "json",
) -> None:
    """Serve OpenAI's API: /v1/completions, /v1/chat/completions, /v1/embeddings and /v1/models, and vLLM's /tokenize,
    /detokenize, /health and /version.

    Without --model it serves SmolLM2 and all-MiniLM-L6-v2 if they are installed. In place of a missing SmolLM2 it has
    a tiny Llama of random weights, whose texts are noise.
    """
    if log not in ("json", "text"):
        raise InvalidRequest("--log", log, "must be json or text")
    try:
        from gpu_actors.embedding.blas import blas_threads, limit_blas_threads
        from gpu_actors.server.openai import ServeSettings, Tls
        from gpu_actors.server.openai import serve as run
    except ModuleNotFoundError as error:
        from gpu_actors.extras import missing

        raise InvalidRequest("serve", None, missing(error, "serve")) from None
    # BLAS threads spin while they wait, which would take the CPUs from other threads. The model has its own threads.
    threads = blas_threads()
    limit_blas_threads(1)
    events = None if trace is None else StreamedTrace(trace)
    settings = ServeSettings(
        device=device,
        options=ContextOptions(hang_timeout=hang_seconds, on_event=events),
        models=tuple(model or ()),
        engine=engine,
        workers=workers,
        max_running=max_running,
        max_waiting=max_waiting,
        queue_seconds=queue_seconds,
        max_per_client=max_per_client,
        default_max_tokens=max_tokens,
        cache_mib=cache_mib,
        dtype=dtype,
        cache_dtype=cache_dtype,
        threads=threads,
        default_timeout=timeout,
        longest_timeout=max(3600.0, timeout),
        probe_host=probe_host,
        probe_port=probe_port,
        exit_when_dead=exit_when_dead,
        api_keys=_keys(api_key, api_key_file),
        allowed_hosts=tuple(allowed_host or ()),
        cors_origins=tuple(cors_origin or ()),
        page=page,
        leave_seconds=leave_seconds,
        drain_seconds=drain_seconds,
    )
    if ssl_certfile is None and (ssl_keyfile or ssl_keyfile_password or ssl_ca_certs):
        raise InvalidRequest("--ssl-certfile", None, "--ssl-certfile must be given where another --ssl option is")
    tls = None if ssl_certfile is None else Tls(ssl_certfile, ssl_keyfile, ssl_keyfile_password, ssl_ca_certs)
    with events or contextlib.nullcontext():
        run(settings, host, port, log_json=log == "json", tls=tls)


def _keys(given: list[str] | None, file: Path | None) -> tuple[str, ...]:
    """All keys. Raises `InvalidRequest` for a source without keys: the mistake would open the server to everyone."""
    keys = list(given or ())
    if (named := os.environ.get(_KEYS)) is not None and given is None:
        keys += named.split()
        if not named.strip():
            raise InvalidRequest(_KEYS, named, "must hold a key, or not be set")
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest("--api-key-file", str(file), f"is not readable: {error}") from None
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise InvalidRequest("--api-key-file", str(file), "must hold a key, one a line")
        keys += found
    return tuple(keys)
