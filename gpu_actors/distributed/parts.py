"""Parts of one request: chooses a worker for each, gathers their answers, and converts operands and results."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from gpu_actors.arrays.adopt import Adopted, adopt, check_device, restore
from gpu_actors.attention.requests import AttentionGradients, AttentionOutput, FlashForward
from gpu_actors.catching import undo_on_error
from gpu_actors.distributed.member import Member
from gpu_actors.distributed.pool import ContextPool
from gpu_actors.distributed.routing import less_loaded_of_two
from gpu_actors.errors import Unsupported
from gpu_actors.fields import describe, expect
from gpu_actors.values import show

__all__ = ["Spread", "all_of", "ask_parts", "check_forward", "host_operands", "restored"]

T = TypeVar("T")
Answer = TypeVar("Answer", AttentionOutput, AttentionGradients)


class Spread:
    """Chooses for each part of a request a worker that has no other part, while there is such a worker."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._workers: dict[int, str] = {}

    def choice(self, part: int) -> Callable[[Mapping[str, Member]], Member]:
        """Return a function that chooses this part's worker: the same as before, while that one may get requests."""

        def choose(members: Mapping[str, Member]) -> Member:
            name = self._workers.get(part)
            if name is None or name not in members:
                used = self._workers.values()
                free = {name: member for name, member in members.items() if name not in used} or members
                name = less_loaded_of_two({each: member.outstanding for each, member in free.items()}, self._dice)
                self._workers[part] = name
            return members[name]

        return choose


def check_forward(request: object) -> None:
    """Raise `InvalidRequest` for a request that is no `FlashForward`, and `Unsupported` for one with an ``out``."""
    expect(type(request) is FlashForward, "request", show(request), "must be a FlashForward")
    if (out := getattr(request, "out", None)) is not None:
        raise Unsupported("out", describe(out), "parts cannot write into one array; copy the result")


async def ask_parts(pool: ContextPool, parts: Sequence[tuple[int, FlashForward]], timeout: float | None) -> list[Any]:
    """Make requests, and return the answers in order. parts: for each request, the number of its part and itself."""
    spread = Spread(pool.dice)

    def ask(number: int, part: FlashForward) -> Coroutine[Any, Any, Any]:
        return pool.ask(lambda ctx: ctx.flash_attn.submit(part), timeout=timeout, choose=spread.choice(number))

    return await all_of([ask(number, part) for number, part in parts])


def restored(answer: Answer, template: Adopted) -> Answer:
    """Return an answer with arrays of the template's library."""
    return type(answer)(*(None if each is None else restore(each, template) for each in answer))


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
    """The operands with these names that a request has, as NumPy arrays.

    Raises `InvalidRequest` for an operand on a GPU, and `Unsupported` for a block mask.
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
