"""Arena and packing: arrays that cross keep shape, dtype, strides and identity, and every block comes back."""

from __future__ import annotations

import dataclasses
import enum
import gc
import itertools
import os
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.isolation.arena import Arena
from gpu_actors.isolation.packing import INLINE, Argument, pack, unpack
from gpu_actors.isolation.pipe import PipeChannel, Unreadable
from gpu_actors.isolation.records import Counts, Ping, Request, Response

FORMS: dict[str, Any] = {
    "plain": lambda x: x,
    "transposed": lambda x: x.transpose(2, 0, 1),
    "every other": lambda x: x[:, ::2],
    "backwards": lambda x: x[::-1, :, ::-1],
    "one column": lambda x: x[:, :, 3],
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "read-only": lambda x: (x.setflags(write=False), x)[1],
    "empty": lambda x: x[:0],
    "scalar": lambda x: x[1, 2, 3, ...],
}


def sent(record: Any, arena: Arena, known: list[Argument] | None = None, own: Any = ()) -> tuple[Any, Any, list[int]]:
    """A record on the other side, its packed form and arguments, and the blocks that came back."""
    packed = pack(record, arena, known or ())
    returned: list[int] = []
    found, arguments = unpack(packed.places, packed.body, arena, returned.append, own)
    return found, (packed, arguments), returned


@pytest.mark.parametrize("form", FORMS)
def test_an_array_crosses_as_it_is(form: str) -> None:
    arena = Arena(size=1 << 24)
    dtypes: tuple[Any, ...] = ("float32", "float16", "bool", "uint64", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2)
    for dtype, size in itertools.product(dtypes, (4, 40)):
        given = np.asarray(FORMS[form](np.arange(6 * size * 32).reshape(6, size, 32).astype(dtype)))
        (got,), (packed, arguments), returned = sent((given,), arena)
        assert (got.shape, got.dtype, got.strides) == (given.shape, given.dtype, given.strides)
        assert got.tobytes() == given.tobytes()
        assert got.flags.writeable == given.flags.writeable
        assert bool(packed.blocks) == (arena.used() > 0)
        if packed.blocks:
            del got, arguments
            assert returned == packed.blocks
            arena.give(returned[0])
            assert arena.used() == 0


def test_an_array_of_structures_and_one_of_another_byte_order_cross() -> None:
    arena = Arena(size=1 << 20)
    for given in (np.zeros(3, [("a", "i4"), ("b", "f8")]), np.arange(5, dtype=">i4"), np.array(["x", "yz"])):
        (got,), _, _ = sent((given,), arena)
        assert got.dtype == given.dtype
        assert got.tolist() == given.tolist()


def test_one_array_named_twice_is_one_array_there() -> None:
    arena = Arena(size=1 << 22)
    for size in (8, 4096):
        x = np.ones((1, size, 1, 8), np.float32)
        view = x[:]
        message = ga.FlashForward(x, x, view)
        ask, _, _ = sent(Request(1, "flash_attn", message, None, 0), arena)
        assert ask.message.q is ask.message.k
        (one, other, again), _, _ = sent(([x], x, view), arena)
        assert one[0] is other
        if x.nbytes > INLINE:
            other[...] = 5.0
            assert np.all(again == 5.0)  # the same memory, as on this side


def test_nested_arrays_keep_their_places() -> None:
    arena = Arena(size=1 << 22)
    caches = [np.full((2, 8, 4), value, np.float32) for value in range(3)]
    q, lengths = np.full((3, 2, 4), 9, np.float32), np.array([1, 2, 3], np.int32)
    message = ga.BatchedDecode(q=q, k_caches=caches, v_caches=caches[::-1], seq_lens=lengths, sinks=np.zeros(2))
    got = sent(Request(1, "flash_attn", message, 0.5, 2), arena)[0].message
    assert [cache[0, 0, 0] for cache in got.k_caches] == [0, 1, 2]
    assert [cache[0, 0, 0] for cache in got.v_caches] == [2, 1, 0]
    assert got.seq_lens.tolist() == [1, 2, 3]
    assert got.sinks.tolist() == [0, 0]
    assert got.q[0, 0, 0] == 9


