"""Parts of one request: the choice of a worker for each, and waiting for all answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from gpu_actors.arrays.adopt import Adopted, adopt, check_device
from gpu_actors.catching import undo_on_error
from gpu_actors.distributed.member import Member
from gpu_actors.distributed.routing import less_loaded_of_two
from gpu_actors.errors import Unsupported
from gpu_actors.values import show

__all__ = ["Spread", "all_of", "host_operands"]

T = TypeVar("T")


class Spread:
    """Chooses for each part of a request a worker that has no other part, while there is one."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._workers: dict[int, str] = {}

    def choice(self, part: int) -> Callable[[Mapping[str, Member]], Member]:
        """A function that chooses this part's worker: the same one as before, while that may get requests."""

        def choose(members: Mapping[str, Member]) -> Member:
            name = self._workers.get(part)
            if name is None or name not in members:
                used = self._workers.values()
                free = {name: member for name, member in members.items() if name not in used} or members
                name = less_loaded_of_two({each: member.outstanding for each, member in free.items()}, self._dice)
                self._workers[part] = name
            return members[name]

        return choose


async def all_of(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run the coroutines and return their results, in order.

    If one fails, the others are cancelled, and its error is raised once they have ended.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    async with undo_on_error(_cancel, tasks):
        return list(await asyncio.gather(*tasks))


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def host_operands(request: Any, names: Sequence[str]) -> dict[str, Adopted]:
    """The operands of these names that a request has, as arrays of NumPy.

    Raises `InvalidRequest` for one on a GPU, and `Unsupported` for a block mask.
    """
    if (mask := getattr(request, "block_mask", None)) is not None:
        reason = "its lists number the blocks and heads of one request: a part would have others"
        raise Unsupported("block_mask", show(mask), reason, None)
    operands: dict[str, Adopted] = {}
    for name in names:
        array = getattr(request, name, None)
        if array is not None:
            operands[name] = adopt(array, name)
            check_device(operands[name], name, "cpu")
    return operands
