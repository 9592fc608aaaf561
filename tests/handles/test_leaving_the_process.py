"""What may leave a process and what may not, when it is pickled, copied or forked."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases.graphs import OUT, arrays_of, attention
from support.service import ask, rows

import gpu_actors as ga

CACHE = {"num_blocks": 4, "page_size": 8, "kv_heads": 1, "head_dim": 8, "dtype": "float32"}


# Sequences


def test_a_sequence_of_another_process_is_stale() -> None:
    """This process has a sequence of the same numbers."""
    row = np.full((1, 1, 8), 7.0, np.float32)
    with ga.open_context("mock") as ctx, ctx.kv_cache(**CACHE) as cache:
        own = cache.create().result(30.0)
        cache.append(own, row, row).result(30.0)
        seq = pickle.loads(pickle.dumps(dataclasses.replace(own, incarnation=b"another.")))
        for reply in (
            cache.attend(row[None], [seq]),
            cache.free(seq),
            cache.fork(seq),
            cache.append(seq, row, row),
            cache.truncate(seq, 0),
        ):
            with pytest.raises(ga.StaleBuffer):
                reply.result(30.0)
        with pytest.raises(ga.StaleBuffer, match="belongs to a cache of another process"):
            cache.length(seq)


def test_a_sequence_is_the_same_after_pickling_in_its_own_process() -> None:
    with ga.open_context("mock") as ctx, ctx.kv_cache(**CACHE) as cache:
        seq = cache.create().result(30.0)
        assert pickle.loads(pickle.dumps(seq)) == copy.deepcopy(seq) == seq
        assert cache.length(pickle.loads(pickle.dumps(seq))) == 0
        assert "incarnation" not in repr(seq)


# Objects that stay in the process


def test_what_belongs_to_the_process_is_neither_pickled_nor_copied() -> None:
    opener = ga.open_context("mock")
    with opener as ctx, ctx.kv_cache(**CACHE) as cache:
        reply, beginning = ask(ctx), cache.create()
        bound = [opener, ctx, ctx.flash_attn, ctx.cudnn, ctx.nvrtc, cache, reply, beginning, reply._call]
        bound.append(ctx.actor(ga.KvCacheActor))
        for thing in bound:
            for use in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(ga.NotCopyable, match=f"a {type(thing).__name__} belongs to the process") as caught:
                    use(thing)
                assert isinstance(caught.value, TypeError)
        with pytest.raises(ga.NotCopyable):
            pickle.dumps({"reply": [reply]})
        beginning.result(30.0)


# Objects that may be pickled


class Odd:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        return "<odd>"


class Particular(Exception):
    """Can be pickled but not loaded."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} {other}")


ERRORS: dict[str, Callable[[], ga.GpuActorsError]] = {
    "a value": lambda: ga.InvalidRequest("q", np.float32(3), "must be an array"),
    "nearest": lambda: ga.Unsupported("head_dim", 300, "too wide", 256),
    "retry_after": lambda: ga.Overloaded("full", retry_after=2.5),
    "log": lambda: ga.CompileError("no", "the log", "line 3"),
    "generation": lambda: ga.ContextLost("gone", 4),
    "message": lambda: ga.DeadlineExceeded("late"),
    "an odd value": lambda: ga.InvalidRequest("q", Odd(), "must be an array"),
    "a function": lambda: ga.InvalidRequest("q", [lambda: None, 3], "must be an array"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_pickled_with_its_type_fields_and_notes(name: str) -> None:
    error = ERRORS[name]()
    error.add_note("seen at noon")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.__notes__) == (type(error), str(error), ["seen at noon"])
    assert vars(again).keys() == vars(error).keys()
    if "odd" not in name and "function" not in name:
        assert (again.args, vars(again)) == (error.args, vars(error))
    assert pickle.loads(pickle.dumps(again)).args == again.args or "odd" in name or "function" in name


def test_an_error_is_pickled_with_its_cause_where_that_can_be() -> None:
    for cause, kept in ((ZeroDivisionError("x"), True), (Particular(1, 2), False), (ValueError(Odd()), False)):
        error = ga.ActorFailed("it failed")
        error.__cause__ = cause
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is ga.ActorFailed
        assert isinstance(again.__cause__, type(cause)) is kept


def test_an_error_of_ones_own_is_pickled_whatever_its_constructor_takes() -> None:
    error = OwnError(1, other=2)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.both, str(again)) == (OwnError, (1, 2), "own")


class OwnError(ga.GpuActorsError):
    def __init__(self, one: int, *, other: int) -> None:
        super().__init__("own")
        self.both = (one, other)


def messages() -> list[Any]:
    q = rows(2)
    params = ga.AttentionParams(1, 1, 2, 2, 1, 8)
    seq = ga.KvSequence(1, 2, 3)
    return [
        ga.FlashForward(q, q, q, causal=True),
        ga.FlashBackward(q=q, k=q, v=q, dout=q, lse=q),
        ga.PagedForward(q=q, k_cache=q, v_cache=q, cache_seqlens=q),
        ga.BatchedDecode(q=q, k_caches=[q], v_caches=[q], seq_lens=q),
        ga.MhaForward(params=params, q=q, k=q, v=q),
        ga.MhaBackward(params=params, q=q, k=q, v=q, o=q, do=q, stats=q),
        ga.AppendRows(cache=1, seqs=[seq], k=q, v=q),
        ga.AttendCache(cache=1, seqs=seq, q=q),
        ga.KvCacheSpec(**CACHE),
        ga.AttentionOutput(q, None),
        ga.AttentionGradients(q, q, q),
        ga.MhaOutput(q, q),
        ga.KernelSource("k", "source", ("entry",), headers={"h.h": ""}, macros={"A": "1"}),
        ga.ContextOptions(fault_plan=None),
    ]


def test_a_request_and_a_result_are_pickled_whole() -> None:
    for message in messages():
        again = pickle.loads(pickle.dumps(message))
        assert type(again) is type(message)
        for one, other in zip(fields(message), fields(again), strict=True):
            if isinstance(one, np.ndarray):
                np.testing.assert_array_equal(one, other, strict=True)
            elif not isinstance(one, list):
                assert one == other or type(one) is type(other), one


def fields(message: Any) -> list[Any]:
    if isinstance(message, tuple):
        return list(message)
    return [getattr(message, name) for name in message.__dataclass_fields__]


def test_a_graph_that_travelled_goes_on_and_is_answered_as_before() -> None:
    graph = pickle.loads(pickle.dumps(attention()))
    assert graph.signature() == attention().signature()
    for made in (graph, attention()):
        made.output(made.softmax(made.tensor(uid=9, dims=(1, 1, 4, 4), dtype="float32")), uid=10)
    assert attention().tensors.keys() <= graph.tensors.keys()
    with ga.open_context("mock") as ctx:
        arrays = arrays_of()
        first, second = (ctx.cudnn.execute(sent, arrays).result(30.0) for sent in (attention(), twice(attention())))
        np.testing.assert_array_equal(first[OUT], second[OUT])


def twice(graph: ga.OperationGraph) -> ga.OperationGraph:
    return pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(graph))))
