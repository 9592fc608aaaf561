"""Prometheus metrics of a context, read from its own counts at each scrape.

    registry.register(ContextCollector(ctx))

The metrics are the values of ``ctx.stats()``, ``ctx.health()`` and the actors' meters at that moment. Nothing is
counted twice. Needs the ``metrics`` extra. Each process shows only its own metrics: scrape every worker (see
docs/serving.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gpu_actors.errors import GpuActorsError
from gpu_actors.runtime.meter import Histogram

if TYPE_CHECKING:
    from gpu_actors.handles.gpu_context import GpuContext

__all__ = ["ContextCollector", "WorkersCollector", "add_histogram", "labeled"]

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)

_OUTCOMES = ("completed", "failed", "cancelled")


class WorkersCollector(Collector):
    """A collector for several contexts: the metrics of `ContextCollector`, each sample with the label ``worker``.

    workers: contexts by the values of the label. Make one for each set of contexts, and keep it.
    """

    def __init__(self, workers: Mapping[str, GpuContext]) -> None:
        self._collectors = {name: ContextCollector(context) for name, context in workers.items()}

    def describe(self) -> list[Metric]:
        """Empty, so that registering does not read the contexts."""
        return []

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for worker, collector in self._collectors.items():
            for family in collector.collect():
                into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                into.samples += [one._replace(labels={**one.labels, "worker": worker}) for one in family.samples]
        yield from merged.values()


class ContextCollector(Collector):
    """A collector for ``prometheus_client.CollectorRegistry.register``. Make one for each context, and keep it.

    Counts: gpu_actors_requests_submitted_total {actor}, gpu_actors_requests_total {actor, outcome},
    gpu_actors_request_errors_total {actor, error}, gpu_actors_launches_total {actor}, gpu_actors_requests_waiting
    {actor}, gpu_actors_launches_in_flight {actor}; gpu_actors_cubin_cache_events_total {event}.

    Device: gpu_actors_device_info {device, name, arch}, always 1; gpu_actors_device_memory_bytes {device}, if it is
    known.

    Health: gpu_actors_ready {device}, gpu_actors_state {device, state}, 1 for the current state and 0 for the
    others, gpu_actors_generation {device}, gpu_actors_oldest_launch_seconds {device}, gpu_actors_quarantined_kernels
    {device}.

    Proofs of kernels, if the context has any (``ContextOptions(qualify=...)``): gpu_actors_kernel_proofs_total
    {outcome}, of kernels that are qualified or quarantined; gpu_actors_proof_seconds, a histogram of new proofs.

    Histograms of the requests made since the context's first collector, because a context measures nothing before it:
    gpu_actors_request_seconds {actor, outcome}, from acceptance to the answer; gpu_actors_request_queue_seconds
    {actor}, from acceptance to the first launch; gpu_actors_request_launch_seconds {actor}, from launch to answer;
    gpu_actors_launch_requests {actor}, requests that one launch answers. gpu_actors_compile_seconds: kernels compiled
    or built since the context opened, not kernels found in the cache.
    """

    def __init__(self, context: GpuContext) -> None:
        self._context = context
        self._states: tuple[str, ...] = get_args(get_type_hints(type(context.health()))["state"])
        children = context._children
        self._mailboxes = {name: cell.mailbox for name, cell in children.cells.items()}
        for mailbox in self._mailboxes.values():
            mailbox.measure(children.clock)

    def describe(self) -> list[Metric]:
        """Empty, so that registering does not read the context."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._actors()
        yield from self._histograms()
        yield from self._health()
        with contextlib.suppress(GpuActorsError):  # the context's process ended before it ever answered
            cache = self._context.nvrtc.cache_stats()
            events = {name: getattr(cache, name) for name in ("hits", "misses", "compiles", "corrupt", "evicted")}
            name = "gpu_actors_cubin_cache_events"
            yield labeled(CounterMetricFamily, name, "What the cubin cache did", "event", events)

    def _actors(self) -> Iterator[Metric]:
        labels = ["actor"]
        submitted = CounterMetricFamily("gpu_actors_requests_submitted", "Requests taken in", labels=labels)
        answered = CounterMetricFamily("gpu_actors_requests", "Requests answered", labels=["actor", "outcome"])
        errors = CounterMetricFamily("gpu_actors_request_errors", "Errors answered", labels=["actor", "error"])
        launches = CounterMetricFamily("gpu_actors_launches", "Launches begun", labels=labels)
        waiting = GaugeMetricFamily("gpu_actors_requests_waiting", "Requests in the mailbox", labels=labels)
        in_flight = GaugeMetricFamily("gpu_actors_launches_in_flight", "Unfinished launches", labels=labels)
        for actor, stats in self._context.stats().items():
            submitted.add_metric([actor], stats.submitted)
            for outcome in _OUTCOMES:
                answered.add_metric([actor, outcome], getattr(stats, outcome))
            for error, count in sorted(stats.errors.items()):
                errors.add_metric([actor, error], count)
            launches.add_metric([actor], stats.launched)
            waiting.add_metric([actor], stats.queued)
            in_flight.add_metric([actor], stats.in_flight)
        yield from (submitted, answered, errors, launches, waiting, in_flight)

    def _histograms(self) -> Iterator[Metric]:
        labels = ["actor"]
        latency = HistogramMetricFamily(
            "gpu_actors_request_seconds", "From acceptance to the answer", labels=["actor", "outcome"]
        )
        queue = HistogramMetricFamily("gpu_actors_request_queue_seconds", "From acceptance to launch", labels=labels)
        batch = HistogramMetricFamily("gpu_actors_launch_requests", "Requests that a launch answers", labels=labels)
        launch = HistogramMetricFamily("gpu_actors_request_launch_seconds", "From launch to the answer", labels=labels)
        for actor, mailbox in self._mailboxes.items():
            meter = mailbox.measure(self._context._children.clock)
            with mailbox.lock:
                for outcome in _OUTCOMES:
                    add_histogram(latency, [actor, outcome], meter.latency[outcome])
                add_histogram(queue, [actor], meter.queue)
                add_histogram(launch, [actor], meter.launch)
                add_histogram(batch, [actor], meter.batch)
        compile = HistogramMetricFamily("gpu_actors_compile_seconds", "Compilations of kernels")
        yield from (latency, queue, launch, batch)
        nvrtc: Any = self._context._children.cells["nvrtc"].shared
        with contextlib.suppress(GpuActorsError):
            add_histogram(compile, [], nvrtc.compile_seconds)
            yield compile
        with contextlib.suppress(GpuActorsError):
            proofs = nvrtc.proofs
            if proofs is not None:
                name = "gpu_actors_kernel_proofs"
                yield labeled(CounterMetricFamily, name, "Kernels by what their proof shows", "outcome", proofs.counts)
                seconds = HistogramMetricFamily("gpu_actors_proof_seconds", "Proofs of kernels")
                add_histogram(seconds, [], proofs.seconds)
                yield seconds

    def _health(self) -> Iterator[Metric]:
        health = self._context.health()
        device = health.device.kind
        info = GaugeMetricFamily("gpu_actors_device_info", "What answers requests", labels=["device", "name", "arch"])
        info.add_metric([device, health.device.name, health.device.arch], 1.0)
        yield info
        state = GaugeMetricFamily("gpu_actors_state", "1 for the state that holds", labels=["device", "state"])
        for name in self._states:
            state.add_metric([device, name], float(health.state == name))
        yield state
        for name, documentation, value in (
            ("gpu_actors_device_memory_bytes", "Memory of the device in all", health.device.memory),
            ("gpu_actors_ready", "1 if the context answers requests", float(health.ready)),
            ("gpu_actors_generation", "Generation of the device context", health.generation),
            ("gpu_actors_oldest_launch_seconds", "Age of the oldest unfinished launch", health.oldest_launch or 0.0),
            ("gpu_actors_quarantined_kernels", "Kernels that failed their proof", float(len(health.quarantined))),
        ):
            if value is not None:
                yield labeled(GaugeMetricFamily, name, documentation, "device", {device: value})


def labeled(kind: type[Family], name: str, documentation: str, label: str, values: Mapping[str, float]) -> Family:
    """A metric family with one label, and a sample for each of the label's values."""
    family = kind(name, documentation, labels=[label])
    for value, sample in values.items():
        family.add_metric([value], sample)
    return family


def add_histogram(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    """Add the histogram as the sample with these values of the labels."""
    bounds = [str(float(bound)) for bound in histogram.bounds]
    buckets = list(zip([*bounds, "+Inf"], histogram.cumulative(), strict=True))
    family.add_metric(labels, buckets, sum_value=histogram.total)
