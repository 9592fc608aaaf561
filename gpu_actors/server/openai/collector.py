"""Prometheus metrics of a server's engine and of its requests for embeddings, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gpu_actors.errors import GpuActorsError
from gpu_actors.runtime.meter import Histogram
from gpu_actors.server.metrics import add_histogram, labeled

if TYPE_CHECKING:
    from gpu_actors.generation.interface import TextEngine
    from gpu_actors.server.openai.state import State

__all__ = ["ServerCollector"]


class ServerCollector(Collector):
    """A collector of a server's counts, in addition to those of its context.

    Texts: gpu_actors_texts {state}: "running" or "waiting"; gpu_actors_texts_ended_total {reason};
    gpu_actors_text_steps_total; gpu_actors_text_tokens_total {kind}: "computed" rows, "generated" tokens,
    and rows of prompts that were "cached". gpu_actors_kv_pages {state}: "used" and "free"; gpu_actors_kv_pages_shared.

    Histograms: gpu_actors_text_queue_seconds, from a request's arrival until its text is admitted;
    gpu_actors_text_first_token_seconds, from the arrival until its first token; gpu_actors_text_token_seconds, between
    tokens; gpu_actors_text_step_rows and gpu_actors_text_step_texts, of a step.

    Embeddings: gpu_actors_embedding_requests {state}: "running" or "waiting".
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        generator = self._state.models.generator
        if generator is not None:
            yield from _engine(generator.engine)
        if self._state.models.encoder is not None:
            stats = self._state.embedding.stats()
            states = {"running": stats.running, "waiting": stats.waiting}
            yield labeled(
                GaugeMetricFamily, "gpu_actors_embedding_requests", "Requests for embeddings", "state", states
            )


def _engine(engine: TextEngine) -> Iterator[Metric]:
    stats = engine.stats
    texts = {"running": engine.running, "waiting": engine.waiting}
    ended = dict(sorted(stats.ended.items()))
    tokens = {"computed": stats.rows, "generated": stats.tokens, "cached": stats.cached}
    yield labeled(GaugeMetricFamily, "gpu_actors_texts", "Texts under way", "state", texts)
    yield labeled(CounterMetricFamily, "gpu_actors_texts_ended", "Texts that ended", "reason", ended)
    yield labeled(CounterMetricFamily, "gpu_actors_text_tokens", "Tokens and rows of prompts", "kind", tokens)
    yield CounterMetricFamily("gpu_actors_text_steps", "Steps of all texts together", stats.steps)
    meter = engine.meter
    yield _histogram("gpu_actors_text_queue_seconds", "Until a text is let in", meter.queue)
    yield _histogram("gpu_actors_text_first_token_seconds", "Until the first token", meter.first)
    yield _histogram("gpu_actors_text_token_seconds", "Between two tokens of a text", meter.between)
    yield _histogram("gpu_actors_text_step_rows", "Rows that a step computes", meter.rows)
    yield _histogram("gpu_actors_text_step_texts", "Texts that share a step", meter.texts)
    try:
        blocks, free, shared = engine.pages()
    except GpuActorsError:  # the engine is being left
        return
    pages = {"used": blocks - free, "free": free}
    yield labeled(GaugeMetricFamily, "gpu_actors_kv_pages", "Pages of the KV cache", "state", pages)
    yield GaugeMetricFamily("gpu_actors_kv_pages_shared", "Pages that several texts read", shared)


def _histogram(name: str, documentation: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(name, documentation)
    add_histogram(family, [], histogram)
    return family
