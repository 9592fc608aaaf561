"""Packing: records as bytes, and their arrays in shared memory.

A record is pickled with protocol 5. Of frequent messages, results and errors only the fields are pickled: pickling
their classes would take longer. Arrays are left out of the pickle. Each is described beside it by its *place*:

    inline     a small array, whose bytes travel along
    block      bytes in the memory that the sender writes: copied there, or there already (`Arena.empty`)
    argument   the receiver's own array, from the request that this record answers. Its bytes travel along if it is
               small, or if the two sides do not share memory
    same       an array that this record has at an earlier place

An array keeps its shape, dtype and strides, so that a request is answered and refused as in one process. A view with
gaps takes as much room as it spans, but only its elements are written.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import operator
import pickle
import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple, Protocol

import numpy as np

from gpu_actors import errors
from gpu_actors.arrays.adopt import adopt, check_device, dtype_of, name_of
from gpu_actors.attention.mha import MhaBackward, MhaForward, MhaOutput
from gpu_actors.attention.requests import (
    AttentionGradients,
    AttentionOutput,
    BatchedDecode,
    FlashBackward,
    FlashForward,
    PagedForward,
)
from gpu_actors.errors import GpuActorsError, InvalidRequest
from gpu_actors.isolation.arena import Host
from gpu_actors.isolation.imports import Unpickler, refuse_unfinished
from gpu_actors.isolation.records import Counts, Request, Response
from gpu_actors.kv.requests import AppendRows, AttendCache, AttendLayer
from gpu_actors.process import Local

__all__ = ["INLINE", "Argument", "Memory", "Packed", "pack", "unpack"]

INLINE = 8192
"""The most bytes of an array that travels inside its record."""

# Messages and results whose fields are pickled in place of the object. The codes count them from 1.
_KINDS: tuple[type, ...] = (
    FlashForward,
    FlashBackward,
    PagedForward,
    BatchedDecode,
    MhaForward,
    MhaBackward,
    AppendRows,
    AttendCache,
    AttendLayer,
    AttentionOutput,
    AttentionGradients,
    MhaOutput,
)
_CODES = {kind: index + 1 for index, kind in enumerate(_KINDS)}
_PLAIN = frozenset((str, int, float, bool, bytes, type(None)))
_ERRORS = {name: getattr(errors, name) for name in errors.__all__}

_ALIGNED = 64  # bytes: a cache line

_IN_RECORD, _IN_BLOCK, _ARGUMENT, _SAME = range(4)
# Writeable, or the pickle would make its replacement a read-only view.
_MARK = pickle.PickleBuffer(bytearray())


class Memory(Protocol):
    """The memory of records' arrays, such as an `Arena`. shared: whether each side sees what the other one writes."""

    @property
    def shared(self) -> bool: ...

    @property
    def address(self) -> int: ...

    def find(self, address: int) -> int | None: ...

    def take(self, nbytes: int) -> int: ...

    def room(self, start: int) -> int: ...

    def hold(self, start: int) -> None: ...

    def give(self, start: int) -> None: ...

    def memory(self, start: int, nbytes: int) -> Host: ...


class Argument(NamedTuple):
    """An array of a request.

    original: the caller's object.
    array: the same memory as an ndarray.
    copy: its copy in a block, or None. The other side may write the copy.
    """

    original: Any
    array: Host
    copy: Host | None = None


class Packed(NamedTuple):
    """A record as bytes.

    places: the places and the blocks that the record gives back, pickled.
    body: the record, pickled.
    arguments: the arrays, in the order of their places.
    blocks: the blocks that are held for the record.
    """

    places: bytes
    body: bytes
    arguments: list[Argument]
    blocks: list[int]


def pack(record: Any, arena: Memory, known: Sequence[Argument] = (), returned: Sequence[int] = ()) -> Packed:
    """Return a record as bytes. known: arrays that the other side has. returned: the other side's blocks that go back.

    Raises `InvalidRequest` for a record that cannot cross.
    """
    packer = _Packer(arena, known)
    try:
        places, body = packer.packed(record, list(returned))
    except BaseException as error:
        for start in packer.blocks:
            arena.give(start)
        if isinstance(error, GpuActorsError) or not isinstance(error, Exception):
            raise
        if isinstance(error, MemoryError):
            raise InvalidRequest("arrays", "too large", f"must fit into shared memory: {error}") from error
        reason = f"cannot cross to another process: {error}"
        raise InvalidRequest("message", type(error).__name__, reason) from error
    return Packed(places, body, packer.arguments, packer.blocks)


