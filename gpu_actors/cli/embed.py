"""``gpu-actors embed``: turns passages of text files into vectors, and finds the passages nearest to a query."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpu_actors.cli.output import (
    DeviceOption,
    JsonOption,
    chosen_device,
    progress_bar,
    write_json_list,
    write_note,
    write_table,
)
from gpu_actors.errors import InvalidRequest
from gpu_actors.values import cut

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gpu_actors.embedding import MiniLM, Passage, Tokenizer

__all__ = ["embed"]

PREVIEW = 160


def embed(
    files: Annotated[list[str], typer.Argument(help="UTF-8 text files; - is standard input.", metavar="FILE")],
    query: Annotated[str | None, typer.Option(help="Show the passages that are nearest to this text.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many passages a query shows.")] = 5,
    as_json: JsonOption = False,
    device: DeviceOption = "auto",
    model: Annotated[
        Path | None, typer.Option(help="Folder with model.safetensors, tokenizer.json and config.json.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto or chrome://tracing.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of attention: bfloat16 or float32. Default: bfloat16 where kernels run.")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one attention request.")] = 4096,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no summary.")] = False,
) -> None:
    """Embed the passages of text files with all-MiniLM-L6-v2, or search them with --query.

    With --json it prints a list of objects with file, line, text, heading (of the section, if the text does not begin
    with it), embedding (384 numbers, length 1) and, with --query, score.
    """
    if query is not None and not query.strip():
        raise InvalidRequest("--query", repr(query), "must hold some text")
    if trace is not None:
        _check_writable(trace)
    encoder, tokenizer, passages = _load(files, model)
    texts = [passage.embedded for passage in passages] + ([] if query is None else [query])
    vectors, summary = asyncio.run(_embed(encoder, tokenizer, texts, device, trace, dtype, batch_tokens, quiet))
    passages, vectors, scores = _select(passages, vectors, query, top)
    if as_json:
        _write_json(passages, vectors, scores)
    else:
        _write_table(passages, scores)
    if not quiet:
        write_note(summary)


def _load(files: list[str], folder: Path | None) -> tuple[MiniLM, Tokenizer, list[Passage]]:
    from gpu_actors.embedding import MiniLM, Tokenizer, find_weights
    from gpu_actors.embedding.blas import limit_blas_threads
    from gpu_actors.embedding.passages import passages_of, read_text

    # One BLAS thread for each of the embedder's own threads; see `Embedder`.
    limit_blas_threads(1)
    # Files are read before the model is loaded, so that a wrong file name fails at once.
    texts = [(file, read_text(file)) for file in files]
    path = find_weights(folder)
    model = MiniLM.load(path)
    tokenizer = Tokenizer(path, model.config.max_tokens)
    return model, tokenizer, [passage for file, text in texts for passage in passages_of(file, text, tokenizer)]


async def _embed(
    model: MiniLM,
    tokenizer: Tokenizer,
    texts: list[str],
    device: str,
    trace: Path | None,
    dtype: str | None,
    batch_tokens: int,
    quiet: bool,
) -> tuple[NDArray[np.float32], str]:
    """The vectors of the texts, and a sentence about the work."""
    from gpu_actors.context import open_context
    from gpu_actors.embedding import Embedder
    from gpu_actors.options import ContextOptions, MockOptions
    from gpu_actors.tracing import ChromeTrace

    device = chosen_device(device, quiet)
    # The weights are float32. An oracle in float64 would take longer and change no digit of a float32.
    options = ContextOptions(mock=MockOptions(dtype="float32"))
    async with contextlib.AsyncExitStack() as stack:
        if trace is not None:
            options = dataclasses.replace(options, on_event=await stack.enter_async_context(ChromeTrace(trace)))
        progress = stack.enter_context(progress_bar(quiet=quiet))
        task = progress.add_task("embedding", total=len(texts), rate="")
        done_tokens = 0

        def advance(batch_texts: int, batch_tokens: int) -> None:
            nonlocal done_tokens
            done_tokens += batch_tokens
            rate = done_tokens / (time.perf_counter() - start)
            progress.update(task, advance=batch_texts, rate=f"{rate:,.0f} tokens/s")

        async with open_context(device, options) as context:
            embedder = Embedder(context, model, tokenizer, batch_tokens=batch_tokens, dtype=dtype)
            start = time.perf_counter()
            vectors, tokens, _ = await embedder.embed(texts, progress=advance)
            seconds = time.perf_counter() - start
            return vectors, (
                f"{len(texts)} texts, {tokens.sum()} tokens in {seconds:.2f} s: {len(texts) / seconds:.0f} texts/s, "
                f"{tokens.sum() / seconds:.0f} tokens/s, attention in {embedder.dtype} on {context.info.name}"
            )


def _check_writable(trace: Path) -> None:
    """Open the file now, so that a wrong path fails before minutes of work."""
    if not trace.parent.is_dir():
        raise InvalidRequest("--trace", str(trace), "must lie in a folder that exists")
    try:
        there = trace.exists()
        trace.open("ab").close()
        if not there:
            trace.unlink()
        elif trace.is_file() and not os.access(trace.resolve().parent, os.W_OK):
            raise InvalidRequest("--trace", str(trace), "must lie in a folder that takes new files")
    except OSError as error:
        raise InvalidRequest("--trace", str(trace), f"cannot be written: {error.strerror or error}") from None


def _select(
    passages: list[Passage], vectors: NDArray[np.float32], query: str | None, top: int
) -> tuple[list[Passage], NDArray[np.float32], list[float] | None]:
    """The passages to show: all in order, or the best ones and their scores."""
    if query is None:
        return passages, vectors, None
    from gpu_actors.embedding import rank

    hits = rank(vectors[-1], vectors[:-1], top)
    rows = [hit.index for hit in hits]
    return [passages[row] for row in rows], vectors[rows], [hit.score for hit in hits]


def _write_json(passages: list[Passage], vectors: NDArray[np.float32], scores: list[float] | None) -> None:
    def item(index: int) -> dict[str, Any]:
        passage = passages[index]
        # Nine digits restore every float32 exactly, and are half as long as the digits of a float64.
        embedding = [float(f"{value:.9g}") for value in vectors[index].tolist()]
        shown: dict[str, Any] = dataclasses.asdict(passage)
        if scores is not None:
            shown["score"] = round(scores[index], 6)
        return shown | {"embedding": embedding}

    write_json_list(item(index) for index in range(len(passages)))


def _write_table(passages: list[Passage], scores: list[float] | None) -> None:
    places = [f"{passage.file}:{passage.line}" for passage in passages]
    texts = [cut(" ".join(passage.embedded.split()), PREVIEW) for passage in passages]
    if scores is None:
        write_table(("passage", "text"), zip(places, texts, strict=True))
    else:
        write_table(("score", "passage", "text"), zip(scores, places, texts, strict=True))
