"""TorchEngine: Transformers' continuous batching of a torch model, with this package's attention, as a `TextEngine`.

    event loop                          Transformers' thread, for each step
    submit(), cancel()  -- queues -->   schedule rows, take pages
                                        forward pass [each layer attends in the service]
    Generation.take()  <-- tokens --    draw

Transformers decides which rows a step has and where their keys lie, and shares the pages of equal prefixes. This module
draws the tokens, because Transformers' sampling has no seed for each text, and reports the results in `Generation`s.

Needs torch and transformers (extra "serve-torch").
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import anyio
import anyio.to_thread
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    ContinuousBatchingManager,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.utils import find_head_dim, find_num_key_value_heads
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from gpu_actors.errors import ActorStopped, GpuActorsError, InvalidRequest, LaunchError, Unsupported
from gpu_actors.fields import expect, integer
from gpu_actors.generation.batch import Text
from gpu_actors.generation.chat import Chat, chat_template_of
from gpu_actors.generation.engine import DTYPES, as_service_error
from gpu_actors.generation.generation import Generation
from gpu_actors.generation.interface import EngineStats, checked_prompt
from gpu_actors.generation.meter import EngineMeter
from gpu_actors.generation.sampling import Sampling, TokenScores
from gpu_actors.generation.tokenizer import Tokenizer, load_tokenizer
from gpu_actors.interop.transformers import continuous_batching
from gpu_actors.model_files import read_json
from gpu_actors.tracing import host_span

if TYPE_CHECKING:
    from gpu_actors.handles.gpu_context import GpuContext

__all__ = ["LOGGERS", "TorchEngine", "TorchModel", "load_torch_model"]

logger: logging.Logger = logging.getLogger("gpu_actors")

LOGGERS = ("transformers", "ContinuousBatchingLogger")
"""Transformers' loggers."""

_SMALLEST_PAGE = 4
"""The fewest tokens of a page of Transformers' cache."""


# Loading


class TorchModel(NamedTuple):
    """A model of Transformers on its device, with its tokenizer. template: None if the tokenizer has none.

    vocab: how many tokens it has.
    stop_tokens: each of them ends a text.
    stored, dtype: the dtypes of its weights in the file and on the device.
    device: "cpu" or "cuda:N".
    """

    model: PreTrainedModel
    tokenizer: Tokenizer
    template: Chat | None
    vocab: int
    stop_tokens: tuple[int, ...]
    stored: str
    dtype: str
    device: str


def load_torch_model(
    source: str | Path, context: GpuContext, *, dtype: str | None = None, cache_dtype: str | None = None
) -> TorchModel:
    """Load the model of a folder in Hugging Face's layout onto the context's device. No code of the folder runs.

    dtype: of the weights, "float16", "bfloat16" or "float32". None: float32 on the CPU; on a GPU the file's dtype if it
        has 16 bits, else bfloat16.
    cache_dtype: None, or the same as dtype.
    Raises `InvalidRequest` for a folder that Transformers cannot load, or that lacks weights or has them in another
    shape, and `Unsupported` for a source that is no folder and for a cache of another dtype.
    """
    folder, device = Path(source), context.info.device_name
    if not folder.is_dir():
        reason = "needs a folder in Hugging Face's layout; the numpy engine has smollm2, tiny and GGUF files"
        raise Unsupported("engine", "torch", f"{reason}, and {source} is no folder", "numpy")
    if device != "cpu" and not torch.cuda.is_available():
        raise InvalidRequest("engine", "torch", f"needs a torch that was built for CUDA: the context is on {device}")
    read_json(folder / "config.json", dict)
    tokenizer = load_tokenizer(folder)
    config = _loaded(folder, AutoConfig)
    stored = str(config.get_text_config().dtype or torch.float32).removeprefix("torch.")
    on_gpu = stored if stored in ("float16", "bfloat16") else "bfloat16"
    chosen = dtype or ("float32" if device == "cpu" else on_gpu)
    expect(chosen in DTYPES, "dtype", chosen, f"must be {', '.join(DTYPES)}")
    if cache_dtype not in (None, chosen):
        reason = f"must be the model's own dtype, {chosen}, in the torch engine; the numpy engine has others"
        raise Unsupported("cache_dtype", cache_dtype, reason, chosen)
    model, report = _loaded(
        folder,
        AutoModelForCausalLM,
        config=config,
        dtype=getattr(torch, chosen),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are named below
    )
    absent = sorted(report["missing_keys"]) + [str(key[0]) for key in report["mismatched_keys"]]
    if absent:
        raise InvalidRequest("model", str(folder), f"lacks weights, or has them in another shape: {absent[:3]}")
    asked = [name for name in _NOT_DONE if getattr(model.generation_config, name, None) not in _NEUTRAL]
    if asked:
        logger.warning("generation_config.json of %s has %s, which this engine does not do", folder, ", ".join(asked))
    vocab = config.get_text_config().vocab_size
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    stop_tokens = tuple(token for token in dict.fromkeys([*ends, *tokenizer.end_tokens]) if 0 <= token < vocab)
    template = chat_template_of(tokenizer)
    return TorchModel(model.to(device).eval(), tokenizer, template, vocab, stop_tokens, stored, chosen, device)


