"""gpu-actors serve in a process of its own. For tests."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from typing import Self


class Process:
    """The command on a free port. log: the lines of its standard error so far."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "gpu_actors.cli", "serve", "--device", "mock", "--port", "0", *options]
        self.log: list[str] = []
        self.began = time.monotonic()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._listening = threading.Event()
        self._reading = threading.Thread(target=self._read)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if "http://" in line:
                self._listening.set()
        self._listening.set()

    def __enter__(self) -> Self:
        self._reading.start()
        assert self._listening.wait(120)
        found = re.search(r"http://127\.0\.0\.1:(\d+)", "".join(self.log))
        assert found, self.log
        self.port = int(found[1])
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
