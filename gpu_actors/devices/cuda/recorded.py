"""RecordedLaunch: a launch captured as a CUDA graph, with the memory that it works in.

The graph holds the upload out of the staging block, the kernels and the download into the other one, all at addresses
that stay. To use it again, new operands are written to the staging block and the graph is launched: one call to the
driver in the place of one for each operation (CUDA Programming Guide, "CUDA Graphs").
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
    """A graph, the kernels in it and their operands. A flight takes it for `Operands`, whose memory `release` keeps."""

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
        """Put the operands of a launch with the same key where those of the last one lay."""
        self._operands.rebind(launch)

    def results(self) -> Mapping[str, Any]:
        return self._operands.results()

    def release(self) -> None:
        """The flight is over: the next launch may have it."""
        self._recordings.give(self._key, self)

    def drop(self, driver: Driver) -> None:
        """Give the graph and the memory back."""
        if not driver.lost and not driver.closed:
            try:
                driver.enter()
                driver.api.destroy_graph(self.graph)
            except CudaFailure as failure:
                driver.failed(failure)
        self._operands.release()


def capture(driver: Driver, stream: int, enqueue: Callable[[], None]) -> int:
    """The graph of what ``enqueue`` puts on a stream, which does none of it now. Raises `CudaFailure`."""
    api = driver.api
    api.begin_capture(stream)
    try:
        enqueue()
    except BaseException:
        try:
            api.destroy_graph(api.end_capture(stream))
        except CudaFailure:
            pass  # a capture that went wrong has no graph; what went wrong is on its way up
        raise
    return api.end_capture(stream)
