"""Options refuse bad values when they are made, before any device is opened, and the error names the field."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.testing import FaultPlan, MockClock


class Named(ga.ServiceActor):
    label = "named"


class Namesake(ga.ServiceActor):
    label = "named"


class Unlabelled(ga.ServiceActor):
    pass


class Stopped:
    def now(self) -> float:
        return 0.0


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"/tmp"


class Secret:
    def __repr__(self) -> str:
        raise RuntimeError("no name")


NOT_NUMBERS: tuple[Any, ...] = ("1", None, True, 1j, math.nan, [1.0], Secret(), np.ones(2))
NOT_COUNTS: tuple[Any, ...] = ("1", None, True, 0, -1, 1.0, math.inf, Secret(), np.ones(2))
NOT_FLAGS: tuple[Any, ...] = ("no", None, 1, 0.0, Secret(), np.ones(2))
NOT_PATHS: tuple[Any, ...] = (5, b"..", BytesPath(), "", "a\0b", True, "~nobody-of-this-name/x", "\ud800")


def cases(bad: dict[str, tuple[Any, ...]]) -> list[tuple[str, Any]]:
    return [(field, value) for field, values in bad.items() for value in values]


CONTEXT = cases(
    {
        "arch": ("", "bogus", "90a", 90, b"sm_90a", np.ones(2)),
        "max_in_flight": NOT_COUNTS,
        "mailbox_capacity": NOT_COUNTS,
        "cache_max_bytes": NOT_COUNTS,
        "compile_threads": NOT_COUNTS,
        "cache_dir": NOT_PATHS,
        "prewarmed": (None, "folder", Path("folder"), 3, *((path,) for path in NOT_PATHS), (None,), {"a": 1}),
        "offline": NOT_FLAGS,
        "compile_on_mock": NOT_FLAGS,
        "mock": ({}, 1, "mock", ga.EmulationOptions(), ga.MockOptions),
        "emulation": ({}, 1, "emulated", ga.MockOptions()),
        "fault_plan": (1, {}, (), FaultPlan),
        "restart": (None, 1, "one_for_one", ga.MockOptions()),
        "actors": (
            1,
            None,
            Named,
            (int,),
            ("named",),
            (Named, Namesake),
            (Named, Named),
            (Secret(),),
            (ga.ServiceActor,),
        ),
        "default_timeout": ("1", True, 1j, math.nan, math.inf, 0, -1.0, Secret()),
        "hang_timeout": ("x", True, math.nan, 0, -1.0, Secret()),
        "drain_timeout": (*NOT_NUMBERS, -1.0),
        "coalesce_max": NOT_COUNTS,
        "coalesce_delay_us": (*NOT_NUMBERS, -1.0),
        "clock": (None, 1, Stopped(), MockClock),
        "on_event": (1, "print", []),
    }
)
MOCK = cases(
    {
        "compute": NOT_FLAGS,
        "dtype": ("float16", None, np.float32, ["float32"], np.ones(2)),
        "latency": (*NOT_NUMBERS, math.inf, -1.0, 10**400),
    }
)
EMULATION = cases(
    {
        "delivery": ("soon", None, ["late"], np.ones(2)),
        "schedule": ("soon", None, ["lane"], np.ones(2)),
        "seed": ("x", None, True, 1.5, -1, 1 << 64),
        "threads": NOT_COUNTS,
        "contraction": NOT_FLAGS,
        "arithmetic": ("exact", None, ["nearest"], np.ones(2)),
    }
)
RESTART = cases(
    {
        "strategy": ("one", None, ["one_for_one"], np.ones(2)),
        "max_restarts": ("1", None, True, -1, 1.5, Secret()),
        "window": (*NOT_NUMBERS, math.inf, 0.0, -1.0),
        "backoff": (*NOT_NUMBERS, math.inf, -1.0),
        "backoff_factor": (*NOT_NUMBERS, math.inf, 0.5),
        "backoff_max": (*NOT_NUMBERS, math.inf, 0.001),
    }
)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (kind, field, value)
        for kind, table in (
            (ga.ContextOptions, CONTEXT),
            (ga.MockOptions, MOCK),
            (ga.EmulationOptions, EMULATION),
            (ga.RestartPolicy, RESTART),
        )
        for field, value in table
    ],
    ids=lambda value: value if isinstance(value, str) and value.isprintable() else type(value).__name__,
)
def test_a_setting_of_the_wrong_kind_is_refused_by_name(kind: Any, field: str, value: Any) -> None:
    with pytest.raises(ga.InvalidRequest) as caught:
        kind(**{field: value})
    assert caught.value.field == field
    assert caught.value.reason
    assert len(str(caught.value)) < 1000


def test_an_inexact_arch_names_the_exact_one_at_once() -> None:
    with pytest.raises(ga.Unsupported) as caught:
        ga.ContextOptions(arch="sm_90")
    assert (caught.value.field, caught.value.nearest) == ("arch", "sm_90a")


def test_settings_that_hold_are_taken() -> None:
    options = ga.ContextOptions(
        arch="sm_80",
        max_in_flight=np.int64(3),  # type: ignore[arg-type]
        cache_dir=Path("here"),
        prewarmed=["a", Path("b")],  # type: ignore[arg-type]
        actors=[Named, Unlabelled],  # type: ignore[arg-type]
        default_timeout=1,
        hang_timeout=math.inf,
        drain_timeout=math.inf,
        mock=ga.MockOptions(latency=np.float32(0.5)),  # type: ignore[arg-type]
        emulation=ga.EmulationOptions(seed=(1 << 64) - 1),
        fault_plan=FaultPlan(),
        clock=MockClock(),
        on_event=print,
    )
    assert options.prewarmed == ("a", Path("b"))
    assert options.actors == (Named, Unlabelled)
    assert options.cache_path == Path("here").absolute()
    hash(options.restart)


def test_a_tilde_is_the_users_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    options = ga.ContextOptions(cache_dir="~/cubins", prewarmed=("~/warmed", "/opt/warmed"))
    assert options.cache_path == Path("/somewhere/cubins")
    assert options.prewarmed_paths == (Path("/somewhere/warmed"), Path("/opt/warmed"))
    assert ga.ContextOptions().cache_path is None


def test_the_option_of_recordings_is_deprecated_and_says_what_to_use() -> None:
    with pytest.warns(DeprecationWarning, match=r"flash_attn\.prepare") as warned:
        options = ga.ContextOptions(record_launches=True)
    assert warned[0].filename == __file__
    with ga.open_context("mock", options) as ctx:
        assert tuple(ctx.flash_attn.recording_stats()) == (0, 0, 0)


def test_a_backoff_never_outgrows_its_ceiling() -> None:
    policy = ga.RestartPolicy(max_restarts=10**6, backoff_factor=1e300, backoff_max=7.0)
    assert policy.delay(5000) == 7.0
    assert ga.RestartPolicy(backoff=0.0, backoff_factor=1e300).delay(5000) == 0.0


@pytest.mark.parametrize("options", [{"arch": "sm_80"}, "sm_80", ga.MockOptions(), 0, ga.ContextOptions])
def test_options_of_another_type_are_refused(options: Any) -> None:
    with pytest.raises(ga.InvalidRequest) as caught:
        ga.open_context("mock", options)
    assert caught.value.field == "options"
