"""A device of which is known what planning a request takes: what it is, and that no kernel is barred there."""

from types import SimpleNamespace
from typing import Any

from gpu_actors import DeviceInfo


def known_device(info: DeviceInfo) -> Any:
    return SimpleNamespace(info=info, barred=None)
