"""The costs of the simulated fleet, read from fleet_costs.json. Most of them are assumed."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

from gpu_actors.distributed.member import _HEALTH_TTL
from gpu_actors.errors import InvalidRequest

__all__ = ["Costs", "load_costs"]

_KINDS = ("assumed", "measured", "published")


class Costs(NamedTuple):
    """Costs in seconds and tokens. router_us: microseconds of one choice, by the number of workers."""

    prefill_tokens_s: float
    step_s: float
    step_each_s: float
    forward_s: float
    cache_tokens: int
    notice_s: float
    restart_s: float
    deaths_a_gpu_day: float
    router_us: Mapping[int, float]
    router_look_us: float

    def choice(self, workers: int) -> float:
        """Seconds of a router's CPU for one choice: linear between the known sizes, and constant outside them.

        Reading each worker's health every `_HEALTH_TTL` seconds leaves only a part of the CPU for choices, here at
        least a tenth.
        """
        sizes = sorted(self.router_us)
        if not sizes:
            return 0.0
        at = bisect_left(sizes, workers)
        low, high = sizes[max(at - 1, 0)], sizes[min(at, len(sizes) - 1)]
        share = min(max((workers - low) / (high - low), 0.0), 1.0) if high > low else 0.0
        alone = self.router_us[low] + share * (self.router_us[high] - self.router_us[low])
        return alone * 1e-6 / max(0.1, 1.0 - workers * self.router_look_us * 1e-6 / _HEALTH_TTL)


def load_costs(text: str | None = None) -> Costs:
    """The costs in a JSON text, by default fleet_costs.json.

    Each is a ``value``, its ``kind`` (assumed, measured or published) and its ``source``. Raises `InvalidRequest` if
    one is missing or lacks any of these.
    """
    if text is None:
        text = (resources.files(__package__) / "fleet_costs.json").read_text(encoding="utf-8")
    given = json.loads(text)
    values: dict[str, Any] = {}
    for name in Costs._fields:
        cost = given.get(name, {})
        if cost.get("kind") not in _KINDS or not cost.get("source") or "value" not in cost:
            raise InvalidRequest("costs", name, f"must have a value, a source and a kind: {', '.join(_KINDS)}")
        values[name] = cost["value"]
    values["router_us"] = {int(workers): float(value) for workers, value in values["router_us"].items()}
    return Costs(**values)
