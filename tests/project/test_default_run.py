"""How pytest spreads the tests: one worker more than cores, or none if they share a GPU or compare times."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from support.service import REPOSITORY

ONE, OTHER = "tests/project/test_way.py", "tests/project/test_imports.py"
WORKERS = len(os.sched_getaffinity(0)) + 1
DEFAULT = "not gpu and not sweep and not perf and not browser"


@pytest.mark.timeout(180)  # starts processes, which collect tests
def test_the_default_run_has_one_worker_more_than_cores() -> None:
    """On one core two workers start. They collect, and no test is selected."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "no_test_of_this_name", ONE, OTHER]
    core = min(os.sched_getaffinity(0))
    start = f"import os, sys; os.sched_setaffinity(0, {{{core}}}); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-S", "-c", start, *command]
    # Other plugins take longer to start than the whole test.
    plugins = "xdist.plugin,pytest_asyncio.plugin,pytest_timeout"
    inherited |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": plugins}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, timeout=170, check=False, env=inherited
    )
    assert done.returncode == 5, done.stdout + done.stderr  # no tests were collected
    assert "created: 2/2 workers" in done.stdout


@pytest.mark.parametrize(
    ("marks", "named", "workers"),
    [
        (DEFAULT, ["tests"], WORKERS),
        (DEFAULT, [ONE, OTHER], WORKERS),
        (DEFAULT, [ONE], 0),
        (DEFAULT, [f"{ONE}::one", f"{ONE}::other"], 0),
        ("sweep", [ONE], WORKERS),
        ("perf", ["tests"], 0),
        ("gpu", ["tests"], 0),
        ("browser", ["tests"], 0),
    ],
)
def test_one_file_a_gpus_tests_and_those_that_compare_times_run_in_one_process(
    marks: str, named: list[str], workers: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    asked = SimpleNamespace(option=SimpleNamespace(markexpr=marks), args=named)
    assert request.config.hook.pytest_xdist_auto_num_workers(config=asked) == workers


@pytest.mark.parametrize(("marks", "kept"), [("sweep", ["swept"]), ("sweep and gpu", ["swept", "on a GPU"])])
def test_what_needs_a_gpu_runs_where_the_marks_name_it(
    marks: str, kept: list[str], request: pytest.FixtureRequest
) -> None:
    def item(name: str, *own: str) -> Any:
        return SimpleNamespace(
            name=name, get_closest_marker=lambda mark: mark in own or None, add_marker=lambda _: None
        )

    items = [item("swept", "sweep"), item("on a GPU", "sweep", "gpu")]
    left_out: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    conftest = next(plugin for plugin in request.config.pluginmanager.get_plugins() if _is_of_all_tests(plugin))
    conftest.pytest_collection_modifyitems(SimpleNamespace(option=SimpleNamespace(markexpr=marks), hook=hook), items)
    assert [each.name for each in items] == kept
    assert len(items) + len(left_out) == 2


def _is_of_all_tests(plugin: Any) -> bool:
    return getattr(plugin, "__file__", None) == str(REPOSITORY / "tests" / "conftest.py")
