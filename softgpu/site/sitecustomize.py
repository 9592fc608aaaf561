"""Python imports this at its start: so the processes that tests start have the driver, too."""

from __future__ import annotations

import importlib
import os

if os.environ.get("SOFTGPU_FOLDER"):
    from softgpu.activate import activate

    activate()
    for name in os.environ.get("SOFTGPU_PRELOAD", "").split():
        importlib.import_module(name)
