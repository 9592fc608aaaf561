"""Programs that end without closing anything end promptly, and every waiter gets a typed answer."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from support.service import REPOSITORY, interrupt, run_python

PRELUDE = """
import asyncio, os, signal, sys, threading, time
import numpy as np
import gpu_actors as ga
from gpu_actors.testing import FaultPlan, MockClock

# A test run in the background is started with SIGINT ignored, and hands that on.
signal.signal(signal.SIGINT, signal.default_int_handler)

q = np.ones((1, 1, 1, 8), np.float32)

def hung(drain_timeout=1e6):  # a wait for that would not end
    plan = FaultPlan().hang(launch=1)
    return ga.open_context("mock", ga.ContextOptions(fault_plan=plan, drain_timeout=drain_timeout))

def until_launched(ctx):
    while not ctx.stats()["flash_attn"].in_flight:
        time.sleep(0.001)

def report(name, wait):
    try:
        wait()
    except BaseException as error:
        say(name, type(error).__name__, error)
    else:
        say(name, "answered")

def say(*words):
    # In one piece, for several threads speak at once.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def run(program: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the prelude and the program, which must end; return what it left behind."""
    return run_python(PRELUDE + textwrap.dedent(program), check=check)


WAITERS = """
from gpu_actors.handles.gpu_context import open_contexts

ctx = hung().__enter__()
replies = [ctx.flash_attn.forward(q, q, q) for _ in range(2)]
until_launched(ctx)

def unreferenced():
    ctx = hung().__enter__()
    reply = ctx.flash_attn.forward(q, q, q)
    until_launched(ctx)
    return reply

unheld = unreferenced()
import gc; gc.collect()

async def leave():
    left = await hung().__aenter__()
    task = asyncio.ensure_future(left.flash_attn.forward(q, q, q))
    await asyncio.to_thread(until_launched, left)
    return left, task

left, task = asyncio.run(leave())
say(task.cancelled(), left.health().state)

async def wait():
    results = await asyncio.gather(*(ctx.flash_attn.forward(q, q, q) for _ in range(3)), return_exceptions=True)
    say("loop", *(type(result).__name__ for result in results))

def go_on():
    threading.main_thread().join()
    while open_contexts():
        time.sleep(0.001)
    report("late", ctx.flash_attn.forward(q, q, q).result)

threads = [threading.Thread(target=report, args=(name, reply.result)) for name, reply in zip("ab", replies)]
threads.append(threading.Thread(target=report, args=("unreferenced", unheld.result)))
threads += [threading.Thread(target=asyncio.run, args=(wait(),)), threading.Thread(target=go_on)]
for thread in threads:
    thread.start()
while ctx.stats()["flash_attn"].submitted < 5:
    time.sleep(0.001)
say("main ends")
"""


@pytest.mark.parametrize("ending", ["sys.exit(3)", "raise KeyError('bug')"])
def test_however_the_main_thread_ends_waiters_of_a_hung_launch_are_answered(ending: str) -> None:
    """Waiting threads and a waiting loop, also of a context without a reference, and a request made at the end.

    An async program has ended before without leaving its context.
    """
    done = run(WAITERS + ending, check=False)
    assert done.returncode == (1 if "KeyError" in ending else 3)
    first, second, *answers = done.stdout.splitlines()
    assert (first, second) == ("True ready", "main ends")
    stopped = "ActorStopped the context is closed"
    names = ("a", "b", "late", "unreferenced")
    assert sorted(answers) == sorted([*(f"{name} {stopped}" for name in names), "loop" + 3 * " ActorStopped"])
    assert "KeyError" in ending or done.stderr == ""


