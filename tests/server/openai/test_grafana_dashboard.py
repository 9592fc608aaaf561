"""The dashboard in docs/grafana.json and the alerts in docs/operate.md ask for metrics that a server has.

The dashboard leaves out none of these metrics but UNSEEN.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support.openai_server import Serving
from support.service import NO_COMPUTE, REPOSITORY

import gpu_actors as ga
from gpu_actors.metrics import WorkersCollector

DASHBOARD = json.loads((REPOSITORY / "docs" / "grafana.json").read_text(encoding="utf-8"))
PANELS: list[Any] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
OPERATE = (REPOSITORY / "docs" / "operate.md").read_text(encoding="utf-8")
ALERTS: dict[str, str] = dict(re.findall(r"^ +- alert: (\w+)\n +expr: (.+)$", OPERATE, re.M))
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]

# One exists only if the device reports it; the other adds nothing as a curve, because requests_total counts its ends.
UNSEEN = {"gpu_actors_device_memory_bytes", "gpu_actors_requests_submitted_total"}


@pytest.fixture(scope="module")
def samples() -> dict[str, set[str]]:
    """The labels of each sample of a server that has answered, failed and refused."""
    with Serving(models=("tiny", "minilm")) as serving:
        serving.complete()
        state = serving.state
        assert state.models.encoder is not None
        with serving.raw("GET /metrics HTTP/1.0") as client:
            text = b"".join(iter(lambda: client.recv(1 << 16), b"")).decode()
    return labels_of(text)


@pytest.fixture(scope="module")
def known(samples: dict[str, set[str]]) -> dict[str, set[str]]:
    """The labels that expressions may use: those of the samples, of workers, and of Prometheus."""
    with ga.open_context("mock", ga.ContextOptions(mock=NO_COMPUTE)) as context:
        registry = CollectorRegistry()
        registry.register(WorkersCollector({"worker-1": context}))
        workers = labels_of(generate_latest(registry).decode())
    assert all("worker" in labels for labels in workers.values())
    # Errors have a sample only after the first error.
    found = {**samples, "gpu_actors_request_errors_total": {"actor", "error"}}
    of_workers = {*workers, "gpu_actors_request_errors_total"}
    return {
        name: labels | {"instance"} | ({"worker"} if name in of_workers else set()) for name, labels in found.items()
    }


def labels_of(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(gpu_actors_\w+)(?:\{(.*)\})? ", text, re.M):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def check(expression: str, known: dict[str, set[str]]) -> None:
    """Check that each metric exists and has the labels by which it is selected and summed."""
    names = re.findall(r"gpu_actors_\w+", expression)
    assert names, expression
    assert set(names) <= known.keys(), expression
    for name, matchers in re.findall(r"(gpu_actors_\w+)\{(.*?)\}", expression):
        for label in re.findall(r"(\w+)=", matchers):
            assert label in known[name], (label, expression)
    for labels in re.findall(r"by \(([^)]*)\)", expression):
        for label in labels.split(", "):
            assert all(label in known[name] for name in names), (label, expression)
    assert expression.count("(") == expression.count(")")


def test_every_expression_names_metrics_and_labels_that_exist(known: dict[str, set[str]]) -> None:
    for expression in EXPRESSIONS:
        check(expression, known)


def test_every_metric_is_of_the_chosen_instances_and_workers(known: dict[str, set[str]]) -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables.keys() == {"datasource", "instance", "worker"}
    for name in ("instance", "worker"):
        assert variables[name]["allValue"] == ".*", "a context of no pool has no worker, which .* matches"
        assert variables[name]["query"].startswith("label_values(gpu_actors_ready")
    for expression in EXPRESSIONS:
        for name, matchers in re.findall(r"(gpu_actors_\w+)(?:\{(.*?)\})?", expression):
            wanted = ['instance=~"$instance"', *(['worker=~"$worker"'] if "worker" in known[name] else [])]
            assert matchers.split(", ")[: len(wanted)] == wanted, expression


def test_every_alert_asks_for_what_exists_and_is_explained(known: dict[str, set[str]]) -> None:
    rows = re.findall(r"^\| ([A-Z]\w+(?:, [A-Z]\w+)*) \|", OPERATE, re.M)
    explained = {name for row in rows for name in row.split(", ")}
    assert len(ALERTS) == OPERATE.count("- alert: ") > 5
    assert ALERTS.keys() == explained
    for alert in ALERTS.values():
        check(alert, known)
        for error in re.findall(r'error=~"([^"]+)"', alert):
            assert all(hasattr(ga, name) for name in error.split("|")), error


def test_an_alert_on_refusals_counts_those_of_every_route() -> None:
    """The metrics of admission cover texts alone; embeddings have their own admission."""
    assert 'gpu_actors_http_outcomes_total{outcome="refused"}' in ALERTS["Refuses"]
    assert not any("gpu_actors_admission" in alert for alert in ALERTS.values())


def test_no_metric_is_left_out(samples: dict[str, set[str]]) -> None:
    shown = {name for expression in EXPRESSIONS for name in re.findall(r"gpu_actors_\w+", expression)}
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in shown}
    have = {re.sub(r"_(bucket|count|sum)$", "", name) for name in samples if not name.endswith("_created")}
    assert have - families - UNSEEN == set()


def test_panels_do_not_cover_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(panel["title"] and panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS)
