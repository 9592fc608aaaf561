"""RecordedLaunch: a launch captured as a CUDA graph, with its memory.

The graph has the upload from the staging block, the kernels and the download to the other one, all at fixed addresses.
To use it again, new operands are written to the staging block and the graph is launched: one call to the driver instead
of one for each operation (CUDA Programming Guide, "CUDA Graphs").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpu_actors.devices.cuda.driver import Driver
from gpu_actors.devices.cuda.errors import CudaFailure
from gpu_actors.devices.cuda.operands import Operands
from gpu_actors.devices.interface import Launch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from gpu_actors.devices.cuda.module import CudaFunction
    from gpu_actors.devices.recorded import Recordings

__all__ = ["RecordedLaunch", "capture"]


class RecordedLaunch:
    """A graph, its kernels and their operands. A flight uses it like `Operands`, but `release` retains the memory."""

    def __init__(
        self,
        key: Hashable,
        graph: int,
        functions: Sequence[CudaFunction],
        operands: Operands,
        recordings: Recordings[RecordedLaunch],
    ) -> None:
        self.graph = graph
        self.functions = functions
        self.producers: set[int] = operands.producers
        self._key = key
        self._operands = operands
        self._recordings = recordings

    def rebind(self, launch: Launch) -> None:
        """Stage the operands of a launch with the same key in place of the last one's."""
        self._operands.rebind(launch)

    def results(self) -> Mapping[str, Any]:
        return self._operands.results()

    def release(self) -> None:
        """The flight is over: the next launch may use the recording."""
        self._operands.forget()
        self._recordings.release(self._key, self)

    def drop(self, driver: Driver) -> None:
        """Free the graph and the memory."""
        if not driver.lost and not driver.closed:
            try:
                driver.enter()
                driver.api.destroy_graph(self.graph)
            except CudaFailure as failure:
                driver.failed(failure)
        self._operands.release()


def capture(driver: Driver, stream: int, enqueue: Callable[[], None]) -> int:
    """Capture the work that ``enqueue`` puts on a stream as a graph, without running it. Raises `CudaFailure`."""
    api = driver.api
    api.begin_capture(stream)
    try:
        enqueue()
    except BaseException:
        try:
            api.destroy_graph(api.end_capture(stream))
        except CudaFailure:
            pass  # a failed capture has no graph, and its cause is raised below
        raise
    return api.end_capture(stream)
