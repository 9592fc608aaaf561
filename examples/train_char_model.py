"""Train a tiny character transformer on this repository's own text, every attention through gpu_actors.

    pip install -e ".[demo]"
    python examples/train_char_model.py                    # a minute or two without a GPU
    python examples/train_char_model.py --device cuda --steps 2000

The model and its optimiser are NumPy (`char_model.py`). Attention, grouped-query with ALiBi in bfloat16, is a request,
forward and backward. The run ends with a loss curve (a PNG, if matplotlib is installed) and a text that the model
continues from a paged cache, a character at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from char_model import AdamW, Array, Attention, AttentionGradient, Model, Settings, Tokens

import gpu_actors as ga
from gpu_actors.extras import install_hint, missing

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
except ModuleNotFoundError as error:
    raise SystemExit(missing(error, "demo")) from None

__all__ = ["Corpus", "Memory", "ServiceAttention", "continue_text", "main", "read", "save_curve", "train"]

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = 16
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


class Corpus:
    """The text to learn, one index a character. Characters outside ASCII are left out."""

    def __init__(self, text: str) -> None:
        kept = [character for character in text if character.isascii()]
        self.alphabet = sorted(set(kept))
        self._index = {character: index for index, character in enumerate(self.alphabet)}
        self.tokens = self.encode("".join(kept))

    @classmethod
    def of_repository(cls, root: Path = REPOSITORY) -> Corpus:
        """The documentation and the package's sources."""
        files = [root / "README.md", *sorted(root.glob("docs/*.md")), *sorted(root.glob("gpu_actors/**/*.py"))]
        return cls("\n".join(path.read_text(encoding="utf-8") for path in files))

    def encode(self, text: str) -> Tokens:
        """Indices of the characters. Those that the corpus lacks are left out."""
        return np.array([self._index[character] for character in text if character in self._index], np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.alphabet[token] for token in tokens)

    def batch(self, rng: np.random.Generator, size: int, length: int) -> Tokens:
        """``size`` pieces of length + 1 characters: the inputs and, shifted by one, the targets."""
        starts = rng.integers(len(self.tokens) - length, size=size)
        pieces: Tokens = self.tokens[starts[:, None] + np.arange(length + 1)]
        return pieces


class ServiceAttention:
    """Attention by the service, in a dtype of its own for mixed precision. If it is None, in that of q, k and v."""

    def __init__(self, context: ga.GpuContext, heads: int, dtype: Any = None) -> None:
        self._flash_attn = context.flash_attn
        self.dtype = dtype
        # Steeper than ALiBi's own, because the characters just before the next one matter most for it.
        self.slopes = (2.0 ** (1.0 - np.arange(heads))).astype(np.float32)
        self._options: dict[str, Any] = {"causal": True, "alibi_slopes": self.slopes}

    async def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        result = await self._flash_attn.forward(*self.cast(q, k, v), return_lse=True, **self._options)
        return result.out.astype(q.dtype), result.lse

    async def backward(self, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array) -> AttentionGradient:
        kept = q.dtype
        dout, q, k, v, out = self.cast(dout, q, k, v, out)
        gradients = await self._flash_attn.backward(dout, q, k, v, out, lse, **self._options)
        return AttentionGradient(*(gradient.astype(kept) for gradient in gradients[:3]))

    def cast(self, *arrays: Array) -> list[Array]:
        """The arrays in the dtype of attention."""
        return [array.astype(self.dtype or array.dtype, copy=False) for array in arrays]


async def train(model: Model, corpus: Corpus, attention: Attention) -> AsyncIterator[float]:
    """Take ``settings.steps`` steps, yielding the loss before each."""
    settings, optimiser = model.settings, AdamW(model)
    rng = np.random.default_rng(settings.seed + 1)
    for _ in range(settings.steps):
        tokens = corpus.batch(rng, settings.batch, settings.context)
        loss, gradients = await model.loss(tokens, attention)
        optimiser.update(gradients)
        yield loss


