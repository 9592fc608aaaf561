"""Children: the cells of a context's actors, and the operations on all of them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from gpu_actors.errors import ContextLost, caused
from gpu_actors.runtime.cell import ActorCell
from gpu_actors.runtime.environment import Environment
from gpu_actors.runtime.progress import Progress

__all__ = ["Children"]


@dataclass(eq=False)
class Children(Environment):
    """The environment of a context, with the cells that share it, by name."""

    cells: dict[str, ActorCell] = field(init=False, default_factory=dict)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def handle(self, actor_type: type) -> Any:
        for cell in self.cells.values():
            if cell.actor_type is actor_type:
                return cell.handle
        raise KeyError(f"{actor_type.__name__} is not an actor of this context; name it in ContextOptions(actors=...)")

    def oldest_launch(self) -> float | None:
        """The clock's reading when the context's oldest unfinished launch began. None if there is none."""
        ages = [since for cell in self.cells.values() if (since := cell.completion.oldest()) is not None]
        return min(ages, default=None)

    def succeeded_at(self) -> float:
        """``time.monotonic()`` when a launch last succeeded. -inf if none has."""
        return max(cell.progress.succeeded_at for cell in self.cells.values())

    def vital(self) -> list[str]:
        """The names of the actors that the context needs (see `ServiceActor`)."""
        return [name for name, cell in self.cells.items() if cell.actor_type.vital]

    def vital_progress(self) -> list[Progress]:
        return [self.cells[name].progress for name in self.vital()]

    def stuck(self) -> list[str]:
        """The names of the actors that have worked on one batch of requests for over half the hang timeout."""
        since = self.clock.now() - self.hang_timeout / 2
        return [
            name
            for name, cell in self.cells.items()
            if (busy_since := cell.busy_since) is not None and busy_since < since
        ]

    def context_lost(self, error: ContextLost) -> ContextLost:
        with self._lock:
            first = self.lost is None
            if first:
                self.lost = error
                self.generation += 1
        generation, cause = self.generation - 1, self.lost

        def reason() -> ContextLost:
            text = f"generation {generation} of the context is lost: {cause}"
            return caused(ContextLost(text, generation), cause)

        if first:
            self.trace.emit("context.lost", generation=generation, error=error)
            for cell in self.cells.values():
                cell.mailbox.close(reason)
            for cell in self.cells.values():
                cell.mailbox.fail_all(reason)
                cell.mailbox.write_off()
        return reason()