@pytest.mark.parametrize("size", [16, 65536])
@pytest.mark.parametrize("where", ["private", "shared", "strided"])
def test_an_answer_writes_into_the_array_that_was_given_for_it(size: int, where: str) -> None:
    requests, answers = Arena(size=1 << 22), Arena(size=1 << 22)
    q = np.ones(size, np.float32)
    out = {
        "private": lambda: np.zeros(size, np.float32),
        "shared": lambda: requests.empty(size),
        "strided": lambda: np.zeros(2 * size, np.float32)[::2],
    }[where]()
    ask = Request(1, "flash_attn", ga.FlashForward(q, q, q, out=out), None, 0)
    packed = pack(ask, requests)
    there, arguments = unpack(packed.places, packed.body, requests, lambda _: None, ())
    there.message.out[...] = 3.0
    answer = Response(1, ga.AttentionOutput(there.message.out, there.message.q), None, Counts(1, 1, 0, 0), None)
    back = pack(answer, answers, arguments)
    assert not back.blocks  # nothing is copied into the arena of the answers
    got, _ = unpack(back.places, back.body, answers, print, packed.arguments, True)
    assert got.value.out is out
    assert got.value.lse is q
    assert np.all(out == 3.0)
    assert np.all(q == 1.0)
    late, _ = unpack(back.places, back.body, answers, print, (), True)  # after the request was given up
    assert late.value.out is None


def test_a_result_is_copied_out_before_its_block_goes_back() -> None:
    arena = Arena(size=1 << 22)
    packed = pack(Response(1, np.full(10000, 4.0), None, None, None), arena)
    seen: list[int] = []
    got, _ = unpack(packed.places, packed.body, arena, seen.append, (), True)
    arena.memory(packed.blocks[0], 80000)[...] = 0
    assert seen == packed.blocks
    assert np.all(got.value == 4.0)


class Unknown:
    def __reduce__(self) -> Any:
        return int, ("not a number",)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("beside", [None, Unknown()], ids=["too large to copy", "cannot be made"])
def test_a_record_that_cannot_be_read_gives_all_blocks_back(beside: Any, copies: bool) -> None:
    arena = Arena(size=1 << 24)
    one = arena.empty(10000)
    wide = np.broadcast_to(one[:1], (1 << 60,)) if beside is None else one  # more than can be copied
    packed = pack((np.ones(10000), wide, np.ones(20000), beside), arena, (), [4096, 8192])
    seen: list[int] = []
    returned: list[int] = []

    def read() -> Any:
        return unpack(packed.places, packed.body, arena, seen.append, (), copies, returned.extend)

    if beside is None and not copies:
        read()
    else:
        with pytest.raises(MemoryError if beside is None else ValueError):
            read()
    gc.collect()
    assert returned == [4096, 8192]
    assert sorted(seen) == sorted(packed.blocks)
    assert len(packed.blocks) == 3


class Channels:
    """A program's end and a worker's, and the records that each has received."""

    def __init__(self) -> None:
        self.requests, self.answers = Arena(size=1 << 24), Arena(size=1 << 24)
        self.asked: list[Any] = []
        self.answered: list[Any] = []
        here, there = socket.socketpair()
        self.program = PipeChannel(
            here, True, self.requests, self.answers, lambda _, record: self.answered.append(record)
        )
        self.worker = PipeChannel(
            there, False, self.answers, self.requests, lambda _, record: self.asked.append(record)
        )

    def ask(self, number: int, record: Any) -> None:
        self.program.post(number, self.program.pack(record, number))
        self.worker.receive()

    def answer(self, record: Any) -> None:
        self.worker.post(1, self.worker.pack(record, 1))
        self.program.receive()


@pytest.fixture
def channels() -> Iterator[Channels]:
    both = Channels()
    yield both
    both.program.close()
    both.worker.close()


def test_an_answer_that_cannot_be_read_frees_its_blocks_and_those_of_its_request(channels: Channels) -> None:
    channels.ask(1, Request(1, "flash_attn", (np.ones(10000),), None, 0))
    channels.worker.forget(1)
    channels.asked.clear()
    gc.collect()
    channels.answer(Response(1, (np.ones(10000), Unknown()), None, None, None))
    assert isinstance(channels.answered.pop(), Unreadable)
    assert channels.requests.used() == 0
    channels.ask(2, Ping())
    assert channels.answers.used() == 0


def refuse() -> None:
    raise ga.InvalidRequest("message", 3, "must be another")


class Refusing:
    def __reduce__(self) -> Any:
        return refuse, ()


def test_the_error_of_a_request_that_cannot_be_read_holds_no_block(channels: Channels) -> None:
    channels.ask(1, Request(1, "flash_attn", (np.ones(10000), Refusing()), None, 0))
    error = channels.asked[0].error
    assert isinstance(error, ga.InvalidRequest)
    gc.collect()
    channels.answer(Response(1, None, error, None, None))
    assert channels.requests.used() == 0


