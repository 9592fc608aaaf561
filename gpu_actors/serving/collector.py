"""Prometheus metrics of an `Admission`, read at each scrape. Needs the ``metrics`` extra."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpu_actors.serving.admission import Admission

__all__ = ["AdmissionCollector"]


class AdmissionCollector(Collector):
    """A collector of what an `Admission` does.

    gpu_actors_admission_running, gpu_actors_admission_waiting, gpu_actors_admission_service_seconds;
    gpu_actors_admission_requests_total {outcome}: "admitted" or "refused".
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        stats = self._admission.stats()
        yield GaugeMetricFamily("gpu_actors_admission_running", "Requests that hold a place", stats.running)
        yield GaugeMetricFamily("gpu_actors_admission_waiting", "Requests that wait for a place", stats.waiting)
        service = "How long a place is held, a moving average"
        yield GaugeMetricFamily("gpu_actors_admission_service_seconds", service, stats.service_seconds)
        requests = CounterMetricFamily("gpu_actors_admission_requests", "Requests for a place", labels=["outcome"])
        requests.add_metric(["admitted"], stats.admitted)
        requests.add_metric(["refused"], stats.refused)
        yield requests