def unpack(
    places: bytes,
    body: bytes,
    arena: Memory,
    release: Callable[[int], object],
    arguments: Sequence[Argument],
    copies: bool = False,
    on_returned: Callable[[list[int]], object] = lambda _: None,
) -> tuple[Any, list[Argument]]:
    """Return a record and its arrays, made from bytes. Both sides get their blocks back even if it cannot be read.

    arena: the arena that the other side writes.
    release: called with each of its blocks that this side no longer uses.
    arguments: the arrays of this side's request that the record answers.
    copies: whether arrays are copied out of their blocks, which are then released at once. Otherwise arrays lie in the
        blocks, and each block is released with its last array.
    on_returned: called with this side's blocks that the record gives back.
    """
    placed, returned, fields = pickle.loads(places)
    on_returned(returned)
    arrays: list[Any] = []
    waiting = {place[4]: place[7] for place in placed if place[0] == _IN_BLOCK}  # bytes of blocks held here, by start
    memories: dict[int, Host] = {}
    try:
        for place in placed:
            kind = place[0]
            if kind == _IN_BLOCK:
                start = place[4]
                memory = memories.get(start)
                if memory is None:
                    memories[start] = memory = arena.memory(start, waiting[start])
                    if not copies:
                        weakref.finalize(memory, release, start).atexit = False
                        del waiting[start]
                array = _over(memory, place)
                arrays.append(np.array(array, order="K") if copies else array)
            else:
                arrays.append(arrays[place[1]] if kind == _SAME else _array(place, arguments))
    finally:
        for start in waiting:
            release(start)
    nested = arrays[fields:] if fields else arrays
    record = _record(Unpickler(io.BytesIO(body), buffers=nested).load(), arrays)
    return record, [Argument(array, array) for array in arrays]


