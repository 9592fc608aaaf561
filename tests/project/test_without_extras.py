"""Programs with only the core's five packages installed: imports of the optional ones are blocked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from inside.package import install_hint
from support.service import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
OPTIONAL = (
    "rich", "typer", "click", "cupy", "cupy_backends", "nvidia", "gguf", "safetensors", "tokenizers", "threadpoolctl",
    "starlette", "fastapi", "uvicorn", "uvloop", "matplotlib", "opentelemetry", "prometheus_client", "ziglang",
    "psutil", "torch", "transformers", "jax", "ray", "httpx", "pytest", "pydantic", "jinja2", "openai",
)  # fmt: skip

EXAMPLES = {
    "generate.py": "serve",
    "inference_server.py": "demo",
    "ray_cluster.py": "ray",
    "train_char_model.py": "demo",
}

FORWARD = """
import asyncio, numpy as np, gpu_actors as ga

async def main():
    q = np.ones((1, 16, 2, 64), np.float32)
    async with ga.open_context("mock") as context:
        print((await context.flash_attn.forward(q, q, q)).out.shape)

asyncio.run(main())
"""


APPLICATION = "import gpu_actors.serving\nimport gpu_actors.asgi"

# Runs each code in turn.
RUN = """
import contextlib, io, json, sys, traceback
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))
sys.path.insert(0, "examples")
found = []
for code in sys.argv[2:]:
    out, error, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            exec(code, {})
        except SystemExit as exit_:
            status = exit_.code
        except BaseException:
            status = traceback.format_exc().splitlines()[-1]
    found.append((status, out.getvalue(), error.getvalue()))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def bare() -> dict[str, list[Any]]:
    """Each code's exit status and output in an interpreter that finds none of the extras' libraries."""
    examples = {name: f"import runpy; runpy.run_path('examples/{name}', run_name='__main__')" for name in EXAMPLES}
    command = "from gpu_actors.cli import main; main()"
    codes = {"forward": FORWARD, "application": APPLICATION, "command": command, **examples}
    arguments = [sys.executable, "-c", RUN, json.dumps(OPTIONAL), *codes.values()]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=200, check=False, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return dict(zip(codes, json.loads(done.stdout), strict=True))


def test_the_core_requires_five_packages() -> None:
    names = {re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]}  # type: ignore[index]
    assert names == {"numpy", "ml_dtypes", "pykka", "anyio", "platformdirs"}


def test_a_request_is_answered_with_the_core_alone(bare: dict[str, list[Any]]) -> None:
    assert bare["forward"] == [0, "(1, 16, 2, 64)\n", ""]


@pytest.mark.parametrize("module", ["rich", "typer"])
@pytest.mark.parametrize("arguments", [(), ("--help",), ("warm", "--arch", "sm_80")])
def test_the_command_says_what_it_needs(
    run: Any, monkeypatch: pytest.MonkeyPatch, module: str, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert run(*arguments) == (f"gpu-actors: {module} is not installed: {install_hint('cli')}", "", "")


def test_an_example_or_the_command_without_its_extra_ends_in_a_sentence(bare: dict[str, list[Any]]) -> None:
    for name, extra in {**EXAMPLES, "command": "cli"}.items():
        status, out, error = bare[name]
        expected = rf'(gpu-actors: )?\w+ is not installed: pip install -e "\.\[{extra}\]"'
        assert re.fullmatch(expected, status), (name, status)
        assert (out, error) == ("", "")


def test_an_application_without_starlette_is_told_the_extra(bare: dict[str, list[Any]]) -> None:
    assert bare["application"][0] == 'ModuleNotFoundError: starlette is not installed: pip install -e ".[asgi]"'


def test_every_example_that_can_be_run_is_tried_without_its_extra() -> None:
    runnable = [path.name for path in sorted((REPOSITORY / "examples").glob("*.py")) if runs(path)]
    # The first of these needs no extra, and the second starts the server and shows its output.
    assert runnable == sorted([*EXAMPLES, "model_step.py", "serving_load.py"])


def runs(path: Path) -> bool:
    return '__name__ == "__main__"' in path.read_text(encoding="utf-8")


def test_the_demo_and_the_tests_bring_the_command() -> None:
    extras = PROJECT["optional-dependencies"]
    assert "gpu-actors[cli,asgi]" in extras["demo"]
    assert any("demo" in line for line in extras["test"] if line.startswith("gpu-actors["))
