"""Names the argument at fault in a refusal as the caller's message does.

Inside, a field may have another name. A message type maps the inner names to its own in ``argument_names``.
"""

from __future__ import annotations

from gpu_actors.errors import RequestError

__all__ = ["by_argument"]


def by_argument(error: RequestError, message: object) -> RequestError:
    """The same error, with the field as the sender of the message knows it."""
    name = getattr(type(message), "argument_names", {}).get(error.field)
    return error if name is None else type(error)(name, *error.args[1:])
