"""Contexts in child processes of unusual programs, and on systems with few resources."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fakes.fault_injector import FaultInjector
from support.service import eventually, suspend

import gpu_actors as ga
from gpu_actors.isolation import spawning
from gpu_actors.remote import InProcess, Order, open_remote

ROOT = Path(__file__).parents[2]

# A program that starts itself without end would exhaust the machine.
_BOUND = """
import os, sys
os.environ["TEST_DEPTH"] = os.environ.get("TEST_DEPTH", "") + "."
if len(os.environ["TEST_DEPTH"]) > 3:
    sys.exit("opened again and again")
"""

_HEAD = """
import contextlib, os, resource, signal, sys, threading, time
import numpy as np
import gpu_actors as ga

q = np.ones((1, 16, 2, 64), np.float32)

def answers(ctx):
    return ctx.flash_attn.forward(q, q, q).result(20.0).out.shape == q.shape

def opens():
    try:
        with ga.open_context("mock", isolation="process") as ctx:
            return "answers" if answers(ctx) else "wrong"
    except ga.GpuActorsError as error:
        return f"{type(error).__name__}: {error}"
"""


def rows() -> np.ndarray[Any, Any]:
    return np.ones((1, 4, 2, 16), np.float32)


def answers(ctx: ga.GpuContext) -> None:
    assert np.allclose(ctx.flash_attn.forward(rows(), rows(), rows()).result(30.0).out, 1.0)


def run(program: str, folder: Path, *options: str) -> list[str]:
    """The lines that a program prints. It and its threads must end well. folder: the first entry of its path."""
    path = os.pathsep.join([str(folder), str(ROOT / "tests/lib"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, *options, "-c", _HEAD + program],
        capture_output=True,
        text=True,
        timeout=60.0,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Exception in thread" not in done.stderr, done.stderr
    return done.stdout.splitlines()


# Signals

_OF_A_SERVICE = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2")


def test_signals_to_every_process_of_a_service_are_for_the_program(isolated: ga.GpuContext) -> None:
    child = psutil.Process(isolated.pid)  # type: ignore[attr-defined]
    for name in _OF_A_SERVICE:
        reply = isolated.actor(FaultInjector).submit(("sleep", 0.02))
        for process in (child, child.parent()):
            assert process is not None
            process.send_signal(signal.Signals[name])
        assert reply.result(30.0) == 0.02
    answers(isolated)
    assert isolated.generation == 1


def test_programs_that_an_actor_starts_can_be_ended(isolated: ga.GpuContext) -> None:
    status = isolated.actor(FaultInjector).submit(("start and end",)).result(30.0)
    assert status == -signal.SIGTERM


_SIGCHLD = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
with ga.open_context("mock", isolation="process") as ctx:
    with ga.open_context("mock", isolation="process") as other:
        answers(other)
    print(opens())  # the zygote has waited for the other one before it answers
    time.sleep(0.3)
    print(answers(ctx), ctx.generation)
"""


def test_a_program_that_ignores_its_children_keeps_its_other_contexts(tmp_path: Path) -> None:
    assert run(_SIGCHLD, tmp_path) == ["answers", "True 1"]


# Refusals of the system

# In the zygote the second child's descriptor and the third child's fork fail; the first child is the program's.
_FAILS_ONCE = """
import errno, os, sys

def failing(name, number):
    real, calls = getattr(os, name), []
    def once(*given):
        calls.append(given)
        if len(calls) == 3:
            raise OSError(number, os.strerror(number))
        return real(*given)
    setattr(os, name, once)

if "isolation.zygote" in " ".join(sys.orig_argv):
    failing("fork", errno.EAGAIN)
    failing("pidfd_open", errno.EMFILE)
"""

_THREE = """
with contextlib.ExitStack() as stack:
    three = [stack.enter_context(ga.open_context("mock", isolation="process")) for _ in range(3)]
    print(*[(answers(ctx), ctx.generation) for ctx in three])
"""


