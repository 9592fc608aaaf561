"""The public names: each exists and is described, every module lists what it offers, and importing is cheap."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import is_typeddict

import pytest
from support.service import run_python

import gpu_actors as ga
import gpu_actors.testing

PACKAGE = Path(ga.__file__).parent
MODULES = sorted(
    name for _, name, _ in pkgutil.walk_packages([str(PACKAGE)], "gpu_actors.") if not name.endswith("__main__")
)
PUBLIC = (ga, gpu_actors.testing)


# Importing the package must not import any of these: a module that needs one imports it where it is used.
EXTRAS = (
    *("cupy", "cupy_backends", "torch", "jax", "ray", "triton", "tokenizers", "safetensors", "transformers"),
    *("vllm", "sglang"),
    *("starlette", "fastapi", "uvicorn", "httpx", "uvloop", "prometheus_client", "opentelemetry"),
    *("ziglang", "cuda", "nvidia", "hypothesis", "pytest", "scipy"),
)
HEAVY = (*EXTRAS, "typer", "click", "rich", "platformdirs")
# Modules that exist for one extra and are imported only where it is installed.
FOR_AN_EXTRA = (
    "devices/cuda/cupy_api",
    "generation/torch_engine",
    "interop/flex",
    "interop/flex_ops",
    "interop/jax",
    "interop/paged",
    "interop/ray/__init__",
    "interop/ray/channel",
    "interop/ray/pool",
    "interop/ray/ray_actor",
    "interop/ray/ray_worker",
    "interop/ray/router",
    "interop/ray/serve",
    "interop/sglang",
    "interop/torch",
    "interop/transformers",
    "interop/vllm",
    "asgi",
    "metrics",
    "openai_api",
    "otel_metrics",
    "server/asgi",
    "server/http/collector",
    "server/metrics",
    "server/openai",
    "server/otel_metrics",
    "server/status/endpoints",
    "serving/collector",
)


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_every_public_name_exists_and_is_sorted(module: ModuleType) -> None:
    names = module.__all__
    assert len(set(names)) == len(names)
    assert names == sorted(names)
    for name in names:
        assert getattr(module, name, None) is not None, name


def test_nothing_public_is_forgotten() -> None:
    """The package exports every public class of the modules that users need, except TypedDicts."""
    exported = {id(getattr(ga, name)) for name in ga.__all__}
    for module_name in (
        "errors",
        "options",
        "attention.requests",
        "attention.mha",
        "runtime.reply",
        "attention.problem",
        "context",
    ):
        module = importlib.import_module(f"gpu_actors.{module_name}")
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) and not is_typeddict(value):  # a TypedDict is for type checkers
                assert id(value) in exported, f"gpu_actors.{module_name}.{name}"


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_every_public_name_is_described(module: ModuleType) -> None:
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            doc = value.__doc__ or ""
            written = doc and not doc.startswith(f"{name}(")  # dataclasses write their own signature there
            assert written, f"{module.__name__}.{name} has no docstring"


def speaks_for_itself(function: object) -> bool:
    """A body of one statement needs no description beside its name."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(function, "__func__", function))))
    (definition,) = ast.parse(source).body
    return isinstance(definition, ast.FunctionDef) and len(definition.body) == 1


def test_every_public_method_is_described() -> None:
    undescribed = [
        f"{name}.{method}"
        for name in ga.__all__
        if inspect.isclass(value := getattr(ga, name)) and value.__module__.startswith("gpu_actors")
        for method, function in vars(value).items()
        if not method.startswith("_") and inspect.isroutine(function)
        if not inspect.getdoc(getattr(value, method)) and not speaks_for_itself(function)
    ]
    assert not undescribed


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")  # raised in Ray Serve
def test_every_module_says_what_it_offers() -> None:
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:  # the module needs an extra that is not installed
            missing = (error.name or "").partition(".")[0]
            assert missing in EXTRAS, f"{name} needs {missing}, which is no extra"
            continue
        if not (module.__doc__ and hasattr(module, "__all__")):
            body = ast.parse(Path(module.__file__ or "").read_text()).body
            assert all(isinstance(node, ast.Expr | ast.Assign) for node in body), f"{name} has no docstring or __all__"
        for offered in getattr(module, "__all__", ()):
            assert hasattr(module, offered), f"{name}.{offered}"


def test_no_file_imports_an_extra_at_its_top() -> None:
    imported = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)
    for path in PACKAGE.rglob("*.py"):
        if not str(path.relative_to(PACKAGE)).startswith(FOR_AN_EXTRA):
            assert not set(imported.findall(path.read_text())) & set(EXTRAS), f"{path} imports it at the top"


def test_importing_the_package_imports_nothing_heavy_starts_no_thread_and_logs_nothing() -> None:
    done = run_python(
        """
        import json, logging, sys, threading
        logging.basicConfig(level=logging.DEBUG)
        import gpu_actors
        heavy = json.dumps(sorted(sys.modules))
        import gpu_actors.testing
        print(threading.active_count(), logging.getLogger("gpu_actors").handlers, heavy)
        """
    )
    assert done.stderr == ""
    assert done.stdout.startswith("1 [] ")
    modules = json.loads(done.stdout.removeprefix("1 [] "))
    assert not {module.partition(".")[0] for module in modules} & set(HEAVY)


def test_a_context_has_every_name_that_importing_the_package_leaves_out() -> None:
    """Otherwise a request that uses one would import its module. ``dir`` lists all names before, too."""
    run_python(
        """
        import sys
        import gpu_actors as ga

        assert set(ga.__all__) <= set(dir(ga))
        left_out = {name for name in ga.__all__ if name not in vars(ga)}
        assert "FlashAttnActor" in left_out
        with ga.open_context("mock"):
            known = set(sys.modules)
            for name in left_out:
                getattr(ga, name)
            assert set(sys.modules) == known
        """
    )


def test_errors_form_one_tree() -> None:
    errors = importlib.import_module("gpu_actors.errors")
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, ga.GpuActorsError)
        assert getattr(ga, name) is error
        assert f"── {name}" in errors.__doc__ or error is ga.GpuActorsError, "drawn in the tree"
    assert issubclass(ga.InvalidRequest, ValueError)
    assert issubclass(ga.DeadlineExceeded, TimeoutError)
    assert issubclass(ga.ActorFailed, ga.ActorStopped)


def test_public_options_are_frozen_and_keyword_only() -> None:
    for options in (ga.ContextOptions, ga.MockOptions, ga.EmulationOptions, ga.RestartPolicy):
        parameters = list(inspect.signature(options).parameters.values())
        assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters)
        assert all(parameter.default is not inspect.Parameter.empty for parameter in parameters)
        documented = inspect.getdoc(options) or ""
        assert all(parameter.name in documented for parameter in parameters), options.__name__
        instance = options()
        with pytest.raises(AttributeError):
            setattr(instance, parameters[0].name, None)
