"""OpenTelemetry metrics: the samples of a Prometheus collector, as instruments that are read at each export.

    metrics = OtelMetrics(ContextCollector(ctx))

Counters and gauges keep their names, without Prometheus' _total. OpenTelemetry has no histogram that can be read from
counts, so a histogram becomes three counters: NAME_bucket with the attribute ``le``, NAME_count and NAME_sum. Needs the
extras ``metrics`` and ``otel``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

from gpu_actors._version import __version__

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

__all__ = ["OtelMetrics"]

_FRESH = 0.05
"""Seconds for which one read of the collector serves all instruments of an export."""

_UNITS = {"seconds": "s", "bytes": "By"}
_SUFFIXES = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("_total",), "gauge": ("",)}


class OtelMetrics:
    """Registers an instrument for each metric that the collector has now. Make one for each collector, and keep it.

    provider: the meter provider. Default: the global one. Labels become attributes. Metrics that appear only later,
    such as the memory of a device that is not known yet, are not exported.
    """

    def __init__(self, collector: Collector, provider: MeterProvider | None = None) -> None:
        self._collector = collector
        self._lock = threading.Lock()
        self._read_at = -1.0
        self._families: dict[str, Metric] = {}
        self._closed = False
        meter = metrics.get_meter("gpu_actors", __version__, meter_provider=provider)
        for family in self._read_families().values():
            for suffix in _SUFFIXES[family.type]:
                name = family.name + suffix.removesuffix("_total")
                make = meter.create_observable_gauge if family.type == "gauge" else meter.create_observable_counter
                make(name, [self._callback(family.name, suffix)], _unit(name), family.documentation)

    def close(self) -> None:
        """Stop exporting. OpenTelemetry keeps the instruments for as long as their provider lives."""
        with self._lock:
            self._closed = True
            self._families = {}

    def _callback(self, family: str, suffix: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterator[Observation]:
            metric = self._read_families().get(family)
            for sample in metric.samples if metric is not None else ():
                if sample.name == family + suffix:
                    attributes: dict[str, Any] = dict(sample.labels)
                    yield Observation(sample.value, attributes)

        return observe

    def _read_families(self) -> dict[str, Metric]:
        with self._lock:
            if not self._closed and time.monotonic() - self._read_at > _FRESH:
                self._families = {family.name: family for family in self._collector.collect()}
                self._read_at = time.monotonic()
            return self._families


def _unit(name: str) -> str:
    measured = name.removesuffix("_sum").rpartition("_")[2]
    return _UNITS.get(measured, "1")
