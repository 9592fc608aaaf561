"""Shows values as short texts, without raising."""

from __future__ import annotations

import builtins
import dataclasses
import numbers
import reprlib
from typing import Any

__all__ = ["brief", "cut", "show"]

_WIDTH = 160


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _WIDTH
        self.maxtuple = self.maxlist = self.maxset = self.maxfrozenset = self.maxdict = 8
        self.maxlevel = 3

    def repr1(self, x: Any, level: int) -> str:
        try:
            return _array(x) or super().repr1(x, level)
        except Exception:
            # Python refuses to convert an int of more than a few thousand digits.
            if isinstance(x, int):
                return f"an int of {x.bit_length()} bits"
            return f"{_article(_type_name(x))} whose repr raises"

    def repr_instance(self, x: Any, level: int) -> str:
        # The base class would catch an error of repr and show an address instead.
        if isinstance(x, bytes | bytearray):
            x = x[:_WIDTH]
        text = builtins.repr(x)
        return cut(text, _WIDTH)

    def repr_int(self, x: int, level: int) -> str:
        return self.repr_instance(x, level)


def _array(x: Any) -> str:
    """An array's type, dtype and shape; "" for other values. It reads no elements: the device may be busy or lost."""
    if isinstance(x, type | numbers.Number) or any(base.__name__ == "generic" for base in type(x).__mro__):
        return ""
    dtype, shape = getattr(x, "dtype", None), getattr(x, "shape", None)
    if dtype is None or shape is None:
        return ""
    return f"{type(x).__name__} {str(dtype).removeprefix('torch.')}{list(shape)}"


def _type_name(x: object) -> str:
    """The name of a value's type, even if its metaclass overrides ``__name__``."""
    name: str = type.__dict__["__name__"].__get__(type(x))
    return name


def _article(noun: str) -> str:
    return f"an {noun}" if noun[:1].lower() in "aeiou" else f"a {noun}"


_shown = _Shown()


def show(value: object) -> str:
    """``repr(value)``, cut if it is long. An array is shown as its dtype and shape. Never raises."""
    return cut(_shown.repr(value), 2 * _WIDTH)


def cut(text: str, longest: int) -> str:
    """The text if it has at most ``longest`` characters, else its beginning and three dots in as many."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def brief(record: Any) -> str:
    """A short ``repr`` of a named tuple or dataclass: arrays by dtype and shape, and no field at its default."""
    if isinstance(record, tuple):
        names, defaults = record._fields, record._field_defaults  # type: ignore[attr-defined]
    else:
        # Required fields come first, even if a base class has options before them.
        fields = sorted(dataclasses.fields(record), key=lambda field: field.default is not dataclasses.MISSING)
        names, defaults = [field.name for field in fields], {field.name: field.default for field in fields}
    given = [(name, getattr(record, name)) for name in names]
    # Compared by identity: comparing an array gives an array.
    told = [f"{name}={show(value)}" for name, value in given if value is not defaults.get(name, dataclasses.MISSING)]
    return f"{type(record).__name__}({', '.join(told)})"