def test_a_fork_that_fails_once_is_tried_again_and_harms_no_other(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_FAILS_ONCE)
    assert run(_THREE, tmp_path) == ["(True, 1) (True, 1) (True, 1)"]


_LITTLE = """
def limit(name, most):
    which = getattr(resource, name)
    least, hard = resource.getrlimit(which)
    resource.setrlimit(which, (hard if most is None else most, hard))

# Memory
limit("RLIMIT_AS", 2 << 30)
for most in (64 << 20, None):
    limit("RLIMIT_FSIZE", most)
    with ga.open_context("mock", isolation="process") as ctx:
        try:
            ctx.flash_attn.forward(np.zeros((1, 1 << 19, 2, 64), np.float32), q, q).result(20.0)
        except ga.InvalidRequest as error:
            print(answers(ctx), "must fit into shared memory" in str(error))
limit("RLIMIT_FSIZE", 4096)
print(opens())
limit("RLIMIT_FSIZE", None)

# Threads
def none(thread):
    raise RuntimeError("can't start new thread")
before = len(os.listdir("/proc/self/fd"))
start, threading.Thread.start = threading.Thread.start, none
print(opens(), opens())
threading.Thread.start = start
print(len(os.listdir("/proc/self/fd")) - before)

# Descriptors
with ga.open_context("mock", isolation="process") as ctx:
    answers(ctx)
    limit("RLIMIT_NOFILE", 64)
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    os.kill(ctx.pid, signal.SIGKILL)
    while "Too many open files" not in ctx.health().reason:
        time.sleep(0.01)
    print(ctx.health().state, opens().partition(":")[0])
    time.sleep(0.8)  # in which the policy's five restarts would be used up
    for descriptor in taken:
        os.close(descriptor)
    print(answers(ctx), ctx.generation)
"""


def test_where_memory_threads_and_descriptors_lack(tmp_path: Path) -> None:
    """With few resources shared memory is smaller, errors name a limit, nothing stays open, and a context survives."""
    by_file, by_space, none, threads, open_files, *descriptors = run(_LITTLE, tmp_path)
    assert by_file == by_space == "True True"
    assert none.startswith("GpuActorsError: no shared memory for a context's process: ")
    assert "ulimit" in none
    assert threads == " ".join(["GpuActorsError: the context could not open: can't start new thread"] * 2)
    assert open_files == "0"
    assert descriptors == ["degraded GpuActorsError", "True 2"]


class Refusing(InProcess):
    """Starts its first worker, then none until ``error`` is None."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.asked = 0

    def start(self, order: Order, received: Any) -> Any:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return super().start(order, received)


def test_a_start_that_fails_for_any_reason_is_tried_again() -> None:
    workplace = Refusing()
    options = ga.ContextOptions(restart=ga.RestartPolicy(max_restarts=1, backoff=0.0))
    with open_remote("mock", options, workplace=workplace) as ctx:
        answers(ctx)
        workplace.error = KeyError("odd")
        ctx._generations._broken("as asked")
        eventually(lambda: workplace.asked > 3)
        health = ctx.health()
        assert (health.state, health.ready) == ("degraded", False)
        assert "KeyError" in health.reason
        waiting = ctx.flash_attn.forward(rows(), rows(), rows())
        workplace.error = None
        assert np.allclose(waiting.result(30.0).out, 1.0)
        assert ctx.generation == 2


def test_a_start_that_keeps_failing_fails_the_context_after_the_window() -> None:
    workplace = Refusing()
    options = ga.ContextOptions(restart=ga.RestartPolicy(window=0.2))
    with open_remote("mock", options, workplace=workplace) as ctx:
        workplace.error = OSError(24, "as asked")
        ctx._generations._broken("lost")
        eventually(lambda: workplace.asked > 1)
        waiting = ctx.flash_attn.forward(rows(), rows(), rows())
        with pytest.raises(ga.WorkerLost, match=r"as asked, [0-9]+ times in 0\.2 s"):
            waiting.result(30.0)
        assert ctx.health().state == "failed"


def test_a_context_that_is_closed_between_two_workers_closes_at_once() -> None:
    workplace = Refusing()
    with open_remote(
        "mock", ga.ContextOptions(restart=ga.RestartPolicy(backoff=60.0, backoff_max=60.0)), workplace=workplace
    ) as ctx:
        workplace.error = OSError(24, "as asked")
        ctx._generations._broken("as asked")
        eventually(lambda: workplace.asked > 0 and ctx._generations.connection is None)
        waiting = ctx.flash_attn.forward(rows(), rows(), rows())
        began = time.monotonic()
        ctx.close()
        assert time.monotonic() - began < 2.0
        with pytest.raises(ga.ActorStopped):
            waiting.result(30.0)


# Unusual programs

# Partial functions that bind like Python 3.14's.
_PARTIAL = """
import functools, sys, types, _functools
if sys.version_info < (3, 14):
    class partial(_functools.partial):
        def __get__(self, instance, owner=None):
            return self if instance is None else types.MethodType(self, instance)
    functools.partial = partial
