"""Adopts the arrays of requests, for all actors.

A message is a dataclass, and `array_fields` says which of its fields hold arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from gpu_actors.arrays.adopt import Adopted, CallerNotes, adopt, check_device, check_placement, is_on_device
from gpu_actors.arrays.device_array import DeviceArray
from gpu_actors.attention.block_mask import LISTS, BlockMask
from gpu_actors.attention.requests import array_fields

__all__ = ["adopt_request", "changed", "is_brief", "take_in"]

Message = TypeVar("Message")

_LITTLE = 1 << 16
"""Host arrays of this many bytes are copied in less time than a thread takes to wake."""


def adopt_request(message: Message, device: str, notes: CallerNotes | None = None) -> tuple[Message, Adopted | None]:
    """Return the message with arrays that this package can read, and its q as adopted if that is no NumPy array.

    device: "cpu" or "cuda:N", where arrays may lie besides the host. notes: those of the thread that submitted the
    message; None: the calling thread's own.
    """
    changes: dict[str, Any] = {}
    template: Adopted | None = None
    kind: type = type(message)
    several_of = array_fields(kind)
    for name, given in zip(several_of, _arrays_of(kind)(message), strict=True):
        if given is None or type(given) is np.ndarray:
            continue
        if type(given) is DeviceArray and name != "q" and f"cuda:{given.device}" == device:
            check_placement(given, name)  # `take_in` would do no more
            continue
        if several_of[name] and isinstance(given, list | tuple):
            optional = kind.__dataclass_fields__[name].default is None  # type: ignore[attr-defined]
            changes[name] = [
                None if part is None and optional else take_in(part, f"{name}[{index}]", device, notes).array
                for index, part in enumerate(given)
            ]
            continue
        adopted = take_in(given, name, device, notes)
        if adopted.array is not given:
            changes[name] = adopted.array
        if name == "q":
            template = adopted
    mask = getattr(message, "block_mask", None)
    if isinstance(mask, BlockMask):
        changes["block_mask"] = _adopted_mask(mask, device, notes)
    return (changed(message, changes) if changes else message), template


def is_brief(message: object) -> bool:
    """Whether `adopt_request` and a launch copy little on the host: arrays lie on a device, or are small.

    False for arrays whose library may wait until they are computed, and for objects that are no arrays.
    """
    if getattr(message, "block_mask", None) is not None:
        return False
    nbytes = 0
    kind: type = type(message)
    for given in _arrays_of(kind)(message):
        if given is None:
            continue
        for array in given if type(given) in (list, tuple) else (given,):
            if type(array) is np.ndarray:
                nbytes += array.nbytes
            elif type(array) is not DeviceArray and not is_on_device(array):
                return False
    return nbytes <= _LITTLE


@functools.cache
def _arrays_of(kind: type) -> Callable[[object], tuple[Any, ...]]:
    """Return what reads the `array_fields` of a message, in their order."""
    names = tuple(array_fields(kind))
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda message: tuple(getattr(message, name) for name in names)


def changed(message: Message, changes: Mapping[str, Any]) -> Message:
    """Like `dataclasses.replace`, and faster if the message is not frozen: no message checks its fields."""
    kind: Any = type(message)
    if kind.__dataclass_params__.frozen:
        replaced: Message = dataclasses.replace(message, **changes)  # type: ignore[type-var]
        return replaced
    copy: Message = object.__new__(kind)
    for name in _fields(kind):
        setattr(copy, name, getattr(message, name))
    for name, value in changes.items():
        setattr(copy, name, value)
    return copy


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _adopted_mask(mask: BlockMask, device: str, notes: CallerNotes | None) -> BlockMask:
    changes: dict[str, Any] = {}
    for name in LISTS:
        if (array := getattr(mask, name)) is not None:
            changes[name] = take_in(array, f"block_mask.{name}", device, notes).array
    return dataclasses.replace(mask, **changes)


def take_in(array: Any, field: str, device: str, notes: CallerNotes | None = None) -> Adopted:
    """Adopt one array of a request. field: its name there. device, notes and errors: as for `adopt_request`."""
    adopted = adopt(array, field, notes)
    check_device(adopted, field, device)
    return adopted
