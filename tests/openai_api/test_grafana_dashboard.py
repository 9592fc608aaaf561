"""The dashboard in docs/grafana.json asks for metrics that a server has, and leaves none of them out."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.openai_server import Serving
from support.service import REPOSITORY

DASHBOARD = json.loads((REPOSITORY / "docs" / "grafana.json").read_text(encoding="utf-8"))
PANELS: list[Any] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]

# Only where the device says it, or of no use as a curve: requests_total is the same at the other end.
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
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(gpu_actors_\w+)(?:\{(.*)\})? ", text, re.M):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


def test_every_expression_names_metrics_and_labels_that_exist(samples: dict[str, set[str]]) -> None:
    # Errors have a sample only once there was one.
    known = samples | {"gpu_actors_request_errors_total": {"actor", "error"}}
    for expression in EXPRESSIONS:
        names = re.findall(r"gpu_actors_\w+", expression)
        assert names, expression
        assert set(names) <= known.keys(), expression
        for labels in re.findall(r"by \(([^)]*)\)", expression):
            for label in labels.split(", "):
                assert all(label in known[name] for name in names), (label, expression)
        assert expression.count("(") == expression.count(")")


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