def test_free_memory_that_stays_resident_is_bounded() -> None:
    arena = Arena(size=1 << 30)
    draw = random.Random(7)
    held: list[int] = []
    mib = 1 << 20
    for _ in range(100):
        if held and draw.random() < 0.5:
            arena.give(held.pop(draw.randrange(len(held))))
        else:
            nbytes = draw.choice((1, 3, 10, 30, 50)) * mib
            if arena.used() + nbytes <= 300 * mib:
                start = arena.take(nbytes)
                arena.memory(start, nbytes)[::4096] = 1
                held.append(start)
        resident = os.fstat(arena.fd).st_blocks * 512
        assert resident <= arena.used() + 64 * mib
    for start in held:
        arena.give(start)
    assert 0 < os.fstat(arena.fd).st_blocks * 512 <= 64 * mib  # some memory is kept for the next blocks
    fd = arena.fd
    arena.unmap()
    with pytest.raises(OSError):
        os.fstat(fd)


class Local:
    def __reduce__(self) -> Any:
        raise TypeError("stays here")


class OnDevice:
    __cuda_array_interface__: dict[str, Any] = {}


class ElsewhereByDlpack:
    dtype, shape = "float32", (1,)

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError

    def __dlpack_device__(self) -> tuple[int, int]:
        return 10, 0


@pytest.mark.parametrize("given", [Local(), OnDevice(), ElsewhereByDlpack(), lambda: 1, threading.Lock()])
def test_what_cannot_cross_is_an_invalid_request_and_holds_nothing(given: Any) -> None:
    arena = Arena(size=1 << 22)
    with pytest.raises(ga.InvalidRequest):
        pack((np.ones(100000), given), arena)
    assert arena.used() == 0
    with pytest.raises(ga.InvalidRequest, match="shared memory"):
        pack((np.ones(100000), np.ones(1 << 20)), arena)
    assert arena.used() == 0


def test_errors_and_plain_messages_cross_whole() -> None:
    arena = Arena(size=1 << 20)
    cause = ga.LaunchError("deep")
    failed = ga.ActorFailed("it failed")
    failed.__cause__ = cause
    errors: list[Any] = [ga.Overloaded("full", 2.5), ga.Unsupported("q", 3, "no", nearest=4), failed, ValueError("x")]
    errors.append(ga.InvalidRequest("f", object(), "no"))
    for error in errors:
        got = sent(Response(1, None, error, None, None), arena)[0].error
        assert type(got) is type(error)
        assert vars(got).keys() == vars(error).keys()
        assert str(got).split(" at 0x")[0] == str(error).split(" at 0x")[0]
    assert str(sent(Response(1, None, failed, None, None), arena)[0].error.__cause__) == "deep"
    rope = ga.Rope(dim=16)
    for plain in (rope, ga.KvSequence(1, 2, 3), ga.Mask.causal(), ga.AttentionParams(1, 2, 3, 4, 2, 16)):
        assert sent((plain,), arena)[0] == (plain,)


class Urgent(enum.IntEnum):
    SOON = 3


class Elsewhere(ga.LaunchError):
    pass


def fields(message: Any) -> list[Any]:
    return [getattr(message, field.name) for field in dataclasses.fields(message)]


def test_a_frequent_request_comes_as_it_was_sent() -> None:
    arena = Arena(size=1 << 22)
    small, large = np.arange(8.0), np.arange(65536.0)
    message = ga.FlashForward(small, large, small, window_size=(3, -1), softmax_scale=0.125, causal=True)
    got, (_, arguments), _ = sent(Request(7, "flash_attn", message, None, 2), arena)
    assert (got.number, got.actor, got.left, got.priority) == (7, "flash_attn", None, 2)
    assert len(arguments) == 3
    for there, here in zip(fields(got.message), fields(message), strict=True):
        assert type(there) is type(here)
        assert np.array_equal(there, here)
    assert got.message.q is got.message.v
    three = ga.FlashForward(large, large + 1, large + 2)
    assert len(pack(Request(8, "flash_attn", three, None, 0), arena).blocks) == 1
    assert sent(Request(7, "", message, 1.5, 0), arena)[0].left == 1.5
    returned: list[int] = []
    packed = pack(Request(7, "", message, 1.5, 0), arena, (), [4096, 8192])
    unpack(packed.places, packed.body, arena, int, (), on_returned=returned.extend)
    assert returned == [4096, 8192]


