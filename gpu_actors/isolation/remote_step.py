"""RemoteStep: a step that has begun in the context's process. `OpenStep` is a step in this process."""

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
    """The part of `RpcClient` that a step uses."""

    def attend(self, message: AttendLayer) -> Any: ...

    def has(self, generation: int) -> bool: ...


class RemoteStep:
    """Sends each layer to the worker that has the step, and waits for its output.

    If the worker loses its device, or ends, the step is lost: no later generation continues it.

    capture, replaying: None and False, because the device's streams belong to the worker.
    mailbox: the mailbox of its actor. number: the worker's number for it. generation: the one whose worker has it.
    deadline: the step's deadline. The worker then aborts it, and `attend` no longer waits for the worker.
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
        """Whether the step may have to be ended. Only the worker knows whether it has failed."""
        return not self._ended and self.client.has(self.generation)

    def capturing(self) -> None:
        """None: the device's streams belong to the worker."""

    def attend(self, layer: int, arrays: Mapping[str, Any], stream: Any) -> Any:
        """Like `OpenStep.attend`. Also raises `InvalidRequest` for a stream, and what `RpcClient.attend` raises."""
        if self._over is not None:
            raise self._over
        if stream is not None:
            raise InvalidRequest("stream", stream, "must be left out: streams belong to the process that made them")
        try:
            return self.client.attend(AttendLayer(step=self, layer=layer, **arrays))
        except Exception:
            raise
        except BaseException:  # Ctrl-C: the layer may have been launched
            self._over = LaunchError("the launch of a layer was interrupted")
            self._mailbox.put(Call(EndStep(self.cache_number, self, False), self._mailbox))
            raise

    def replay(self, run: Callable[[], object], layers: Collection[int] | None, stream: Any) -> None:
        raise InvalidRequest(
            "run", show(run), "replays captured layers, and a context in another process captures none"
        )

    def end(self, result: Any) -> Any:
        """Note that the worker has ended the step with this result, and return the result."""
        self._ended = True
        return result
