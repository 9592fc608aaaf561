"""python -m softgpu ARGUMENTS...: runs ``python ARGUMENTS...`` with the software driver, here and in child processes.

For example ``python -m softgpu -m pytest -m gpu tests/gpu``. Settings, from the environment: SOFTGPU_DEVICES,
SOFTGPU_CAPABILITY (90), SOFTGPU_MEMORY_MIB, SOFTGPU_MULTIPROCESSORS, SOFTGPU_SEED.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from softgpu.activate import FOLDER_VARIABLE
from softgpu.build import build


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    here = Path(__file__).resolve().parent
    folders = [str(here / "site"), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        FOLDER_VARIABLE: str(build()),
        "PYTHONPATH": os.pathsep.join(folders),
        "PYTEST_PLUGINS": "softgpu.plugin",
    }
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment)


if __name__ == "__main__":
    main()
