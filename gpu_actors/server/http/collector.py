"""Prometheus metrics of an `Admission` and of `Traffic`, read at each scrape. Needs the ``metrics`` extra."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gpu_actors.server.http.admission import Admission
from gpu_actors.server.http.traffic import Traffic
from gpu_actors.server.metrics import add_histogram, labeled

__all__ = ["AdmissionCollector", "TrafficCollector"]


class AdmissionCollector(Collector):
    """A collector of the counts of an `Admission`.

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
        outcomes = {"admitted": stats.admitted, "refused": stats.refused}
        name = "gpu_actors_admission_requests"
        yield labeled(CounterMetricFamily, name, "Requests for a place", "outcome", outcomes)


class TrafficCollector(Collector):
    """A collector of the answers to clients. Probes and the page are not counted.

    gpu_actors_http_answers_total {route, status}; gpu_actors_http_outcomes_total {route, outcome}, with the
    outcomes of `RouteCounts` ("deadline" counts missed deadlines); gpu_actors_http_seconds {route}, a histogram.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def collect(self) -> Iterator[Metric]:
        answers = CounterMetricFamily("gpu_actors_http_answers", "Answers to clients", labels=["route", "status"])
        outcomes = CounterMetricFamily("gpu_actors_http_outcomes", "Ends of requests", labels=["route", "outcome"])
        seconds = HistogramMetricFamily("gpu_actors_http_seconds", "From arrival to the end", labels=["route"])
        for route, counts in self._traffic.routes().items():
            for status, count in sorted(counts.statuses.items()):
                answers.add_metric([route, str(status)], count)
            for outcome, count in counts.outcomes.items():
                outcomes.add_metric([route, outcome], count)
            add_histogram(seconds, [route], counts.seconds)
        yield from (answers, outcomes, seconds)