class _Packer:
    def __init__(self, arena: Memory, known: Sequence[Argument]) -> None:
        self.places: list[Any] = []
        self.arguments: list[Argument] = []
        self.blocks: list[int] = []
        self._arena = arena
        self._known = {id(argument.original): index for index, argument in enumerate(known)}
        self._same: dict[Any, Any] = {}
        self._places_of: dict[int, int] = {}
        # The block for copied arrays, the bytes that are left in it, and the bytes that the next one must have.
        self._current = self._left = self._foreseen = 0

    def packed(self, record: Any, returned: list[int]) -> tuple[bytes, bytes]:
        content = self._flat(record)
        fields = len(self.places)  # the arrays that are fields of the message come first
        file = io.BytesIO()
        # operator.not_ of a buffer is False, so pickle leaves the buffer out.
        pickler = _Pickler(file, 5, buffer_callback=operator.not_)
        pickler.extract = self._extract
        pickler.dump(content)
        return pickle.dumps((self.places, returned, fields), 5), file.getvalue()

    def _flat(self, record: Any) -> tuple[Any, ...]:
        if type(record) is Request:
            number, actor, message, left, priority = record
            return 0, number, actor, self._fields_of(message), left, priority
        if type(record) is Response:
            number, value, error, counts, health = record
            return 1, number, self._fields_of(value), _flat_error(error), counts and tuple(counts), health
        return 2, record

    def _fields_of(self, message: Any) -> tuple[int, Any, list[int]]:
        """The code of the message's kind, its fields without arrays, and the indices of the arrays."""
        kind: Any = type(message)
        code = _CODES.get(kind, 0)
        if not code:
            return 0, message, []
        values = list(message if isinstance(message, tuple) else _reader(kind)(message))
        at = [i for i, value in enumerate(values) if type(value) is np.ndarray and not value.dtype.hasobject]
        # One block for all arrays costs a fraction of one block for each.
        self._foreseen = sum([values[index].nbytes + _ALIGNED for index in at])
        for index in at:
            self._extract(values[index], values[index])
            values[index] = None
        return code, values, at

    def _extract(self, original: Any, array: Any) -> Any:
        earlier = self._places_of.setdefault(id(original), len(self.places))
        index = self._known.get(id(original))
        if earlier < len(self.places):  # the same object again: it is one object on the other side too
            self.places.append((_SAME, earlier))
            if index is None:
                self.arguments.append(self.arguments[earlier])
        elif index is not None:
            carried = array.nbytes <= INLINE or not self._arena.shared
            self.places.append((_ARGUMENT, index, array.tobytes() if carried else None))
        else:
            self._place(original, array)
        return _itself, (_MARK,)

    def _place(self, original: Any, array: Host) -> None:
        code = _code(array.dtype)
        copy = None
        if array.flags.c_contiguous and 0 < array.nbytes <= INLINE:  # even if it lies in a block
            place = _IN_RECORD, code, array.shape, array.strides, array.tobytes(), 0, array.flags.writeable
        else:
            place, copy = self._place_in_memory(code, array)
        self.places.append(place)
        self.arguments.append(Argument(original, array, copy))

    def _place_in_memory(self, code: Any, array: Host) -> tuple[Any, Host | None]:
        """The place of an array that is large or has gaps, and its copy, if there is one."""
        first = _first(array)
        begin, end = _extent(array, first)
        if (start := self._arena.find(begin)) is not None:
            if start not in self.blocks:
                self._arena.hold(start)
                self.blocks.append(start)
            return self._block(code, array, start, first - self._arena.address - start), None
        if array.nbytes <= INLINE and end - begin <= INLINE:
            data = _spanned(array, first, begin, end)
            return (_IN_RECORD, code, array.shape, array.strides, data, first - begin, array.flags.writeable), None
        # Arrays over the same elements still share them on the other side.
        key = (begin, end, array.shape, array.strides, code, array.flags.writeable)
        if key not in self._same:
            start, lead = self._room(end - begin)
            memory = self._arena.memory(start + lead, max(end - begin, 1))
            copy = _like(array, memory, first - begin)
            np.copyto(copy, array)
            self._same[key] = self._block(code, array, start, first - begin + lead), copy
        place, copy = self._same[key]
        return place, copy

    def _room(self, nbytes: int) -> tuple[int, int]:
        """Return a block with room for ``nbytes``, and the offset in it. The current block is used if it has room."""
        aligned = -(-nbytes // _ALIGNED) * _ALIGNED
        if aligned > self._left:
            self._current = self._arena.take(max(nbytes, self._foreseen))
            self.blocks.append(self._current)
            self._left, self._foreseen = self._arena.room(self._current), 0
        lead = self._arena.room(self._current) - self._left
        self._left = max(0, self._left - aligned)
        return self._current, lead

    def _block(self, code: Any, array: Host, start: int, first: int) -> Any:
        return _IN_BLOCK, code, array.shape, array.strides, start, first, array.flags.writeable, self._arena.room(start)


class _Pickler(pickle.Pickler):
    """extract: describes the place of an array, and returns the reduction that is pickled instead."""

    extract: Callable[[Any, Any], Any]

    def reducer_override(self, value: Any) -> Any:
        kind: Any = type(value)
        if kind is np.ndarray:
            return NotImplemented if value.dtype.hasobject else self.extract(value, value)
        if isinstance(value, (type, FunctionType)):
            refuse_unfinished(value.__module__)
            return NotImplemented
        if kind.__module__.startswith("gpu_actors."):
            if isinstance(value, Local):
                reason = f"a {kind.__name__} belongs to the process that made it"
                raise InvalidRequest("message", kind.__name__, reason)
            if _fields(kind) is not None:
                return _rebuilt, (kind, tuple(_reader(kind)(value)))
            return NotImplemented
        if isinstance(value, np.ndarray) or (hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__")):
            adopted = adopt(value, "array")
            check_device(adopted, "array", "cpu")
            return self.extract(value, adopted.array)
        if hasattr(kind, "__cuda_array_interface__"):
            raise InvalidRequest("array", kind.__name__, "must lie on the host: memory of a device cannot cross")
        return NotImplemented


# Places


def _array(place: Any, arguments: Sequence[Argument]) -> Any:
    if place[0] == _IN_RECORD:
        return _over(bytearray(place[4]), place)
    _, index, data = place
    if index >= len(arguments):
        return None  # the request was given up meanwhile
    argument = arguments[index]
    array = argument.array
    if data is not None:
        if array.flags.writeable:
            np.copyto(array, np.frombuffer(data, array.dtype).reshape(array.shape))
    elif argument.copy is not None and array.flags.writeable:
        np.copyto(array, argument.copy)
    return argument.original


def _over(memory: Any, place: Any) -> Host:
    array: Host = np.ndarray(place[2], _dtype(place[1]), memory, place[5], place[3])
    if not place[6]:
        array.flags.writeable = False
    return array


def _first(array: Host) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _extent(array: Host, first: int) -> tuple[int, int]:
    """The addresses of an array's first byte and of the byte after its last. first: the address of its element 0."""
    begin = end = first
    if array.flags.c_contiguous:
        return begin, end + array.nbytes
    if not array.size:
        return begin, end
    for extent, step in zip(array.shape, array.strides, strict=True):
        if step < 0:
            begin += (extent - 1) * step
        else:
            end += (extent - 1) * step
    return begin, end + array.itemsize


def _like(array: Host, memory: Host, offset: int) -> Host:
    return np.ndarray(array.shape, array.dtype, memory, offset, array.strides)


def _spanned(array: Host, first: int, begin: int, end: int) -> bytes:
    """The bytes that an array with gaps spans. Only those of its elements are copied."""
    memory = np.empty(max(end - begin, 1), np.uint8)
    np.copyto(_like(array, memory, first - begin), array)
    return memory.tobytes()


def _code(dtype: np.dtype[Any]) -> Any:
    try:
        return name_of(dtype)
    except KeyError:
        return pickle.dumps(dtype)


def _dtype(code: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = pickle.loads(code) if isinstance(code, bytes) else dtype_of(code)
    return dtype


def _record(flat: Any, arrays: Sequence[Any]) -> Any:
    """The record that `_Packer._flat` took apart. arrays: in the order of their places."""
    if flat[0] == 0:
        _, number, actor, message, left, priority = flat
        return Request(number, actor, _filled(message, arrays), left, priority)
    if flat[0] == 1:
        _, number, value, error, counts, health = flat
        error = _error(*error) if type(error) is tuple else error
        return Response(number, _filled(value, arrays), error, counts and Counts(*counts), health)
    return flat[1]


def _filled(fields: tuple[int, Any, list[int]], arrays: Sequence[Any]) -> Any:
    code, values, at = fields
    for place, index in enumerate(at):
        values[index] = arrays[place]
    if not code:
        return values
    kind = _KINDS[code - 1]
    return kind(*values) if issubclass(kind, tuple) else _rebuilt(kind, values)


def _flat_error(error: BaseException | None) -> Any:
    """The arguments of `_error`, or the error itself if it must be pickled whole."""
    kind = type(error)
    if error is None or _ERRORS.get(kind.__name__) is not kind or error.__cause__ is not None:
        return error
    plain = all(type(value) in _PLAIN for value in (*error.args, *vars(error).values()))
    return (kind.__name__, error.args, vars(error)) if plain else error


def _error(name: str, args: tuple[Any, ...], fields: dict[str, Any]) -> GpuActorsError:
    kind = _ERRORS[name]
    error: GpuActorsError = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(fields)
    return error


# Called by pickles


def _itself(array: Any) -> Any:
    return array


@functools.cache
def _fields(kind: type) -> tuple[str, ...] | None:
    """The field names of a dataclass with slots, whose own pickling would write each name. None for other types."""
    plain = dataclasses.is_dataclass(kind) and hasattr(kind, "__slots__") and kind.__reduce__ is object.__reduce__
    return tuple(field.name for field in dataclasses.fields(kind)) if plain else None


@functools.cache
def _reader(kind: type) -> Callable[[Any], Sequence[Any]]:
    names = _fields(kind) or ()
    # attrgetter with one name returns the value alone, in no tuple.
    return operator.attrgetter(*names) if len(names) > 1 else lambda message: [getattr(message, x) for x in names]


@functools.cache
def _writers(kind: type) -> list[Callable[[Any, Any], None]]:
    """The functions that set the slots. They work even if the class is frozen."""
    return [getattr(kind, name).__set__ for name in _fields(kind) or ()]


def _rebuilt(kind: type, values: Sequence[Any]) -> Any:
    message: Any = object.__new__(kind)
    for write, value in zip(_writers(kind), values, strict=True):
        write(message, value)
    return message
