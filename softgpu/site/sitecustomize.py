"""Python imports this module at its start, so the processes that tests start have the driver too."""

from __future__ import annotations

import os

if os.environ.get("SOFTGPU_FOLDER"):
    from softgpu.activate import activate

    activate()
