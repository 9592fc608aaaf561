"""Launches emulated kernels and turns the emulation's faults into errors."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import weakref
from _ctypes import dlclose
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from gpu_actors.devices.cuda.parameters import kernel_params
from gpu_actors.devices.emulation.memory import PAGE, EmulatedBuffer, round_up
from gpu_actors.devices.emulation.memory import Mapping as PageMapping
from gpu_actors.devices.emulation.source_lines import describe_lines, fault_lines
from gpu_actors.errors import InvalidRequest, LaunchError
from gpu_actors.fields import integer, one_of
from gpu_actors.options import Arithmetic, Delivery, Schedule

__all__ = ["EmulatedModule", "EmulationFault"]

# The same numbers as in kernels_cu/emulation/core.cuh. A test compares them.
_MAX_THREADS = 1024
_MAX_WORKERS = 16
_STACK_BYTES = 256 << 10
_STACK_GUARD = 4096
_MAX_SHARED_BYTES = 232448
_SHARED_WINDOW = round_up(_MAX_SHARED_BYTES + 2048, PAGE)  # with the canaries before and after
_MAX_FRAMES = 24


class EmulationFault(LaunchError):
    """A kernel did something that is an error on a GPU, or may be one.

    kind: a kind of the table in kernels_cu/emulation/README.md; "descriptor" for an invalid matrix descriptor or tensor
        map, and "argument" for wrong launch arguments or operands.
    entry: the kernel. block: (x, y, z). thread: linear index in the block, or None. buffer: the name of the buffer at
    fault, or None. text: what happened.
    lines: "file:line" of where the thread was: the kernel's own line first, the line of the instruction's wrapper last.
    issued: the same for the copy, store or product that the fault is about, if it was issued earlier. If the thread has
    ended, or another thread acts for it, lines equals issued. Both are empty if no thread is known or addr2line (GNU
    binutils) is not installed.
    """

    def __init__(
        self,
        kind: str,
        text: str,
        entry: str = "",
        block: tuple[int, int, int] = (0, 0, 0),
        thread: int | None = None,
        buffer: str | None = None,
        lines: tuple[str, ...] = (),
        issued: tuple[str, ...] = (),
    ) -> None:
        super().__init__(kind, text, entry, block, thread, buffer, lines, issued)
        self.kind = kind
        self.text = text
        self.entry = entry
        self.block = block
        self.thread = thread
        self.buffer = buffer
        self.lines = lines
        self.issued = issued

    def __str__(self) -> str:
        where = f"block {self.block}"
        if self.thread is not None:
            where += f" thread {self.thread} (warp {self.thread // 32} lane {self.thread % 32})"
        where += describe_lines(self.lines, self.issued)
        return f"{self.kind} in {self.entry}, {where}: {self.text}"


class _Fault(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_char * 24),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_int32),
        ("buffer", ctypes.c_int32),
        ("address", ctypes.c_uint64),
        ("frame_count", ctypes.c_uint32),
        ("frames", ctypes.c_uint64 * _MAX_FRAMES),
        ("issued", ctypes.c_uint64),
        ("text", ctypes.c_char * 1600),
    ]


class _BufferRange(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("begin", "end", "map_begin", "map_end")]


class _Arena(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("stacks", "shared_end", "shared_begin", "async_view", "touched")]


class _Request(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        *((name, ctypes.c_uint32) for name in ("shared_bytes", "delivery", "schedule", "arithmetic", "workers")),
        ("argument_count", ctypes.c_uint32),
        ("buffer_count", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("limit_seconds", ctypes.c_double),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("argument_bytes", ctypes.POINTER(ctypes.c_uint64)),
        ("buffers", ctypes.POINTER(_BufferRange)),
        ("arenas", ctypes.POINTER(_Arena)),
        ("fault", ctypes.POINTER(_Fault)),
        ("switches", ctypes.c_uint64),
    ]


class _WorkerMemory:
    """The stacks and the shared memory of one worker. They outlive launches, so a process maps the pages once."""

    def __init__(self) -> None:
        self._stacks = PageMapping((_MAX_THREADS + 1) * _STACK_BYTES, guard=PAGE)
        self._shared = PageMapping(_SHARED_WINDOW)
        self._view = PageMapping(_SHARED_WINDOW, guard=PAGE)
        self._touched = PageMapping(4 * _MAX_SHARED_BYTES + PAGE, guard=PAGE)
        self._first = round_up(self._stacks.begin, _STACK_BYTES)
        self._guarded = 0

    def prepare(self, threads: int) -> _Arena:
        """Make the low end of ``threads`` stacks inaccessible, so that a full stack faults."""
        for i in range(self._guarded, threads):
            self._stacks.protect(self._first + i * _STACK_BYTES, _STACK_GUARD, 0)
        self._guarded = max(self._guarded, threads)
        return _Arena(self._first, self._shared.end, self._shared.begin, self._view.begin, self._touched.begin)


class _SignalActions:
    """The process's own actions for the signals that a launch handles (SignalActions in emulation/worker.cuh)."""

    _SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGVTALRM)

    def __init__(self) -> None:
        self._actions = {number: ctypes.create_string_buffer(_SIGACTION_BYTES) for number in self._SIGNALS}

    def note(self) -> None:
        for number, action in self._actions.items():
            _libc.sigaction(number, None, action)

    def restore(self) -> None:
        for number, action in self._actions.items():
            _libc.sigaction(number, action, None)


