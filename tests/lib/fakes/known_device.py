"""A device with what planning a request reads: its info, and that no kernel is barred."""

from types import SimpleNamespace
from typing import Any

from gpu_actors import DeviceInfo


def known_device(info: DeviceInfo) -> Any:
    return SimpleNamespace(info=info, barred=None)
