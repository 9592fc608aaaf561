"""Texts from a Llama decoder whose attention runs through gpu_actors, many at once, streamed as they come.

    python examples/generate.py --prompt "Once upon a time"      SmolLM2 where it is installed, else a tiny model
    python examples/generate.py --model tiny --device emulated   random weights; attention by CUDA kernels, on the CPU
    python examples/generate.py --model FILE.gguf                or a folder in Hugging Face's layout

The model is NumPy; keys and values lie in a paged cache of the service. Requests arrive one after another, share every
step while they run, and end at different times. --check compares every token's logits with a forward pass in NumPy
alone. With --json every line of output is an object with "event": "token", "end" or "summary".
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import anyio
import numpy as np

import gpu_actors as ga
from gpu_actors.embedding.blas import blas_threads, limit_blas_threads
from gpu_actors.extras import missing
from gpu_actors.generation import (
    RANDOM,
    Engine,
    Generation,
    Llama,
    Sampling,
    Settings,
    Tokenizer,
    load_model,
    plain_logits,
)

try:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text
except ModuleNotFoundError as error:
    raise SystemExit(missing(error, "serve")) from None

__all__ = ["Demand", "main", "run"]

DTYPES = ("float16", "bfloat16", "float32")

_PROMPTS = (
    "The quick brown fox",
    "In the beginning",
    "It was a bright cold day in April, and the clocks",
    "To be, or not to be",
    "Call me",
)


@dataclass(frozen=True, slots=True)
class Demand:
    """A request to make. delay: seconds after the start."""

    number: int
    prompt: str
    max_new_tokens: int
    delay: float


@dataclass(slots=True)
class Story:
    """The outcome of a request. drift: the largest difference of its logits from the plain ones, or None."""

    demand: Demand
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    drift: float | None = None
    first_seconds: float = math.nan
    seconds: float = math.nan


class Screen:
    """Shows texts as they grow, one a line, on a terminal. Elsewhere it writes each text when it has ended."""

    def __init__(self, write: Callable[[str], object], live: Live | None) -> None:
        self._write = write
        self._live = live
        self._stories: list[Story] = []
        self._foot = ""

    def begin(self, story: Story) -> None:
        self._stories.append(story)

    def token(self, story: Story, token: int, piece: str) -> None:
        self._show()

    def end(self, story: Story) -> None:
        self._show()
        if self._live is None:
            self._write(self._line(story).plain + "\n")

    def summary(self, found: dict[str, Any]) -> None:
        rounded = ((name, f"{value:.4g}" if isinstance(value, float) else value) for name, value in found.items())
        self._foot = ", ".join(f"{name} {value}" for name, value in rounded)
        self._show()
        if self._live is None:
            self._write(self._foot + "\n")

    def _show(self) -> None:
        if self._live is not None:
            lines = (self._line(story) for story in self._stories)
            self._live.update(Text("\n").join((*lines, Text(self._foot))))

    def _line(self, story: Story) -> Text:
        mark = f" [{story.reason}]" if story.reason else ""
        shown = "".join(c if c.isprintable() else "\N{MIDDLE DOT}" for c in story.text)
        return Text.assemble((f"{story.demand.number:3} ", "bold"), (story.demand.prompt, "dim"), shown, (mark, "dim"))


class Lines:
    """Writes the same as one JSON object a line."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def begin(self, story: Story) -> None:
        return

    def token(self, story: Story, token: int, piece: str) -> None:
        self._put("token", request=story.demand.number, token=token, text=piece)

    def end(self, story: Story) -> None:
        found = {name: value for name, value in asdict(story).items() if name != "demand"}
        self._put("end", request=story.demand.number, prompt=story.demand.prompt, **found)

    def summary(self, found: dict[str, Any]) -> None:
        self._put("summary", **found)

    def _put(self, event: str, **fields: Any) -> None:
        self._write(json.dumps({"event": event, **fields}) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything that a run needs. check: compare every logit with the plain model's."""

    model: Llama
    tokenizer: Tokenizer
    settings: Settings
    demands: list[Demand]
    temperature: float = 0.0
    seed: int = 0
    check: bool = False

    @property
    def dtype(self) -> str:
        return self.settings.dtypes(self.model.weights.dtype)[0]


async def run(device: str, job: Job, screen: Screen | Lines) -> list[Story]:
    """Answer every demand. Raises the first `GpuActorsError` that ended one."""
    stories: list[Story] = []
    began = time.monotonic()
    async with (
        ga.open_context(device) as context,
        Engine.open(context, job.model, job.settings, keep_logits=job.check) as engine,
    ):
        async with anyio.create_task_group() as group:
            for demand in job.demands:
                stories.append(Story(demand))
                group.start_soon(answer, engine, job, stories[-1], screen)
        launches = context.stats()["kv_cache"]
        stats = engine.stats
        screen.summary(
            {
                "device": context.info.name,
                "attention in": job.dtype,
                "requests": len(stories),
                "tokens": stats.tokens,
                "steps": stats.steps,
                "rows": stats.rows,
                "most texts a step": stats.most_texts,
                "launches": launches.launched,
                "seconds": time.monotonic() - began,
                **({"largest drift": max(story.drift or 0.0 for story in stories)} if job.check else {}),
            }
        )
    return stories


async def answer(engine: Engine, job: Job, story: Story, screen: Screen | Lines) -> None:
    demand, config = story.demand, job.model.config
    await anyio.sleep(demand.delay)
    prompt = job.tokenizer.prompt(demand.prompt)
    began = time.monotonic()
    sampling = Sampling(temperature=job.temperature, seed=job.seed + demand.number)
    generation = engine.submit(prompt, max_new_tokens=demand.max_new_tokens, sampling=sampling)
    screen.begin(story)
    text = job.tokenizer.stream()
    async for token in generation:
        if not story.tokens:
            story.first_seconds = time.monotonic() - began
        piece = "" if token in config.stop_tokens else text.feed(token)
        story.tokens.append(token)
        story.text += piece
        screen.token(story, token, piece)
    story.text += text.end()
    story.seconds = time.monotonic() - began
    story.reason = generation.reason
    if job.check:
        story.drift = await anyio.to_thread.run_sync(drift, job, generation, story.tokens)
    screen.end(story)


def drift(job: Job, generation: Generation, tokens: list[int]) -> float:
    """The largest difference between a generation's logits and those of the plain model."""
    whole = np.array([*generation.prompt, *tokens[:-1]])
    plain = plain_logits(job.model, whole, job.dtype)[len(generation.prompt) - 1 :]
    return float(np.abs(np.stack(generation.logits) - plain).max())


def demands_of(arguments: argparse.Namespace) -> list[Demand]:
    """Make --requests demands over the prompts in turn, with lengths and arrivals drawn from the seed."""
    rng = np.random.default_rng(arguments.seed)
    prompts = arguments.prompt or list(_PROMPTS)
    longest = arguments.max_new_tokens
    made = []
    delay = 0.0
    for number in range(arguments.requests or len(arguments.prompt or "1")):
        # A single request gets the given length; several end at different times.
        tokens = longest if not arguments.requests else int(rng.integers(-(-longest // 2), longest + 1))
        made.append(Demand(number, prompts[number % len(prompts)], tokens, delay))
        delay += float(rng.exponential(arguments.gap_ms / 1000))
    return made


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:N, emulated or mock (auto)")
    parser.add_argument(
        "--model", help="smollm2, tiny, FILE.gguf, or a folder (smollm2 where it is installed, else tiny)"
    )
    parser.add_argument("--prompt", action="append", help="may be given several times")
    parser.add_argument("--requests", type=int, default=0, help="how many, over the prompts in turn (one each)")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (0)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, lengths, arrivals and sampling (0)")
    parser.add_argument("--gap-ms", type=float, default=20.0, help="mean time between arrivals (20)")
    parser.add_argument("--dtype", choices=DTYPES, help="of attention (the weights' own)")
    parser.add_argument("--cache-dtype", choices=("float8_e4m3fn", "float8_e5m2"), help="default: as --dtype")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=1024, help="pages of the cache, for all layers (1024)")
    parser.add_argument("--rows", type=int, default=256, help="rows of a step at most (256)")
    parser.add_argument("--check", action="store_true", help="compare every logit with NumPy alone")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser.parse_args(arguments)


def job_of(arguments: argparse.Namespace) -> Job:
    threads = blas_threads()
    # BLAS threads that wait by spinning would take the CPUs from the context's; the model has its own.
    limit_blas_threads(1)
    loaded = load_model(arguments.model, seed=arguments.seed, threads=threads)
    settings = Settings(
        rows=arguments.rows,
        page_size=arguments.page_size,
        blocks=arguments.blocks,
        dtype=arguments.dtype,
        cache_dtype=arguments.cache_dtype,
    )
    return Job(
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        settings=settings,
        demands=demands_of(arguments),
        temperature=arguments.temperature,
        seed=arguments.seed,
        check=arguments.check,
    )


def main(given: list[str] | None = None) -> int:
    """Run the command. Returns 1 if a request fails, with the reason on stderr."""
    arguments = parse(given)
    console = Console()
    write = sys.stdout.write
    failures: list[BaseException] = []
    try:
        job = job_of(arguments)
        if arguments.json:
            anyio.run(run, arguments.device, job, Lines(write))
        elif console.is_terminal:
            with Live(console=console, refresh_per_second=20) as live:
                anyio.run(run, arguments.device, job, Screen(write, live))
        else:
            anyio.run(run, arguments.device, job, Screen(write, None))
        if job.model.weights.stored == "random" and not arguments.json:
            sys.stderr.write(f"{RANDOM}\n")
    except* ga.GpuActorsError as errors:
        failures = leaves(errors)
    sys.stderr.write("".join(f"{error}\n" for error in failures))
    return 1 if failures else 0


def leaves(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    """The exceptions of a group and of the groups in it."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found += leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


if __name__ == "__main__":
    sys.exit(main())
