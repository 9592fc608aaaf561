"""``gpu-actors serve``: OpenAI's HTTP API over a context."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from gpu_actors.cli.output import DeviceOption
from gpu_actors.errors import InvalidRequest

__all__ = ["serve"]


def serve(
    device: DeviceOption = "auto",
    model: Annotated[
        list[str] | None,
        typer.Option(help="DIR, NAME=DIR, tiny or minilm; may be given twice: one generates, one embeds."),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen. There is no authentication.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
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
    dtype: Annotated[str, typer.Option(help="Of attention: float16 or bfloat16.")] = "float16",
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
    """Serve OpenAI's API: /v1/completions, /v1/chat/completions, /v1/embeddings and /v1/models.

    Without --model: a tiny Llama of random weights, whose texts are noise, and all-MiniLM-L6-v2 where it is installed.
    """
    if log not in ("json", "text"):
        raise InvalidRequest("--log", log, "must be json or text")
    try:
        from gpu_actors.embedding.blas import limit_blas_threads
        from gpu_actors.openai_api import ServeSettings
        from gpu_actors.openai_api import serve as run
    except ModuleNotFoundError as error:
        from gpu_actors.extras import missing

        raise InvalidRequest("serve", None, missing(error, "serve")) from None
    # BLAS threads that wait by spinning would take the CPUs from the server's other threads.
    limit_blas_threads(1)
    settings = ServeSettings(
        device=device,
        models=tuple(model or ()),
        workers=workers,
        max_running=max_running,
        max_waiting=max_waiting,
        queue_seconds=queue_seconds,
        max_per_client=max_per_client,
        default_max_tokens=max_tokens,
        cache_mib=cache_mib,
        dtype=dtype,
        default_timeout=timeout,
        longest_timeout=max(3600.0, timeout),
        probe_host=probe_host,
        probe_port=probe_port,
        exit_when_dead=exit_when_dead,
        page=page,
        leave_seconds=leave_seconds,
        drain_seconds=drain_seconds,
    )
    if trace is None:
        run(settings, host, port, log_json=log == "json")
        return
    from gpu_actors.tracing import StreamedTrace

    with StreamedTrace(trace) as events:
        options = dataclasses.replace(settings.options, on_event=events)
        run(dataclasses.replace(settings, options=options), host, port, log_json=log == "json")