def test_interrupting_a_program_that_waits_closes_its_context() -> None:
    """The program waits in a thread or in a task."""
    program = PRELUDE + textwrap.dedent(
        """
        with hung(drain_timeout=0.1) as ctx:
            reply = ctx.flash_attn.forward(q, q, q)
            until_launched(ctx)
            report("main", lambda: (say("waiting"), reply.result()))
        report("after", reply.result)

        async def main():
            global reply
            async with hung(drain_timeout=0.1) as ctx:
                reply = ctx.flash_attn.forward(q, q, q)
                await asyncio.to_thread(until_launched, ctx)
                say("waiting")
                await reply

        report("main", lambda: asyncio.run(main()))
        report("after", reply.result)
        """
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        assert process.stdout is not None
        lines = []
        for _ in range(2):
            lines.append(process.stdout.readline())
            interrupt(process.pid)
            lines += [process.stdout.readline(), process.stdout.readline()]
        try:
            output, _ = process.communicate(timeout=200.0)
        finally:
            process.kill()
    assert "".join(lines) == 2 * "waiting\nmain KeyboardInterrupt \nafter ActorStopped the context is closed\n"
    assert output == ""


def test_a_forked_child_is_told_that_the_context_stayed_behind() -> None:
    """Threads do not survive a fork, so the child's copy of a context answers no request."""
    done = run(
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is the point
        from gpu_actors.process import incarnation
        before, clock = incarnation(), MockClock()
        options = ga.ContextOptions(fault_plan=FaultPlan().delay(1.0, launch=2), clock=clock)
        with ga.open_context("mock", options) as ctx:
            ctx.flash_attn.forward(q, q, q).result()
            pending = ctx.flash_attn.forward(q, q, q)
            while ctx.stats()["flash_attn"].launched < 2:
                time.sleep(0.001)
            child = os.fork()
            if child == 0:
                report("child", ctx.flash_attn.forward(q, q, q, timeout=5).result)
                report("child's copy", pending.result)
                say(ctx.health().state, len(before), len(incarnation()), before == incarnation())
                sys.exit()  # leaves the context, which is not the child's to close
            os.waitpid(child, 0)
            clock.advance(1.0)
            report("parent", ctx.flash_attn.forward(q, q, q).result)
            report("pending", pending.result)
            say(before == incarnation())
        """
    )
    stayed_behind = "ActorStopped the context belongs to the process that opened it"
    assert done.stdout.splitlines() == [
        f"child {stayed_behind}",
        f"child's copy {stayed_behind}",
        "failed 8 8 False",
        "parent answered",
        "pending answered",
        "True",
    ]


def test_a_forked_child_waits_for_no_lock_of_a_thread_that_stayed_behind() -> None:
    done = run(
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        trace = threading.Lock()
        def listen(event):
            with trace:
                pass
        with ga.open_context("mock", ga.ContextOptions(on_event=listen)) as ctx:
            with ctx.kv_cache(num_blocks=1, page_size=8, kv_heads=1, head_dim=8) as cache:
                with trace, cache._find().tables._lock, ctx.flash_attn._cell._lock, ctx.nvrtc._cell.shared.cache._lock:
                    child = os.fork()
                if child == 0:
                    signal.alarm(20)  # nothing else would end it
                    for lock in (trace, cache._handle._cell.shared._caches[1].tables._lock):
                        lock.acquire()  # as if another thread had held it
                    report("request", ctx.flash_attn.forward(q, q, q, timeout=5).result)
                    report("cache", cache.stats)
                    report("watch", lambda: ctx.flash_attn.watch(print))
                    report("kernels", ctx.nvrtc.cache_stats)
                    report("close", ctx.close)
                    sys.exit()
            os.waitpid(child, 0)
        """
    )
    stayed_behind = "ActorStopped the context belongs to the process that opened it"
    answered = ["watch answered", "kernels answered", "close answered"]
    assert done.stdout.splitlines() == [f"request {stayed_behind}", f"cache {stayed_behind}", *answered]


# The actor is still working when the signal arrives, and closing waits for it.
CLOSING = """
from gpu_actors.handles.gpu_context import open_contexts

def main_thread_waits():
    innermost = sys._current_frames()[threading.main_thread().ident]
    return innermost.f_code.co_name in ("wait", "join", "_wait_for_tstate_lock")

def alarm_while_it_closes():
    def ring():
        while ctx.health().state != "stopped" or not main_thread_waits():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGALRM)

    threading.Thread(target=ring).start()

class Busy(ga.ServiceActor):
    def handle(self, call):
        busy.set()
        may_end.wait()
        call.resolve("late")

busy, may_end = threading.Event(), threading.Event()
context = ga.open_context("mock", ga.ContextOptions(actors=(Busy,), drain_timeout=0.0))
ctx = context.__enter__()
reply = ctx.actor(Busy).submit(None)
busy.wait()
"""


def test_a_signal_handler_may_close_the_context_while_it_is_closed() -> None:
    done = run(
        CLOSING
        + textwrap.dedent(
            """
            def handle(*_):
                report("handler", ctx.close)
                may_end.set()

            signal.signal(signal.SIGALRM, handle)
            alarm_while_it_closes()
            report("program", ctx.close)
            say(len(threading.enumerate()))
            """
        )
    )
    assert done.stdout.splitlines() == ["handler answered", "program answered", "1"]


def test_closing_that_was_interrupted_goes_on_and_can_be_waited_for() -> None:
    done = run(
        CLOSING
        + textwrap.dedent(
            """
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            alarm_while_it_closes()
            report("program", ctx.close)
            say(len(open_contexts()))
            may_end.set()
            ctx.close()
            say(len(threading.enumerate()), ctx.health().state)
            """
        )
    )
    assert done.stdout.splitlines() == ["program KeyboardInterrupt ", "0", "1 stopped"]


def test_development_mode_has_nothing_to_tell_at_the_exit() -> None:
    program = """
        import numpy as np, gpu_actors as ga
        q = np.ones((1, 4, 1, 64), np.float32)
        for isolation in (None, "process"):
            with ga.open_context("mock", isolation=isolation) as ctx:
                ctx.flash_attn.forward(q, q, q).result(30)
    """
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY, check=False)
    assert (done.returncode, done.stderr) == (0, "")