_NOT_DONE = (
    *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "guidance_scale"),
    *("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("min_length", "min_new_tokens", "exponential_decay_length_penalty"),
)
"""Entries of generation_config.json that change logits. Entries for sampling are absent: each request has its own."""

_NEUTRAL: tuple[object, ...] = (None, 0, 1.0, [])
"""Values of these entries that have no effect."""


def _loaded(folder: Path, auto: Any, **options: Any) -> Any:
    bars = is_progress_bar_enabled()
    disable_progress_bar()  # a bar would stand between the lines of a log
    try:
        return auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:  # Transformers and safetensors raise many kinds
        reason = f"must hold a model that Transformers can load: {type(error).__name__}: {error}"
        raise InvalidRequest("model", str(folder), reason) from error
    finally:
        if bars:
            enable_progress_bar()


# In Transformers' thread


@dataclass(slots=True, eq=False)
class _Request:
    """A text under way. generator: of its random numbers. None: it takes the likeliest token or shares a generator."""

    text: Text
    generation: Generation
    sampling: Sampling
    generator: torch.Generator | None
    begun: bool = False


class _Output(NamedTuple):
    """The result of a step for a request. tokens: all that the request has generated."""

    name: str
    tokens: Sequence[int] = ()
    scores: TokenScores | None = None
    finished: bool = True
    error: GpuActorsError | None = None


_Report: TypeAlias = Callable[..., object]
"""Calls a function with its arguments on the event loop."""


class _Draw(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]
    """Draws the tokens of a step, and makes each the likeliest of its row, so that Transformers takes it.

    requests: the texts under way, by their names in Transformers. The event loop adds and removes them.
    rows, texts: of the step.
    """

    def __init__(self, requests: dict[str, _Request], begin: Callable[[list[tuple[str, int]]], object]) -> None:
        super().__init__(LogitsProcessorList())
        self.do_processing = True
        self.rows = self.texts = 0
        self._requests = requests
        self._begin = begin
        self._drawing: list[str] = []
        self._outcomes: dict[str, TokenScores | GpuActorsError] = {}

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: torch.Tensor) -> torch.Tensor:
        """Note the texts of the step that Transformers has scheduled. No argument is needed on the device."""
        self.rows = sum(each.query_length for each in requests_in_batch)
        self.texts = len(requests_in_batch)
        self._drawing = [each.state.request_id for each in requests_in_batch if each.has_new_token]
        begun = []
        for each in requests_in_batch:
            request = self._requests.get(each.state.request_id)
            if request is not None and not request.begun:
                request.begun = True
                begun.append((each.state.request_id, each.state.position_offset - each.query_length))
        if begun:
            self._begin(begun)
        return arg_storage

    def __call__(self, input_ids: Any, scores: torch.Tensor, logits_processor_args: Any) -> torch.Tensor:
        """Draw the tokens. scores: logits, float32 (texts, vocab), the texts with a new token first."""
        requests = [self._requests.get(name) for name in self._drawing]
        tokens = scores.argmax(1)
        finite = scores[: len(requests)].isfinite().all(1).tolist()
        drawn = [index for index, each in enumerate(requests) if each and each.sampling.temperature > 0]
        if drawn:
            tokens[drawn] = _draw(scores[drawn], [request for index in drawn if (request := requests[index])])
        scored = [index for index, each in enumerate(requests) if each and each.sampling.top_logprobs is not None]
        tops = [request.sampling.top_logprobs or 0 for index in scored if (request := requests[index])]
        found = _scores(scores[scored], tokens[scored], tops) if scored else []
        self._outcomes = {self._drawing[index]: each for index, each in zip(scored, found, strict=True)}
        for name, sound in zip(self._drawing, finite, strict=True):
            if not sound:
                reason = "the logits of a token are not finite: the attention answered with NaN or infinity"
                self._outcomes[name] = LaunchError(reason)
        return scores.scatter_(1, tokens[:, None], math.inf)

    def output(self, output: Any) -> _Output:
        """Transformers' output for a request, with the scores or the error of its last token."""
        outcome = self._outcomes.pop(output.request_id, None)
        error = outcome if isinstance(outcome, GpuActorsError) else None
        scores = outcome if isinstance(outcome, TokenScores) else None
        return _Output(output.request_id, output.generated_tokens, scores, output.is_finished(), error)