class Memory:
    """The keys and values of the text that the model has read, in a paged cache for each layer."""

    def __init__(self, caches: Sequence[tuple[ga.KvCache, ga.KvSequence]], attention: ServiceAttention) -> None:
        self._caches = caches
        self._slopes = attention.slopes

    @classmethod
    @asynccontextmanager
    async def open(
        cls, context: ga.GpuContext, settings: Settings, attention: ServiceAttention, rows: int
    ) -> AsyncIterator[Memory]:
        """Memory for a text of up to ``rows`` characters."""
        size: dict[str, Any] = {"kv_heads": settings.heads_kv, "head_dim": settings.head_dim, "page_size": PAGE}
        dtype = np.dtype(attention.dtype or np.float32).name
        async with AsyncExitStack() as stack:
            caches = []
            for _ in range(settings.layers):
                made = context.kv_cache(num_blocks=-(-rows // PAGE), dtype=dtype, **size)
                cache = await stack.enter_async_context(made)
                caches.append((cache, await cache.create()))
            yield cls(caches, attention)

    async def attend(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """Attention of the new rows to all rows so far, including themselves; all (1, rows, heads, head_dim)."""
        cache, sequence = self._caches[layer]
        result = await cache.attend(q, [sequence], k=k, v=v, alibi_slopes=self._slopes)
        out: Array = result.out
        return out


async def read(model: Model, memory: Memory, attention: ServiceAttention, tokens: Tokens) -> Array:
    """The logits after each of these characters, which follow the text in memory."""
    x = model.weights["embedding"][tokens][None]
    for layer in range(model.settings.layers):
        _, q, k, v = model.project(layer, x)
        out = await memory.attend(layer, *attention.cast(q, k, v))
        *_, x = model.finish(layer, x, out.astype(x.dtype))
    return model.logits(x[0])


async def continue_text(
    model: Model, corpus: Corpus, context: ga.GpuContext, attention: ServiceAttention, prompt: str, length: int
) -> AsyncIterator[str]:
    """Draw ``length`` characters after the prompt. Each is read once, because the cache holds the text before it."""
    rng, new = np.random.default_rng(model.settings.seed), corpus.encode(prompt)
    async with Memory.open(context, model.settings, attention, len(new) + length) as memory:
        for _ in range(length):
            logits = await read(model, memory, attention, new)
            new = np.array([draw(logits[-1], rng)])
            yield corpus.decode(new.tolist())


def draw(logits: Array, rng: np.random.Generator, temperature: float = 0.8) -> int:
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    return int(rng.choice(len(weights), p=weights / weights.sum()))


def save_curve(losses: Sequence[float], path: Path) -> bool:
    """Write the losses as a PNG. False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(losses, color="0.75", linewidth=0.8, label="each step")
    axes.plot([np.mean(losses[max(0, i - 19) : i + 1]) for i in range(len(losses))], label="mean of 20")
    axes.set(xlabel="step", ylabel="loss, nats a character", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=150)
    return True


async def show_training(model: Model, corpus: Corpus, attention: Attention, console: Console) -> list[float]:
    """Train behind a progress bar."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"), TimeRemainingColumn())
    losses: list[float] = []
    with Progress(TextColumn("training"), *columns, console=console) as progress:
        task = progress.add_task("", total=model.settings.steps, loss=float("nan"))
        async for loss in train(model, corpus, attention):
            losses.append(loss)
            progress.update(task, advance=1, loss=float(np.mean(losses[-20:])))
    return losses


async def run(arguments: argparse.Namespace, console: Console) -> int:
    corpus = Corpus.of_repository()
    if not len(corpus.encode(arguments.prompt)):
        raise ga.InvalidRequest("prompt", arguments.prompt, "has no character that occurs in the text to learn")
    settings = Settings(steps=arguments.steps, batch=arguments.batch, seed=arguments.seed)
    model = Model.initialised(settings, len(corpus.alphabet))
    options = ga.ContextOptions(mock=ga.MockOptions(dtype="float32"))
    size = sum(weight.size for weight in model.weights.values())
    async with ga.open_context(arguments.device, options) as context:
        console.print(f"{size:,} weights, {len(corpus.tokens):,} characters, attention on {context.info.name}")
        attention = ServiceAttention(context, settings.heads, DTYPES[arguments.dtype])
        began = time.perf_counter()
        losses = await show_training(model, corpus, attention, console)
        seconds, last = time.perf_counter() - began, float(np.mean(losses[-20:]))
        console.print(f"loss {losses[0]:.3f} -> {last:.3f} ({last / losses[0]:.0%}) in {seconds:.1f} s")
        if save_curve(losses, arguments.curve):
            console.print(f"loss curve: {arguments.curve}")
        else:
            console.print(f"no loss curve: matplotlib is not installed: {install_hint('demo')}", markup=False)
        console.out(arguments.prompt, end="", highlight=False)
        text = continue_text(model, corpus, context, attention, arguments.prompt, arguments.sample)
        async for character in text:
            console.out(character, end="", highlight=False)
        console.out("")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto", help='"auto", "cuda", "cuda:1", "emulated" or "mock"')
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of attention; weights are float32")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16, help="pieces of text a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--curve", type=Path, default=Path("loss.png"), help="where to save the loss curve")
    parser.add_argument("--prompt", default="async def ")
    parser.add_argument("--sample", type=int, default=300, help="characters to write after the prompt")
    arguments = parser.parse_args(argv)
    if min(arguments.steps, arguments.batch) < 1 or arguments.sample < 0 or not arguments.prompt:
        parser.error("--steps and --batch are at least 1, --sample at least 0, and the prompt is not empty")
    console = Console()
    try:
        return asyncio.run(run(arguments, console))
    except ga.GpuActorsError as error:
        Console(stderr=True).print(f"{type(error).__name__}: {error}", markup=False)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