"""

# A path that is not a string, a deleted working directory, and many descriptors.
_ODD = """
import pathlib, tempfile
sys.path[:0] = [pathlib.Path("/"), None]
folder = tempfile.mkdtemp()
os.chdir(folder)
os.rmdir(folder)
resource.setrlimit(resource.RLIMIT_NOFILE, (1100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
many = [os.open("/dev/null", os.O_RDONLY) for _ in range(1030)]
print(opens())
"""


def test_an_odd_program_where_warnings_raise_has_contexts(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_PARTIAL)
    assert run(_ODD, tmp_path, "-W", "error") == ["answers"]


def test_programs_without_an_interpreter_are_refused(tmp_path: Path) -> None:
    lines = run(
        """
interpreter = sys.executable
for sys.executable in (None, "", "/no/python", "/bin/false"):
    print(opens())
sys.executable, sys.frozen = interpreter, True
print(opens())
""",
        tmp_path,
    )
    said = [
        "Unsupported: isolation='process': sys.executable is None: set it to the path",
        "Unsupported: isolation='process': sys.executable is '': set it to the path",
        "GpuActorsError: the context could not open: its process does not start: FileNotFoundError: ",
        "GpuActorsError: the context's process cannot be started: the process that forks contexts has ended with sta",
        "Unsupported: isolation='process': a frozen program has no Python interpreter: ",
    ]
    assert [line[: len(part)] for line, part in zip(lines, said, strict=True)] == said
    assert "'/no/python'" in lines[2]


def test_a_program_that_starts_itself_does_so_no_more(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_BOUND + _HEAD + "\nsys.executable = sys.argv[1]\nprint(opens(), flush=True)")
    frozen = tmp_path / "frozen"
    frozen.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}" "$0"\n')
    frozen.chmod(0o755)
    done = subprocess.run([str(frozen)], capture_output=True, text=True, timeout=60.0, check=True)
    *again, last = done.stdout.splitlines()
    assert 1 <= len(again) <= 2
    assert all("has started the program again" in line for line in again)
    assert "the process that forks contexts has ended" in last


# Imports

_ACTOR = """
import gpu_actors as ga

class Doubler(ga.ServiceActor):
    label = "doubler"

    def handle(self, call):
        call.resolve(call.message, self.outbox)

"""
_FROM_A_THREAD = """
import threading
thread = threading.Thread(target=use, args=(Doubler,))
thread.start()
thread.join()
"""
_OPENING = f"""{_BOUND}
import gpu_actors as ga

def use(actor, message=21):
    try:
        with ga.open_context("mock", ga.ContextOptions(actors=(actor,)), isolation="process") as ctx:
            print("answer", type(ctx.actor(actor).submit(message).result(10.0)).__name__, flush=True)
    except ga.GpuActorsError as error:
        print(type(error).__name__, "is being imported" in str(error), flush=True)
"""
_USE = "from opening import use\n"
_ONCE = "import os\nif 'GPU_ACTORS_TEST' not in os.environ:\n    os.environ['GPU_ACTORS_TEST'] = '1'\n    use(Doubler)"
_FILES = {
    "opening.py": _OPENING,
    "other.py": _ACTOR,
    "own_actor.py": _USE + _ACTOR + "use(Doubler)",
    "own_actor_from_a_thread.py": _USE + _ACTOR + _FROM_A_THREAD,
    "its_package/actors.py": _ACTOR,
    "its_package/__init__.py": _USE + "from its_package.actors import Doubler\nuse(Doubler)",
    "another_modules_actor.py": _USE + "from other import Doubler\nuse(Doubler)",
    "own_message.py": _USE + "class Own: pass\nfrom other import Doubler\nuse(Doubler, Own())",
    "answering.py": _ACTOR.replace("call.resolve(call.message", "import own_answer; call.resolve(own_answer.Own()"),
    "own_answer.py": _USE + "class Own: pass\nfrom answering import Doubler\n" + _ONCE,
    "late.py": "import opening, gpu_actors as ga\nclass Late: pass\n"
    "ga.open_context('mock', isolation='process').__enter__().close()",
}
_IMPORTED = {
    "own_actor": "InvalidRequest True",
    "own_actor_from_a_thread": "InvalidRequest True",
    "its_package": "InvalidRequest True",
    "another_modules_actor": "answer int",
    "own_message": "InvalidRequest True",
    "own_answer": "answer Own",
}
_IMPORTING = """
import importlib
for name in {names}:
    print(name, end=" ", flush=True)
    importlib.import_module(name)

import late, other  # the process of a context imports late too, which opens no context there
with ga.open_context("mock", ga.ContextOptions(actors=(other.Doubler,)), isolation="process") as ctx:
    try:
        ctx.actor(other.Doubler).submit(late.Late()).result(10.0)
    except ga.InvalidRequest as error:
        print("a module opens this context as it is imported" in str(error))
    print(ctx.actor(other.Doubler).submit(3).result(10.0), ctx.generation)
"""


def test_a_context_in_the_body_of_a_module_is_open_or_refused(tmp_path: Path) -> None:
    for name, text in _FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    said = [f"{name} {line}" for name, line in _IMPORTED.items()]
    assert run(_IMPORTING.format(names=list(_IMPORTED)), tmp_path) == [*said, "True", "3 1"]


# Processes that stop


def test_a_zygote_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    zygotes = spawning._Zygotes()
    monkeypatch.setattr(spawning, "_zygotes", zygotes)
    monkeypatch.setattr(spawning, "_ANSWERING", 0.3)
    with ga.open_context("mock", isolation="process") as first:
        child = psutil.Process(first.pid)  # type: ignore[attr-defined]
        zygote = child.parent()
        assert zygote is not None
        with ga.open_context("mock", isolation="process"):  # the next answer is due within that time
            pass
        suspend(zygote.pid)
        try:
            began = time.monotonic()
            with ga.open_context("mock", isolation="process") as second:
                answers(second)
                assert psutil.Process(second.pid).ppid() != zygote.pid  # type: ignore[attr-defined]
                answers(first)
                assert first.generation == 1
                child.kill()
                eventually(lambda: first.generation == 2)
                answers(first)
            assert time.monotonic() - began < 20.0
        finally:
            zygote.resume()
    zygote.wait(10.0)  # it has no children left
    zygotes.close()


def test_a_process_that_stops_is_lost_and_a_busy_one_is_not() -> None:
    options = ga.ContextOptions(actors=(FaultInjector,), hang_timeout=0.8)
    with ga.open_context("mock", options, isolation="process") as ctx:
        busy = ctx.actor(FaultInjector).submit(("sleep", 1.6))
        assert busy.result(30.0) == 1.6  # the process answers pings meanwhile
        assert ctx.generation == 1
        suspend(ctx.pid)  # type: ignore[attr-defined]
        with pytest.raises(ga.ContextLost, match=r"has not answered for 0\.8 s"):
            ctx.actor(FaultInjector).submit(("echo", 1)).result(30.0)
        assert ctx.actor(FaultInjector).submit(("echo", 2)).result(30.0) == 2
