"""Prometheus metrics of a context, read from its own counts at each scrape.

    registry.register(ContextCollector(ctx))

Nothing is counted twice and nothing is estimated: a metric is what ``ctx.stats()`` and ``ctx.health()`` say at that
moment. Needs the ``metrics`` extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from gpu_actors.context import GpuContext

__all__ = ["ContextCollector"]

_OUTCOMES = ("completed", "failed", "cancelled")


class ContextCollector(Collector):
    """A collector for ``prometheus_client.CollectorRegistry.register``.

    gpu_actors_requests_submitted_total {actor}, gpu_actors_requests_total {actor, outcome}, gpu_actors_launches_total
    {actor}, gpu_actors_requests_waiting {actor}, gpu_actors_launches_in_flight {actor}; gpu_actors_ready,
    gpu_actors_generation, gpu_actors_oldest_launch_seconds; gpu_actors_cubin_cache_events_total {event}.
    """

    def __init__(self, context: GpuContext) -> None:
        self._context = context

    def describe(self) -> list[Metric]:
        """Nothing, so that registering asks nothing of the context."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._actors()
        health = self._context.health()
        yield GaugeMetricFamily("gpu_actors_ready", "1 if the context answers requests", float(health.ready))
        yield GaugeMetricFamily("gpu_actors_generation", "Generation of the device context", health.generation)
        yield GaugeMetricFamily(
            "gpu_actors_oldest_launch_seconds", "Age of the oldest unfinished launch", health.oldest_launch or 0.0
        )
        events = CounterMetricFamily("gpu_actors_cubin_cache_events", "What the cubin cache did", labels=["event"])
        cache = self._context.nvrtc.cache_stats()
        for event in ("hits", "misses", "compiles", "corrupt", "evicted"):
            events.add_metric([event], getattr(cache, event))
        yield events

    def _actors(self) -> Iterator[Metric]:
        labels = ["actor"]
        submitted = CounterMetricFamily("gpu_actors_requests_submitted", "Requests taken in", labels=labels)
        answered = CounterMetricFamily("gpu_actors_requests", "Requests answered", labels=["actor", "outcome"])
        launches = CounterMetricFamily("gpu_actors_launches", "Launches begun", labels=labels)
        waiting = GaugeMetricFamily("gpu_actors_requests_waiting", "Requests in the mailbox", labels=labels)
        in_flight = GaugeMetricFamily("gpu_actors_launches_in_flight", "Unfinished launches", labels=labels)
        for actor, stats in self._context.stats().items():
            submitted.add_metric([actor], stats.submitted)
            for outcome in _OUTCOMES:
                answered.add_metric([actor, outcome], getattr(stats, outcome))
            launches.add_metric([actor], stats.launched)
            waiting.add_metric([actor], stats.queued)
            in_flight.add_metric([actor], stats.in_flight)
        yield from (submitted, answered, launches, waiting, in_flight)
