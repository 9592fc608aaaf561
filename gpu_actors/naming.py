"""What a refusal calls the argument at fault: as the caller's message does, whatever it is called further inside.

A message type whose fields have other names there says so by ``argument_names``, from the inner name to its own.
"""

from __future__ import annotations

from gpu_actors.errors import RequestError

__all__ = ["by_argument"]


def by_argument(error: RequestError, message: object) -> RequestError:
    """The same error, with the field as the sender of the message knows it."""
    name = getattr(type(message), "argument_names", {}).get(error.field)
    return error if name is None else type(error)(name, *error.args[1:])
