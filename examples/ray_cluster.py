"""Embed a folder of text over the workers of a Ray cluster, then generate a text whose keys lie on all of them.

    python examples/ray_cluster.py docs                                           one machine: two mock devices
    python examples/ray_cluster.py docs --address auto --device auto --workers 8  a cluster: a GPU for each worker

Each worker embeds its share of the passages with all-MiniLM-L6-v2, in one call beside its context. Then a tiny Llama
with random weights, in NumPy in this process, generates from the passage that answers --query best. The cache of each
layer is dealt out over the workers, and every step asks all of them. The logits of every step are compared with those
of the model in NumPy alone. Needs the extras "demo" and "ray".
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import gpu_actors as ga
from gpu_actors.distributed import ContextPool, ShardedKvCache
from gpu_actors.extras import missing
from gpu_actors.generation import ByteTokenizer, Llama, LlamaConfig, plain_logits, random_weights
from gpu_actors.remote import RemoteContext

try:
    import ray

    from gpu_actors.embedding import Embedder, Passage, Tokenizer, find_weights, rank, read_passages
    from gpu_actors.interop.ray import ray_pool
except ModuleNotFoundError as error:
    raise SystemExit(missing(error, "ray" if (error.name or "").partition(".")[0] == "ray" else "demo")) from None

__all__ = ["Generated", "embed", "generate", "main"]

_SUFFIXES = (".md", ".rst", ".txt")


class Generated(NamedTuple):
    """tokens: of the text. drift: the largest difference of a logit from the model's in NumPy alone."""

    tokens: list[int]
    drift: float


async def embed(pool: ContextPool, texts: list[str], weights: str | None = None) -> np.ndarray[Any, Any]:
    """Unit vectors, (texts, 384) float32: a share of the texts on each worker.

    If a worker is lost, another one takes its share, because embedding has no state.
    """
    shares = np.array_split(np.array(texts, object), len(pool.workers))

    async def ask(share: list[str]) -> Any:
        return await pool.ask(lambda ctx: _remote(ctx).run(_embed, share, weights), repeatable=True)

    return np.concatenate(await asyncio.gather(*(ask(list(share)) for share in shares)))


def _remote(ctx: ga.GpuContext) -> RemoteContext:
    assert isinstance(ctx, RemoteContext)
    return ctx


async def _embed(ctx: ga.GpuContext, texts: list[str], weights: str | None) -> np.ndarray[Any, Any]:
    """Embed in the worker."""
    embedder = await Embedder.open(ctx, weights)
    return (await embedder.embed(texts)).vectors


async def generate(pool: ContextPool, model: Llama, prompt: list[int], count: int) -> Generated:
    """The ``count`` most likely tokens that follow a prompt. Keys and values lie on all workers of the pool."""
    config = model.config
    rows = len(prompt) + count
    cache = ShardedKvCache(
        pool,
        num_blocks=config.layers * (rows // 8 + 2),
        page_size=8,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype="float32",
    )
    tokens, written, drift = list(prompt), 0, 0.0
    async with cache:
        sequences = [await cache.create() for _ in range(config.layers)]
        while len(tokens) < rows:
            x = model.embed(np.array(tokens[written:]))
            for layer, sequence in enumerate(sequences):
                q, k, v = model.before_attention(layer, x)
                q, k = _turned(q, written, config), _turned(k, written, config)
                attended = await cache.attend(q, sequence, k=k, v=v)
                x = model.after_attention(layer, x, np.asarray(attended.out))
            logits = model.logits(x)[-1]
            drift = max(drift, float(np.abs(logits - plain_logits(model, np.array(tokens))[-1]).max()))
            written = len(tokens)
            tokens.append(int(logits.argmax()))
    return Generated(tokens[len(prompt) :], drift)


def _turned(heads: Any, first: int, config: LlamaConfig) -> Any:
    """The rotary embedding of rows from position ``first`` on: columns i and i + head_dim / 2 are a pair."""
    angles = np.arange(first, first + len(heads))[:, None, None] * np.array(config.inv_freq)
    low, high = np.split(heads, 2, axis=-1)
    turned = [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)]
    return np.concatenate(turned, axis=-1, dtype=np.float32)


def _passages(folder: Path, weights: str | None) -> list[Passage]:
    tokenizer = Tokenizer(find_weights(weights))
    files = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    return [passage for path in files for passage in read_passages(str(path), tokenizer)]


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def run(options: argparse.Namespace) -> float:
    """Embed, then generate, and print the results. Returns the drift."""
    passages = _passages(options.folder, options.weights)
    if not passages:
        raise SystemExit(f"{options.folder} has no text: *{', *'.join(_SUFFIXES)}")
    opening = ray_pool(
        options.workers, device=options.device, strategy=options.strategy, start_timeout=options.start_timeout
    )
    async with opening as pool:
        places = ", ".join(f"{name} on {context.info.name}" for name, context in pool.workers.items())
        _say(f"{len(pool.workers)} workers: {places}")
        began = time.perf_counter()
        vectors = await embed(pool, [options.query, *(passage.text for passage in passages)], options.weights)
        _say(f"{len(passages)} passages embedded in {time.perf_counter() - began:.1f} s")
        hits = rank(vectors[0], vectors[1:], 3)
        for hit in hits:
            best = passages[hit.index]
            _say(f"  {hit.score:.3f}  {best.file}:{best.line}  {best.text.splitlines()[0][:70]}")
        model = Llama(LlamaConfig.tiny(), random_weights(LlamaConfig.tiny()))
        prompt = [256, *ByteTokenizer().encode(passages[hits[0].index].text)[:200]]
        began = time.perf_counter()
        made = await generate(pool, model, prompt, options.tokens)
        seconds = time.perf_counter() - began
        shown = bytes(token for token in made.tokens if token < 256)
        _say(f"{options.tokens} tokens after {len(prompt)} of the best passage in {seconds:.1f} s: {shown!r}")
        _say(f"keys of both layers on {len(pool.workers)} workers; largest difference of a logit: {made.drift:.1e}")
    return made.drift


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help=f"of texts: {', '.join(_SUFFIXES)}")
    parser.add_argument("--address", help="of a Ray cluster, such as auto; none starts Ray on this machine")
    parser.add_argument("--device", default="mock", help="of each worker: mock, emulated, auto or cuda:0")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--strategy", default="PACK", help="of the placement group: SPREAD for one worker a machine")
    parser.add_argument("--start-timeout", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--query", default="what happens when a worker is lost?")
    parser.add_argument("--tokens", type=int, default=16, help="to generate")
    parser.add_argument("--weights", help="folder of a sentence encoder, on every machine")
    options = parser.parse_args(arguments)
    started = not ray.is_initialized()
    if started and options.address:
        ray.init(address=options.address)
    elif started:
        ray.init(num_cpus=options.workers, include_dashboard=False, object_store_memory=256 << 20)
    try:
        asyncio.run(run(options))
    except ga.GpuActorsError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    finally:
        if started:
            ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