def test_a_frequent_answer_comes_as_it_was_sent() -> None:
    arena = Arena(size=1 << 22)
    out = ga.AttentionOutput(np.arange(6.0), None, *(None,) * (len(ga.AttentionOutput._fields) - 2))
    got, _, _ = sent(Response(9, out, None, Counts(1, 2, 3, 4), None), arena)
    assert (got.number, got.error, got.counts, got.health) == (9, None, Counts(1, 2, 3, 4), None)
    assert type(got.counts) is Counts
    assert type(got.value) is ga.AttentionOutput
    assert got.value.out.tolist() == out.out.tolist()
    for value in (None, 3, 2.5, True, "text", b"bytes"):
        got, _, _ = sent(Response(9, value, None, None, None), arena)
        assert (got.value, type(got.value), got.counts) == (value, type(value), None)
    lost = ga.WorkerLost("it ended", 3, "worker-2", "no")
    got, _, _ = sent(Response(9, None, lost, None, None), arena)
    assert (type(got.error), vars(got.error), str(got.error)) == (ga.WorkerLost, vars(lost), str(lost))


def test_records_of_any_values_come_as_they_were_sent() -> None:
    arena = Arena(size=1 << 22)
    x = np.arange(8.0)
    message = ga.FlashForward(x, x, x)
    caused = ga.LaunchError("it failed")
    caused.__cause__ = ValueError("deep")
    objects = np.array([{"a": 1}, None], object)
    sequence = ga.KvSequence(1, 2, 3)
    with ga.open_context("mock") as ctx:
        health = ctx.health()
    for record in (
        Request(1, "flash_attn", message, np.float64(2.5), 0),
        Request(1, "flash_attn", message, None, Urgent.SOON),
        Request(1, "flash_attn", ga.FlashForward(x, x, x, softmax_scale=np.float32(0.5)), None, 0),
        Request(1, "flash_attn", ga.FlashForward(x, objects, x), None, 0),
        Request(1, "kv_cache", (sequence, x), None, 0),
        Response(1, sequence, None, None, None),
        Response(1, None, caused, None, None),
        Response(1, None, Elsewhere("of another module"), None, None),
        Response(1, None, ValueError("not ours"), None, None),
        Response(1, None, None, None, health),
    ):
        got, _, _ = sent(record, arena)
        assert type(got) is type(record)
        for there, here in zip(got, record, strict=True):
            assert type(there) is type(here)
    got, (packed, _), _ = sent(Request(1, "flash_attn", ga.FlashForward(x, objects, x), None, 0), arena)
    assert not any(argument.array.dtype.hasobject for argument in packed.arguments)  # addresses mean nothing there
    assert got.message.k.tolist() == objects.tolist()
    assert sent(Response(1, None, caused, None, None), arena)[0].error.__cause__.args == ("deep",)


def test_blocks_are_taken_given_and_joined_again() -> None:
    arena, chance = Arena(size=1 << 20), random.Random(3)
    blocks: dict[int, int] = {}
    for turn in range(2000):
        if blocks and (turn % 3 == 0 or len(blocks) > 40):
            start = chance.choice(list(blocks))
            arena.give(start)
            del blocks[start]
            continue
        size = chance.randint(1, 30000)
        try:
            start = arena.take(size)
        except MemoryError:
            continue
        for other, length in blocks.items():
            assert start + size <= other or other + length <= start
        blocks[start] = size
        arena.memory(start, size)[...] = turn % 251
    for start in blocks:
        arena.give(start)
    arena.give(4096)  # an address without a block is ignored
    assert arena.take(1 << 20) == 0  # the whole arena is one free block again


def test_a_block_is_free_after_its_last_user() -> None:
    arena = Arena(size=1 << 20)
    array = arena.empty((100, 100))
    start = arena.find(array.__array_interface__["data"][0])
    assert start is not None
    part = array[3:, ::2]
    assert arena.find(part.__array_interface__["data"][0]) == start
    arena.hold(start)
    del array
    assert arena.used() > 0
    del part
    arena.give(start)
    assert arena.used() == 0
    assert arena.find(np.ones(3).__array_interface__["data"][0]) is None


@pytest.mark.parametrize("shape", [7, (), (3, 0), (2, 3)])
def test_an_empty_array_has_the_shape_asked_for(shape: Any) -> None:
    arena = Arena(size=1 << 16)
    array = arena.empty(shape, np.int16)
    assert array.shape == np.empty(shape).shape
    assert array.dtype == np.int16
    array[...] = 1
