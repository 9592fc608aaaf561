"""Traffic: the answers to clients, counted by route."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpu_actors.runtime.meter import SECONDS, Histogram

__all__ = ["OTHER", "OUTCOMES", "STATE", "RouteCounts", "Traffic", "route_of", "traffic_of"]

OUTCOMES = ("answered", "invalid", "refused", "deadline", "failed", "gone")

OTHER = "other"
"""The route of requests that match no route, and of requests beyond the bound on routes."""

_MOST_ROUTES = 64

STATE = "gpu_actors"
"""The key of the service in the state of an application's lifespan. The scope of each request has that state."""


@dataclass(slots=True)
class RouteCounts:
    """The answers of one route.

    statuses: answers by HTTP status; 499 if the client hung up before a status was sent.
    outcomes: answers by outcome: "answered"; "invalid", a 4xx that is the request's own fault; "refused", a 429;
        "deadline", an answer of any status that was not whole by its deadline; "failed", a 5xx, or an answer that broke
        off; "gone", a client that hung up before its deadline.
    seconds: from the request's arrival to the end of its answer.
    """

    statuses: dict[int, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))


class Traffic:
    """Counts answers by route, on any thread. A route is a path of the application, such as "/v1/models/{name}".

    At most 64 routes are counted; the others count as "other". `Guard` counts the answers; `Probes.watch` and
    `StatusBoard` show the counts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routes: dict[str, RouteCounts] = {}

    def count(self, route: str, status: int, outcome: str, seconds: float) -> None:
        """Count one answer. outcome: one that `RouteCounts` names."""
        with self._lock:
            if route not in self._routes and len(self._routes) >= _MOST_ROUTES:
                route = OTHER
            counts = self._routes.setdefault(route, RouteCounts())
            counts.statuses[status] = counts.statuses.get(status, 0) + 1
            counts.outcomes[outcome] += 1
            counts.seconds.observe(seconds)

    def routes(self) -> dict[str, RouteCounts]:
        """A copy of the counts, by route."""
        with self._lock:
            return dict(sorted(copy.deepcopy(self._routes).items()))


def traffic_of(scope: Mapping[str, Any]) -> Traffic | None:
    """The `Traffic` of the application, or None if its lifespan is not the one of `gpu_actors.asgi`."""
    traffic: Traffic | None = getattr((scope.get("state") or {}).get(STATE), "traffic", None)
    return traffic


def route_of(scope: Mapping[str, Any]) -> str:
    """The path of the route that answered a request, as a Starlette or FastAPI application declares it."""
    path = getattr(scope.get("route"), "path", None)
    if path is None and "endpoint" in scope:  # this version of Starlette does not store the route
        path = _path_of(scope["endpoint"], getattr(scope.get("router"), "routes", ()))
    if not isinstance(path, str):
        return OTHER
    if "app_root_path" not in scope:  # no mounted application
        return path or "/"
    mounted = str(scope.get("root_path", ""))[len(str(scope["app_root_path"])) :]
    # Variable parts of the prefix are replaced by their names, or each tenant would be a route.
    names = {str(value): f"{{{name}}}" for name, value in (scope.get("path_params") or {}).items()}
    return "/".join(names.get(part, part) for part in mounted.split("/")) + path or "/"


def _path_of(endpoint: Any, routes: Iterable[Any]) -> str | None:
    for route in routes:
        if getattr(route, "endpoint", None) is endpoint:
            return str(route.path)
        inner = _path_of(endpoint, getattr(route, "routes", None) or ())
        if inner is not None:
            return inner
    return None
