"""How many of the package's files a warm request enters on the mock device, as scripts/way.py counts them.

A number that grows says that a request is handed to and fro once more: `python scripts/way.py --files` shows the way.
"""

from __future__ import annotations

import re
import subprocess
import sys

from support.modules import ROOT

MOST = {"forward": 13, "backward": 16, "two paged requests": 20, "KvCache.attend": 22, "graph": 18}


def test_a_warm_request_enters_few_files() -> None:
    # In a process of its own, where no other test has imported torch: a request then asks for its grad mode.
    command = [sys.executable, str(ROOT / "scripts" / "way.py"), "--files"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    counts = {name: int(count) for name, count in re.findall(r"^(\S.*?) +(\d+) files", shown, re.MULTILINE)}
    assert counts.keys() == MOST.keys()
    assert not {name: counts[name] for name in MOST if counts[name] > MOST[name]}, shown
