"""Senseless values are refused at once: 0-d arrays for lists, endless arrays, reprs that raise."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest
from support.service import rows

import gpu_actors as ga

ZERO_D = np.array(1.0)


class Speechless:
    """Its repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Nameless(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("no name")

    def __repr__(cls) -> str:
        raise RuntimeError("no repr")


class Odd(Speechless, metaclass=Nameless):
    """Neither it nor its type can be named."""


def test_lists_are_tuples_or_lists_and_names_are_names() -> None:
    for field in ("entry_points", "options"):
        for value in (ZERO_D, "scale", iter(["scale"]), {"scale": 1}, range(1 << 40)):
            with pytest.raises(ga.InvalidRequest, match="must be a tuple or list") as caught:
                ga.KernelSource("name", "source", **{"entry_points": ("scale",), field: value})
            assert caught.value.field == field
    graph = ga.OperationGraph()
    scores = graph.tensor(uid=1, dims=(1, 1, 2, 2), dtype="float32")
    for kind in (ZERO_D, np.array("max"), np.array(["max", "sum"]), None, ["max"]):
        with pytest.raises(ga.InvalidRequest, match="a reduction is one of") as caught:
            graph.reduction(scores, kind)
        assert caught.value.field == "reduction_0"
    for axes in (ZERO_D, np.array([2, 3]), range(1 << 40), None):
        with pytest.raises(ga.InvalidRequest, match="axes must be ints"):
            graph.reduction(scores, "max", axes)


def test_arrays_without_end_are_refused_in_a_process_that_could_not_hold_them() -> None:
    program = """
        import resource
        import numpy as np
        import gpu_actors as ga

        endless = np.broadcast_to(np.int32(1), (1 << 31,))
        q = np.zeros((1, 2, 1, 8), np.float32)
        with ga.open_context("mock") as ctx:
            ctx.flash_attn.forward(q, q, q).result(60)
            graph = ga.OperationGraph()
            tensor = graph.tensor(uid=1, dims=(1, 1, 2, 2), dtype="float32")
            x, pages = q[0], np.zeros((1, 8, 1, 8), np.float32)
            bounds = {"cu_seqlens_q": endless, "cu_seqlens_k": endless}
            cache = {"cache_seqlens": np.ones(1, np.int32), "block_table": np.zeros((1, 1), np.int32)}
            tries = {
                "entry_points": lambda: ga.KernelSource("name", "source", endless),
                "options": lambda: ga.KernelSource("name", "source", ("scale",), options=endless),
                "reduction": lambda: graph.reduction(tensor, endless),
                "axes": lambda: graph.reduction(tensor, "max", endless),
                "dims": lambda: graph.tensor(uid=2, dims=endless, dtype="float32"),
                "inputs": lambda: graph.node("softmax", endless, (2,)),
                "cu_seqlens": lambda: ctx.flash_attn.forward(x, x, x, **bounds).result(60),
                "cu_seqlens, max_seqlen": lambda: ctx.flash_attn.forward(
                    x, x, x, **bounds, max_seqlen_q=2, max_seqlen_k=2
                ).result(60),
                "paged": lambda: ctx.flash_attn.paged_forward(
                    x, pages, pages, **cache, cu_seqlens_q=endless, max_seqlen_q=2
                ).result(60),
            }
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
            for name, attempt in tries.items():
                try:
                    attempt()
                except ga.InvalidRequest as error:
                    assert "2147483648" in str(error), error
                else:
                    raise AssertionError(name)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)


def test_an_error_can_be_shown_whatever_its_value() -> None:
    for value in (Speechless(), [Speechless()], {1: Speechless()}, Odd(), Odd, ValueError(Odd())):
        for error in (ga.InvalidRequest("field", value, "reason"), ga.Unsupported("field", value, "reason", value)):
            assert "reason" in str(error)
            assert "reason" in repr(error)


def test_an_error_of_an_arrays_own_whose_repr_raises_is_answered() -> None:
    class Silent(Exception):
        __repr__ = __str__ = Speechless.__repr__

    class Broken:
        __dlpack__ = None

        def __dlpack_device__(self) -> None:
            raise Silent

    with ga.open_context("mock") as ctx:
        with pytest.raises(ga.InvalidRequest, match="whose repr raises") as caught:
            ctx.flash_attn.forward(rows(), Broken(), rows()).result(60)
        assert caught.value.field == "k"
        assert ctx.flash_attn.restarts == 0


# Names that the caller knows


def test_a_dtype_is_refused_by_the_name_of_its_array() -> None:
    with ga.open_context("mock") as ctx:
        x = np.zeros((1, 1, 1, 8), np.int8)
        params = ga.AttentionParams(1, 1, 1, 1, 1, 8)
        for reply in (
            ctx.flash_attn.forward(x, x, x),
            ctx.flash_attn.paged_forward(x, x, x, cache_seqlens=1),
            ctx.flash_attn.decode(x[0], x, x, 1),
            ctx.cudnn.mha_forward(params, x, x, x),
        ):
            with pytest.raises(ga.Unsupported, match="q='int8': must have one of the dtypes") as caught:
                reply.result(60)
            assert caught.value.nearest == "float32"


def test_a_dtype_that_cannot_be_hashed_is_refused_by_the_name_of_its_array() -> None:
    """The dtype of NumPy's strings hashes the object that stands for missing ones."""
    x, q = np.array(["1"] * 8, np.dtypes.StringDType(na_object=[])).reshape(1, 1, 1, 8), rows()  # type: ignore[call-overload]
    with ga.open_context("mock") as ctx:
        for field, reply in (
            ("q", ctx.flash_attn.forward(x, q, q)),
            ("out", ctx.flash_attn.forward(q, q, q, out=x)),
            ("bias", ctx.flash_attn.forward(q, q, q, bias=x)),
        ):
            with pytest.raises(ga.RequestError, match=f"^{field}='StringDType"):
                reply.result(60)