_libc = ctypes.CDLL(None)
_SIGACTION_BYTES = 256  # more than a struct sigaction has

# A process runs one launch at a time, because it has one set of signal handlers and one set of the workers' memory. A
# launch uses every processor anyway.
_launch_lock = threading.Lock()
_worker_memory: list[_WorkerMemory] = []
_signal_actions = _SignalActions()


def _after_fork() -> None:
    """Reset the state in a forked child. No launch runs there, although the parent may run one."""
    global _launch_lock
    if _launch_lock.locked():
        _signal_actions.restore()
    _launch_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class EmulatedModule:
    """A built kernel file.

    entries: its kernels.
    build_seconds: how long the compiler took.
    names: the compiler's names of files to the names that faults show.
    """

    def __init__(
        self,
        path: Path,
        entries: tuple[str, ...],
        build_seconds: float = 0.0,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self._names = dict(names or {})
        self.entries = entries
        self.build_seconds = build_seconds
        self.switches: int = 0
        self._library = ctypes.CDLL(str(path))
        # ctypes never closes a library. No library is closed at exit, because a thread may still run a kernel.
        weakref.finalize(self, dlclose, self._library._handle).atexit = False

    def launch(
        self,
        entry: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        shared_bytes: int,
        params: bytes | Sequence[bytes],
        buffers: Sequence[EmulatedBuffer] = (),
        *,
        delivery: Delivery = "late",
        schedule: Schedule = "greedy",
        arithmetic: Arithmetic = "nearest",
        seed: int = 0,
        threads: int = 2,
        limit_seconds: float = 60.0,
    ) -> None:
        """Run a kernel to its end.

        entry: the kernel's name.
        grid, block: 1 to 3 sizes, as in CUDA.
        shared_bytes: bytes of dynamic shared memory.
        params: the bytes of the only argument, or of each argument. Device pointers are EmulatedBuffer.address.
        buffers: all the global memory that the kernel may access.

        delivery, arithmetic, threads: as in `EmulationOptions`.
        schedule: which thread runs next. "round_robin": every thread in turn. "greedy": a warp runs as far as it can,
            then the ready warp of the highest priority. "random": the same with preemption and changing priorities.
            "lane": the ready thread of the highest priority, so that lanes of a warp drift apart.
        seed: the seed of all random choices. 0 starts blocks, warps and threads upwards, 1 downwards, other seeds in
            another order.
        limit_seconds: how long the launch may take.

        Raises the EmulationFault of the failed block that started first, and InvalidRequest for invalid arguments.
        """
        function = self._function(entry)
        request = _Request()
        request.grid[:] = _extent("grid", grid)
        request.block[:] = _extent("block", block)
        request.shared_bytes = integer("shared_bytes", shared_bytes, 0, _MAX_SHARED_BYTES)
        request.delivery = _choice("delivery", delivery, get_args(Delivery))
        request.schedule = _choice("schedule", schedule, get_args(Schedule))
        request.arithmetic = _choice("arithmetic", arithmetic, get_args(Arithmetic))
        request.workers = integer("threads", threads, 1, _MAX_WORKERS)
        request.seed = seed
        request.limit_seconds = limit_seconds
        parts = (params,) if isinstance(params, bytes) else tuple(params)
        arguments = kernel_params(parts)
        request.argument_count = len(parts)
        request.arguments = ctypes.cast(arguments.address, type(request.arguments))
        request.argument_bytes = (ctypes.c_uint64 * len(parts))(*map(len, parts))
        ranges = [_BufferRange(b.address, b.address + b.nbytes, *b.map_range) for b in buffers]
        request.buffer_count = len(ranges)
        request.buffers = (_BufferRange * len(ranges))(*ranges)
        fault = _Fault()
        request.fault = ctypes.pointer(fault)
        with _launch_lock:
            _signal_actions.note()
            while len(_worker_memory) < threads:
                _worker_memory.append(_WorkerMemory())
            count = request.block[0] * request.block[1] * request.block[2]
            arenas = [memory.prepare(min(count, _MAX_THREADS)) for memory in _worker_memory[:threads]]
            request.arenas = (_Arena * threads)(*arenas)
            failed = function(ctypes.byref(request))
        self.switches = request.switches
        if failed:
            raise self._describe(entry, fault, buffers)
        for buffer in buffers:
            if (where := buffer.stray_write()) is not None:
                text = f"a thread wrote to buffer {buffer.name!r} {where} ({buffer.nbytes} bytes)"
                raise EmulationFault("out_of_bounds", text, entry, buffer=buffer.name)

    def parameter_bytes(self, entry: str) -> tuple[int, ...] | None:
        """The size of each parameter of a kernel. None if the source has no GPU_ACTORS_PARAMETERS(entry)."""
        fill = getattr(self._library, f"gpu_actors_parameters_{entry}", None)
        if fill is None:
            return None
        sizes = (ctypes.c_uint64 * fill(None))()
        fill(sizes)
        return tuple(sizes)

    def _describe(self, entry: str, fault: _Fault, buffers: Sequence[EmulatedBuffer]) -> EmulationFault:
        text, name = fault.text.decode(errors="replace"), None
        for compiled, shown in self._names.items():
            text = text.replace(compiled, shown)
        if fault.address:
            text, name = _locate(text, fault.address, buffers)
        x, y, z = fault.block
        thread = None if fault.thread < 0 else fault.thread
        lines, issued = fault_lines(self.path, fault.frames[: fault.frame_count], fault.issued, self._names)
        return EmulationFault(fault.kind.decode(), text, entry, (x, y, z), thread, name, lines, issued)

    def _function(self, entry: str) -> ctypes._NamedFuncPointer:
        if entry not in self.entries:
            raise InvalidRequest("entry", entry, "this module's kernels are " + ", ".join(self.entries))
        return getattr(self._library, f"gpu_actors_launch_{entry}")  # type: ignore[no-any-return]


def _extent(field: str, value: int | Sequence[int]) -> tuple[int, int, int]:
    sizes = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(sizes) <= 3 or any(not 1 <= int(n) < 1 << 31 for n in sizes):
        raise InvalidRequest(field, value, "give one to three positive sizes")
    x, y, z = (int(n) for n in (*sizes, 1, 1)[:3])
    if field == "block" and x * y * z > _MAX_THREADS:
        raise InvalidRequest(field, value, f"a block has at most {_MAX_THREADS} threads")
    return x, y, z


def _choice(field: str, value: str, choices: tuple[str, ...]) -> int:
    one_of(field, value, choices)
    return choices.index(value)


def _locate(text: str, address: int, buffers: Sequence[EmulatedBuffer]) -> tuple[str, str | None]:
    for buffer in buffers:
        low, high = buffer.map_range
        if low <= address < high:
            offset = address - buffer.address
            return f"{text} at byte {offset} of buffer {buffer.name!r} ({buffer.nbytes} bytes)", buffer.name
    return f"{text} at address 0x{address:x}, near no buffer of this launch", None
