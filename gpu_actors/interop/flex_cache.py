"""A cache of traced score_mods and mask_mods. One is traced again only once something that it reads has changed."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["cached"]

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_FIXED = ("torch", "math", "builtins", "operator")
"""Modules whose names refer to the same objects at each call."""

_Entries = dict[Any, tuple[Any, list[Any], Any]]
_known: weakref.WeakKeyDictionary[Any, _Entries] = weakref.WeakKeyDictionary()


class _Opaque(Exception):
    """The function reads a value whose changes cannot be noticed."""


def cached(function: Callable[..., Any], kind: Any, trace: Callable[[], tuple[Any, bool]]) -> Any:
    """The result of ``trace()`` for a function, its captured values and ``kind``: the cached one, or a new one.

    trace: also returns whether its result may be kept. A function that reads what cannot be compared is always traced.
    """
    held: list[Any] = []
    try:
        read = tuple(_read(function, held, ()))
    except _Opaque:
        return trace()[0]
    entries = _known.setdefault(function, {})
    found = entries.get(kind)
    if found is not None and found[0] == read:
        return found[2]
    traced, lasts = trace()
    if lasts:
        # An object that is held keeps its id. Another object could get the id of a freed one.
        entries[kind] = (read, held, traced)
    return traced


def _read(value: Any, held: list[Any], above: tuple[Any, ...]) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        held.append(value)
        yield (id(value), value._version, tuple(value.shape), value.dtype, value.device)
    elif type(value) in _PLAIN:
        yield (type(value), repr(value))  # not the value: 0.0 equals -0.0, and NaN does not equal itself
    elif type(value) is tuple:
        yield len(value)
        for item in value:
            yield from _read(item, held, above)
    elif _fixed(value):
        yield id(value)
    elif isinstance(value, types.FunctionType):
        held.append(value.__code__)
        yield id(value.__code__)
        if value not in above:
            yield from _read_function(value, held, (*above, value))
    else:
        raise _Opaque


def _fixed(value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        home = value.__name__
    elif isinstance(value, types.BuiltinFunctionType | type) or (
        isinstance(value, types.FunctionType) and not value.__closure__
    ):
        home = value.__module__ or ""
    else:
        return False
    return home.partition(".")[0] in _FIXED


def _read_function(function: types.FunctionType, held: list[Any], above: tuple[Any, ...]) -> Iterator[Any]:
    try:
        captured = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell that is still empty
        raise _Opaque from None
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    names = sorted(_names(function.__code__))
    read = [function.__globals__[name] for name in names if name in function.__globals__]
    for value in (*captured, *defaults, *read):
        yield from _read(value, held, above)


def _names(code: types.CodeType) -> set[str]:
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))
