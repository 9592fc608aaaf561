"""RemoteStep: a step that has begun in the context's process, as `OpenStep` is one in this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from gpu_actors.errors import GpuActorsError, InvalidRequest, LaunchError
from gpu_actors.isolation.records import StepDescriptor
from gpu_actors.kv.requests import AttendLayer, EndStep
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.mailbox import Mailbox
from gpu_actors.values import show

__all__ = ["RemoteStep"]


class _Client(Protocol):
    """The `RpcClient`, as a step uses it."""

    def attend(self, message: AttendLayer) -> Any: ...

    def has(self, generation: int) -> bool: ...


class RemoteStep:
    """Sends each layer to the worker that has the step, and waits for its output.

    A worker that has lost its device, or has ended, has no step: no later generation answers for it.

    capture, replaying: none, for the device's streams are the worker's.
    mailbox: of its actor. number: the worker's for it. generation: of the context, whose worker has it.
    deadline: of the step. The worker aborts it then; a worker that does not answer is waited for no longer.
    """

    capture: None = None
    replaying: bool = False

    def __init__(
        self, client: _Client, mailbox: Mailbox, descriptor: StepDescriptor, generation: int, deadline: float | None
    ) -> None:
        self.client = client
        self.number, self.cache_number, self.lengths = descriptor
        self.generation = generation
        self.deadline = deadline
        self._mailbox = mailbox
        self._over: GpuActorsError | None = None
        self._ended = False

    @property
    def open(self) -> bool:
        """Whether it may have to be ended. The worker alone knows of steps that have failed."""
        return not self._ended and self.client.has(self.generation)

    def capturing(self) -> None:
        """None: the device's streams are the worker's."""

    def attend(self, layer: int, arrays: Mapping[str, Any], stream: Any) -> Any:
        """As `OpenStep.attend`. Raises `InvalidRequest` for a stream too, and what `RpcClient.attend` does."""
        if self._over is not None:
            raise self._over
        if stream is not None:
            raise InvalidRequest("stream", stream, "must be left out: streams belong to the process that made them")
        try:
            return self.client.attend(AttendLayer(step=self, layer=layer, **arrays))
        except Exception:
            raise
        except BaseException:  # Ctrl-C: the layer may be launched
            self._over = LaunchError("the launch of a layer was interrupted")
            self._mailbox.put(Call(EndStep(self.cache_number, self, False), self._mailbox))
            raise

    def replay(self, run: Callable[[], object], layers: Collection[int] | None, stream: Any) -> None:
        raise InvalidRequest(
            "run", show(run), "replays captured layers, and a context in another process captures none"
        )

    def end(self, result: Any) -> Any:
        """The worker has ended it, with this result."""
        self._ended = True
        return result