def _draw(logits: torch.Tensor, requests: Sequence[_Request]) -> torch.Tensor:
    """A token for each row of logits (texts, vocab), drawn as `Sampler` does, but from other random numbers."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32)[:, None].to(logits.device)

    # Subtract the maximum first: logits divided by a temperature near 0 would be infinite.
    temperatures = column([max(each.sampling.temperature, 1e-30) for each in requests])
    weights = ((logits - logits.amax(1, keepdim=True)) / temperatures).softmax(1)
    if any(each.sampling.top_p < 1 for each in requests):
        ordered, order = weights.sort(dim=1, descending=True, stable=True)
        # The first token always stays. Another one stays while those before it have less than top_p.
        dropped = ordered.cumsum(1) - ordered >= column([each.sampling.top_p for each in requests])
        dropped[:, 0] = False
        weights = weights.masked_fill(dropped.scatter(1, order, dropped), 0.0)
    # The largest quotient of weight and exponential number is a draw by the weights. Each text has numbers of its own.
    noise = torch.empty_like(weights).exponential_()
    for row, each in zip(noise, requests, strict=True):
        if each.generator is not None:
            row.exponential_(generator=each.generator)
    return (weights / noise.clamp_(min=1e-30)).argmax(1)


def _scores(logits: torch.Tensor, tokens: torch.Tensor, tops: Sequence[int]) -> list[TokenScores]:
    wide = logits.double().log_softmax(1)
    likeliest = wide.topk(min(max(tops), wide.shape[1]), dim=1)
    chosen = wide.gather(1, tokens[:, None])[:, 0].tolist()
    rows = zip(chosen, likeliest.indices.tolist(), likeliest.values.tolist(), tops, strict=True)
    return [TokenScores(each, tuple(zip(ids[:top], values[:top], strict=True))) for each, ids, values, top in rows]


class _Router(OutputRouter):  # type: ignore[misc]
    """Sends all outputs of a step to the engine at once, and errors as exceptions."""

    def __init__(self, draw: _Draw, deliver: Callable[[list[_Output]], object]) -> None:
        super().__init__()
        self._draw = draw
        self._deliver = deliver

    def deliver(self, output: Any) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        self._deliver([self._draw.output(output) for output in outputs])

    def fail_and_deliver(self, state: Any, error: Exception) -> None:
        state.status = RequestStatus.FAILED
        self._deliver([_Output(state.request_id, error=as_service_error(error))])


class _StepFailed(Exception):
    """A step raised the error that is the cause of this one."""


class _Manager(ContinuousBatchingManager):  # type: ignore[misc]
    """A manager whose thread goes on if a step fails. Only the texts of that step fail."""

    def __init__(self, engine: TorchEngine, report: _Report, *options: Any) -> None:
        super().__init__(*options)
        self._engine = engine
        self._report = report
        self._draw = _Draw(engine._requests, partial(report, engine._begin))
        self.logit_processor = self._draw
        self.output_router = _Router(self._draw, partial(report, engine._deliver))

    def _generation_step(self) -> None:
        start, rows, texts = time.monotonic(), self._draw.rows, self._draw.texts
        try:
            with host_span("step", rows=rows, texts=texts):
                super()._generation_step()
        except Exception as error:
            raise _StepFailed from error
        self._report(self._engine._stepped, rows, texts, time.monotonic() - start)

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        try:
            more: bool = super()._generation_loop_body(batch_processor, bootstrapping)
        except _StepFailed as failed:
            batch_processor.handle_batch_error(failed.__cause__)
            return True
        return more

    def _handle_critical_error(self, error: Exception, batch_processor: Any) -> None:
        super()._handle_critical_error(error, batch_processor)
        self._report(self._engine._fail, error)


# On the event loop


class TorchEngine:
    """A `TextEngine`, made by `TorchEngine.open`, for the tasks of one event loop of asyncio.

    failure: why Transformers' thread has ended, "" while it runs. Every text then ends with `ActorStopped`.
    """

    def __init__(self, loaded: TorchModel) -> None:
        self.stats = EngineStats()
        self.meter = EngineMeter()
        self.failure: str = ""
        self.longest: int = 0
        self._loaded = loaded
        self._requests: dict[str, _Request] = {}
        self._names = (f"text-{number}" for number in itertools.count())
        self._manager: Any = None
        self._cache: Any = None
        self._stopped = ""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        context: GpuContext,
        loaded: TorchModel,
        *,
        texts: int = 256,
        rows: int = 256,
        page_size: int = 16,
        cache_mib: int = 512,
    ) -> AsyncIterator[TorchEngine]:
        """A context manager with a running engine that has answered once. Leaving it cancels the texts under way.

        texts, rows: the most of a step.
        page_size: tokens of a page, at least 4.
        cache_mib: memory of the cache in MiB. No more is taken than ``texts`` texts of full length need.

        Raises `Unsupported` for a model that Transformers' continuous batching does not run, and `InvalidRequest` if
        the cache finds no memory.
        """
        integer("page_size", page_size, _SMALLEST_PAGE)
        engine, loop = cls(loaded), asyncio.get_running_loop()
        positions = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 20
        batching = ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=_blocks(loaded.model, page_size, cache_mib, texts * -(-positions // page_size)),
            max_batch_tokens=rows,
            max_requests_per_batch=texts,
            # The service makes block tables of its own. Its launches here have not been captured on a GPU yet.
            max_blocks_per_request=0,
            use_cuda_graph=False,
            use_async_batching=False,
            auto_switch_to_flash=False,
        )
        greedy = GenerationConfig(
            do_sample=False, eos_token_id=list(loaded.stop_tokens) or -1, pad_token_id=0, max_new_tokens=positions
        )
        report: _Report = loop.call_soon_threadsafe
        with continuous_batching(context, loaded.model):
            manager = _Manager(engine, report, loaded.model, greedy, batching)
            await anyio.to_thread.run_sync(_prepare, manager)
            engine._manager, engine._cache = manager, manager.batch_processor.cache
            engine.longest = min(positions, infer_max_single_request_tokens(engine._cache))
            manager.start()
            try:
                await engine._answer_once()
                yield engine
            finally:
                for name in list(engine._requests):
                    engine._end(name, "cancelled")
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(partial(manager.stop, hard_stop=True))

    async def _answer_once(self) -> None:
        """Generate a short text, to compile the kernels of the first requests and import what they need."""
        try:
            await self.submit([0], max_new_tokens=min(2, self.longest - 1)).tokens()
        except GpuActorsError as error:
            name = type(self._loaded.model).__name__
            raise Unsupported("model", name, f"does not run in Transformers' continuous batching: {error}") from error

    @property
    def running(self) -> int:
        return sum(request.begun for request in self._requests.values())

    @property
    def waiting(self) -> int:
        return len(self._requests) - self.running

    def pages(self) -> tuple[int, int, int]:
        """Pages of the cache: all, free and shared ones.

        Each kind of layer has pages of its own size; all are counted in pages of the smallest size. Pages that are only
        kept for equal prefixes count as free.
        """
        allocators, pool = self._cache.cache_allocators.values(), self._cache.pool
        most = max(each.blocks_per_sector for each in allocators)
        free = shared = Fraction(0)
        for each in allocators:
            size = Fraction(most, each.blocks_per_sector)
            free += size * (pool.count_free_blocks(each.index) + len(each.ledger.cached_blocks))
            shared += size * len(each.ledger.shared_ref_counts)
        return most * pool.num_sectors, most * pool.num_free_sectors + int(free), int(shared)

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        asked: float | None = None,
        deadline: float | None = None,
    ) -> Generation:
        """Begin a text, as `Engine.submit` does. Raises `Unsupported` for a prompt that should be scored."""
        if self._stopped:
            raise ActorStopped(self._stopped)
        sampling = sampling or Sampling()
        if sampling.score_prompt:
            reason = "must be false beside logprobs: the torch engine scores no prompts, the numpy engine does"
            raise Unsupported("echo", True, reason, False)
        tokens = checked_prompt(prompt, self._loaded.vocab)
        max_new_tokens = integer("max_new_tokens", max_new_tokens, 1)
        length = len(tokens) + max_new_tokens
        expect(length <= self.longest, "prompt", length, f"makes a text of more than {self.longest} tokens")
        name = next(self._names)
        text = Text(tokens, 0, max_new_tokens)
        generation = Generation(
            text,
            max_new_tokens,
            sampling,
            self._loaded.stop_tokens,
            self.meter,
            asked,
            deadline,
            on_cancel=partial(self._end, name),
        )
        generator = None
        if sampling.temperature > 0 and sampling.seed is not None:
            generator = torch.Generator(self._loaded.device).manual_seed(sampling.seed)
        self._requests[name] = _Request(text, generation, sampling, generator)
        self._manager.add_request(tokens, name, max_new_tokens=max_new_tokens, streaming=True)
        return generation

    def stop(self, why: str) -> None:
        self._stopped = why
        for name in list(self._requests):
            self._end(name, "error", ActorStopped(why))

    def _end(self, name: str, reason: str = "", error: GpuActorsError | None = None) -> None:
        """End a text that Transformers may still generate. Does nothing if the engine has ended it already."""
        if self._forget(name, reason, error):
            self._manager.cancel_request(name)

    def _forget(self, name: str, reason: str = "", error: GpuActorsError | None = None) -> bool:
        request = self._requests.pop(name, None)
        if request is None:
            return False
        request.generation.end(reason, error)
        self.stats.end(request.generation)
        return True

    # Reports of Transformers' thread

    def _begin(self, begun: list[tuple[str, int]]) -> None:
        """Admit texts. begun: texts in their first step, with how many of their rows other texts had computed."""
        for name, cached in begun:
            request = self._requests.get(name)
            if request is None:
                continue
            request.text.cached = cached
            try:
                request.generation.begin()
            except GpuActorsError as error:
                self._end(name, "error", error)
            else:
                self.stats.cached += cached

    def _stepped(self, rows: int, texts: int, seconds: float) -> None:
        self.stats.step(rows, texts)
        self.meter.step(rows, texts, seconds)

    def _deliver(self, outputs: list[_Output]) -> None:
        for name, tokens, scores, finished, error in outputs:
            request = self._requests.get(name)
            if request is None:
                continue
            if error is not None:
                self._end(name, "error", error)
                continue
            generation = request.generation
            for token in tokens[len(generation.made) :]:
                self.stats.tokens += 1
                generation.take(token, scores)
            if finished:
                self._forget(name, "length")

    def _fail(self, error: Exception) -> None:
        logger.critical("the engine's thread failed, and it generates no more texts", exc_info=error)
        self.failure = f"the engine has failed: {type(error).__name__}: {error}"
        self.stop(self.failure)


def _blocks(model: PreTrainedModel, page_size: int, mib: int, most: int) -> int:
    """How many pages of all layers together fit into ``mib``: at least 1, at most ``most``."""
    config = model.config.get_text_config()
    token = 2 * find_num_key_value_heads(config) * find_head_dim(config) * model.dtype.itemsize
    page: int = config.num_hidden_layers * token * page_size
    return min(max(1, (mib << 20) // page), most)


def _prepare(manager: Any) -> None:
    """Allocate the cache."""
    try:
        manager.warmup()
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise InvalidRequest("cache_mib", None, f"the cache finds no memory: {error}") from error
    except Exception as error:  # such as for a kind of layer that has no cache there
        name = type(manager.model).__name__
        raise Unsupported("model", name, f"does not run in Transformers' continuous batching: {error}") from error
