"""For pytest: skips what only hardware can show, and fails a test in which the driver finds something.

Loaded by ``python -m softgpu -m pytest``.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

from softgpu.activate import FOLDER_VARIABLE
from softgpu.control import take_findings

ACTIVE = bool(os.environ.get(FOLDER_VARIABLE))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("hardware")
        if ACTIVE and marker is not None:
            item.add_marker(pytest.mark.skip(reason=f"not on the software driver: {marker.args[0]}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    if not ACTIVE:
        return (yield)
    take_findings()
    result = yield
    if found := take_findings():
        pytest.fail("the software driver has found:\n" + "\n".join(found), pytrace=False)
    return result
