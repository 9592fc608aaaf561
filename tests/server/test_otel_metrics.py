"""OpenTelemetry exports what Prometheus shows."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry
from support.service import ask

import gpu_actors as ga
from gpu_actors.metrics import ContextCollector, WorkersCollector
from gpu_actors.otel_metrics import OtelMetrics
from gpu_actors.server import otel_metrics


def exported(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    """The points of each instrument."""
    data = reader.get_metrics_data()
    if data is None:
        return {}
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> InMemoryMetricReader:
    monkeypatch.setattr(otel_metrics, "_FRESH", -1.0)
    return InMemoryMetricReader()


def test_every_sample_of_prometheus_is_exported(reader: InMemoryMetricReader) -> None:
    provider = MeterProvider([reader])
    registry = CollectorRegistry()
    with ga.open_context("mock") as ctx:
        collector = ContextCollector(ctx)
        registry.register(collector)
        OtelMetrics(collector, provider)
        for _ in range(3):
            ask(ctx).result(30)
        with pytest.raises(ga.InvalidRequest):
            ask(ctx, softcap=-1.0).result(30)
        points = exported(reader)
        moving = "oldest_launch_seconds"  # it moves with the clock
        for family in registry.collect():
            for sample in family.samples:
                found = [
                    point.value
                    for point in points[sample.name.removesuffix("_total")]
                    if dict(point.attributes) == sample.labels
                ]
                assert found == [sample.value] or moving in sample.name, sample
        labels = {"actor": "flash_attn", "outcome": "completed"}
        (count,) = [
            point.value for point in points["gpu_actors_request_seconds_count"] if dict(point.attributes) == labels
        ]
        assert count == 3
    provider.shutdown()


def test_each_worker_s_points_carry_its_name(reader: InMemoryMetricReader) -> None:
    provider = MeterProvider([reader])
    with ga.open_context("mock") as one, ga.open_context("mock") as other:
        OtelMetrics(WorkersCollector({"worker-1": one, "worker-2": other}), provider)
        for ctx in (one, other, other):
            ask(ctx).result(30)
        labels = {"actor": "flash_attn", "outcome": "completed"}
        found = {
            point.attributes["worker"]: point.value
            for point in exported(reader)["gpu_actors_requests"]
            if labels.items() <= dict(point.attributes).items()
        }
        assert found == {"worker-1": 1, "worker-2": 2}
    provider.shutdown()


def test_units_and_what_was_said_go_with_them(reader: InMemoryMetricReader) -> None:
    provider = MeterProvider([reader])
    with ga.open_context("mock") as ctx:
        OtelMetrics(ContextCollector(ctx), provider)
        ask(ctx).result(30)
        data = reader.get_metrics_data()
        made = {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}
        assert made["gpu_actors_request_seconds_sum"].unit == "s"
        assert made["gpu_actors_request_seconds_count"].unit == "1"
        assert made["gpu_actors_requests"].description == "Requests answered"
        assert made["gpu_actors_requests"].data.is_monotonic
        assert not hasattr(made["gpu_actors_ready"].data, "is_monotonic")
    provider.shutdown()


def test_nothing_is_exported_once_it_is_closed(reader: InMemoryMetricReader) -> None:
    provider = MeterProvider([reader])
    with ga.open_context("mock") as ctx:
        metrics = OtelMetrics(ContextCollector(ctx), provider)
        assert exported(reader)
        metrics.close()
        assert not any(exported(reader).values())
    provider.shutdown()
