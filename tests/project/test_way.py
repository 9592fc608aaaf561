"""`scripts/way.py` shows the files of the package that a warm request enters on the mock device."""

from __future__ import annotations

import re
import subprocess
import sys

from support.modules import ROOT


def test_the_way_of_each_request_is_shown() -> None:
    # In another process, because a request asks for torch's grad mode once a test has imported torch.
    command = [sys.executable, str(ROOT / "scripts" / "way.py"), "--files"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    names = re.findall(r"^(\S.*?) +[1-9]\d* files", shown, re.MULTILINE)
    assert names == ["forward", "backward", "two paged requests", "KvCache.attend", "graph"]
