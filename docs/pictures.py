"""Draws the rooms of the package, the way of a request, and supervision as SVG: python docs/pictures.py

ARROWS names imports and WAY names files, and tests hold both against the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

FONT = 'font-family="sans-serif"'
SIZE, SMALL, LINE = 12, 11, 15
INK, QUIET = "#222222", "#555555"
BLUE, GREEN, SAND, GREY, ROSE = "#d6e4f0", "#d5ece4", "#f7e8c9", "#e9e9e9", "#f6d9d5"

Point = tuple[float, float]


class Box(NamedTuple):
    """A rounded box with a title and lines below it, all centred."""

    x: float
    y: float
    width: float
    height: float
    title: str
    lines: Sequence[str] = ()
    fill: str = GREY


class Text(NamedTuple):
    x: float
    y: float
    text: str
    size: int = SMALL
    fill: str = QUIET


class Frame(NamedTuple):
    """A dashed frame around boxes."""

    x: float
    y: float
    width: float
    height: float


Arrow = tuple[Point, ...]
Shape = Box | Text | Frame | Arrow


def picture(width: float, height: float, shapes: Sequence[Shape]) -> str:
    """The text of a drawing."""
    marker = 'id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" {FONT}>',
        f'<defs><marker {marker}><path d="M0 0 L8 4 L0 8 z" fill="{QUIET}"/></marker></defs>',
        f'<rect width="100%" height="{height:.0f}" fill="white"/>',
    ]
    for shape in shapes:
        lines += drawn(shape)
    return "\n".join([*lines, "</svg>"]) + "\n"


def drawn(shape: Shape) -> Iterator[str]:
    if isinstance(shape, Box):
        size = f'width="{shape.width:.1f}" height="{shape.height:.1f}"'
        yield f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" {size} rx="4" fill="{shape.fill}" stroke="#999"/>'
        first = shape.y + shape.height / 2 + 4 - len(shape.lines) * LINE / 2
        for number, row in enumerate((shape.title, *shape.lines)):
            place = f'x="{shape.x + shape.width / 2:.1f}" y="{first + number * LINE:.1f}" text-anchor="middle"'
            weight = f'font-size="{SMALL}"' if number else f'font-size="{SIZE}" font-weight="bold"'
            yield f'<text {place} {weight} fill="{INK}">{row}</text>'
    elif isinstance(shape, Text):
        place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size}"'
        yield f'<text {place} fill="{shape.fill}">{shape.text}</text>'
    elif isinstance(shape, Frame):
        size = f'width="{shape.width:.1f}" height="{shape.height:.1f}"'
        yield f'<rect x="{shape.x:.1f}" y="{shape.y:.1f}" {size} fill="none" stroke="#777" stroke-dasharray="4 4"/>'
    else:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape)
        yield f'<polyline points="{points}" fill="none" stroke="{QUIET}" marker-end="url(#tip)"/>'


# The rooms: a row a floor, from the top. (name, first column, columns, what it knows)
COLUMN, ROW, BOX = 80, 74, 46
FLOORS: tuple[tuple[str, tuple[tuple[str, int, int, str], ...]], ...] = (
    (
        GREY,
        (
            ("testing", 0, 2, "faults, tolerances"),
            ("cli", 2, 1, "command"),
            ("bench", 3, 1, "measures"),
            ("server", 4, 2, "HTTP, OpenAI, metrics"),
            ("interop", 6, 2, "torch, Transformers"),
            ("embedding", 8, 2, "sentences"),
            ("generation", 10, 2, "texts"),
        ),
    ),
    (SAND, (("context", 2, 10, "opens a context, here or in a child process"),)),
    (SAND, (("isolation", 2, 6, "a context in a child process"),)),
    (SAND, (("handles", 0, 12, "what a program holds: a context, its caches, its health"),)),
    (SAND, (("actors", 0, 12, "the ContextActor and its children"),)),
    (BLUE, (("planning", 0, 12, "from a request to a launch"),)),
    (
        BLUE,
        (
            ("runtime", 0, 4, "cells, calls, supervision; knows no attention"),
            ("graph", 4, 3, "operation graphs"),
            ("kv", 7, 2, "pages, prefixes"),
            ("reference", 9, 3, "the oracle"),
        ),
    ),
    (GREEN, (("kernels", 4, 5, "dispatch, tiles; a file a family"),)),
    (GREEN, (("devices", 0, 9, "cuda, emulation, mock: allocate, copy, launch, wait"),)),
    (GREEN, (("options", 0, 9, "what is set when a context is opened"),)),
    (
        GREY,
        (
            ("tracing", 0, 3, "events"),
            ("compiling", 3, 3, "sources to cubins"),
            ("arrays", 6, 3, "any library's arrays"),
            ("validation", 9, 3, "sound requests"),
        ),
    ),
    (
        GREY,
        (
            ("errors", 0, 3, "the exception tree"),
            ("values", 3, 4, "how messages show them"),
            ("attention", 7, 5, "messages, results; a request without data"),
        ),
    ),
)
# (importer, imported, column at which the arrow is drawn)
ARROWS = (
    ("cli", "context", 2.5),
    ("bench", "context", 3.5),
    ("server", "context", 5),
    ("interop", "context", 7),
    ("embedding", "context", 9),
    ("context", "isolation", 5),
    ("context", "handles", 10),
    ("isolation", "handles", 5),
    ("handles", "actors", 7),
    ("actors", "planning", 6),
    ("planning", "runtime", 2),
    ("planning", "graph", 5.5),
    ("planning", "kv", 8),
    ("planning", "reference", 10.5),
    ("runtime", "devices", 2),
    ("graph", "kernels", 5.5),
    ("kv", "kernels", 8),
    ("kernels", "devices", 6.5),
    ("devices", "options", 4.5),
    ("options", "tracing", 1.5),
    ("options", "compiling", 4.5),
    ("tracing", "errors", 1.5),
    ("arrays", "values", 6.5),
    ("validation", "attention", 10),
)


def architecture() -> str:
    left, top = 20, 44
    shapes: list[Shape] = [
        Text(left, 26, "Rooms of gpu_actors. Each arrow is an import, and imports run down.", SIZE, INK)
    ]
    floor: dict[str, float] = {}
    for number, (fill, rooms) in enumerate(FLOORS):
        y = top + number * ROW
        for name, column, columns, knows in rooms:
            shapes.append(Box(left + column * COLUMN + 3, y, columns * COLUMN - 6, BOX, name, (knows,), fill))
            floor[name] = y
    for importer, imported, column in ARROWS:
        x = left + column * COLUMN
        shapes.append(((x, floor[importer] + BOX), (x, floor[imported] - 1)))
    return picture(2 * left + 12 * COLUMN, top + len(FLOORS) * ROW, shapes)


# The way of a warm forward request on the mock device: what happens, on which thread, in which files.
LANES = ("the caller's thread", "the actor's thread", "the device", "the completion thread")
WAY: tuple[tuple[int, str, tuple[str, ...]], ...] = (
    (0, "forward() makes the message", ("actors/flash_attn.py",)),
    (0, "finds the plan by signature", ("planning/planner.py", "planning/forward.py", "planning/plan.py")),
    (0, "makes the call and its reply", ("runtime/handle.py", "runtime/call.py", "runtime/reply.py")),
    (0, "queues it, wakes the actor", ("runtime/mailbox.py", "runtime/waking.py")),
    (1, "takes the calls that wait", ("runtime/actor.py", "runtime/mailbox.py")),
    (1, "binds the arrays to the plan", ("planning/forward.py", "planning/plan.py")),
    (1, "claims the call, launches", ("runtime/call.py", "runtime/actor.py")),
    (2, "runs the steps, then signals", ("devices/mock.py", "devices/host.py")),
    (3, "settles the call", ("runtime/completion.py", "runtime/call.py")),
    (3, "wakes each waiting loop once", ("runtime/waking.py",)),
    (0, "the awaiting task resumes", ("runtime/reply.py",)),
)


def way() -> str:
    left, top, lane, gap = 20, 66, 250, 14
    shapes: list[Shape] = [
        Text(left, 26, "The way of a warm forward request, with the files that it enters", SIZE, INK)
    ]
    shapes += [Text(left + number * lane + 6, top - 12, name, SIZE) for number, name in enumerate(LANES)]
    y = float(top)
    before: Box | None = None
    for at, what, files in WAY:
        box = Box(left + at * lane, y, lane - 16, 26 + LINE * len(files), what, files, (BLUE, GREEN, SAND, ROSE)[at])
        shapes.append(box)
        if before is not None:
            shapes.append(between(before, box))
        y += box.height + gap
        before = box
    return picture(2 * left + len(LANES) * lane, y + 6, shapes)


def between(before: Box, after: Box) -> Arrow:
    """From a box to the one below it, or to one of another lane that begins below."""
    middle = after.x + after.width / 2
    if before.x == after.x:
        return ((middle, before.y + before.height), (middle, after.y - 1))
    beside = before.x + (before.width if after.x > before.x else 0)
    level = before.y + before.height / 2
    return ((beside, level), (middle, level), (middle, after.y - 1))


CHILDREN = (
    ("NvrtcActor", "compiles"),
    ("FlashAttnActor", "attention"),
    ("CudnnLikeActor", "graphs"),
    ("KvCacheActor", "paged caches"),
    ("KernelActor", "your kernels"),
    ("yours", "named in options"),
)


def supervision() -> str:
    left, width, box = 20, 990, 150
    shapes: list[Shape] = [
        Text(left, 26, "Supervision: who watches whom, and what follows a failure", SIZE, INK),
        Box(left, 44, width, 48, "ContextActor", ("owns the device, the timers and the supervisor",), SAND),
    ]
    for number, (name, what) in enumerate(CHILDREN):
        x = left + number * (box + 18)
        shapes += [((x + box / 2, 92), (x + box / 2, 119)), Box(x, 120, box, 44, name, (what,), BLUE)]
    cell = 200
    shapes += [
        Text(left, cell + 6, "Inside each child"),
        Frame(left, cell + 16, 300, 316),
        Text(left + 10, cell + 34, "cell: stays when the actor is replaced"),
        Box(left + 12, cell + 44, 276, 42, "handle", ("what programs hold",), GREEN),
        Box(left + 12, cell + 100, 276, 42, "mailbox", ("the calls, answered or not",), GREEN),
        Box(left + 12, cell + 156, 108, 56, "stream", ("in order",), GREEN),
        Box(left + 132, cell + 156, 156, 56, "completion thread", ("settles calls",), GREEN),
        Box(
            left + 12,
            cell + 256,
            276,
            56,
            "incarnation",
            ("the ServiceActor, on its thread;", "a restart replaces it alone"),
            ROSE,
        ),
    ]
    x, wide = 380, 290
    far = x + wide + 50
    shapes += [
        Box(
            x,
            cell + 16,
            wide,
            56,
            "supervisor",
            ("counts failures within the window", "RestartPolicy(max_restarts, window)"),
            SAND,
        ),
        Box(
            x,
            cell + 110,
            wide,
            56,
            "few: restart after a backoff",
            ("one_for_one or all_for_one;", "queued calls wait, launches go on"),
            GREEN,
        ),
        Box(
            far,
            cell + 16,
            wide,
            56,
            "many, and the actor is vital",
            ("the context fails: calls get ActorStopped,", "health is failed"),
            ROSE,
        ),
        Box(
            far,
            cell + 110,
            wide,
            56,
            "many, and the actor is not vital",
            ("it stops alone; calls get ActorStopped,", "health is degraded and ready"),
            SAND,
        ),
        ((left + 288, cell + 284), (x - 30, cell + 284), (x - 30, cell + 44), (x - 1, cell + 44)),
        Text(x - 24, cell + 258, "the incarnation raises: the request at hand gets ActorFailed"),
        ((x + wide / 2, cell + 72), (x + wide / 2, cell + 109)),
        ((x + wide, cell + 44), (far - 1, cell + 44)),
        ((x + wide, cell + 60), (far - 20, cell + 60), (far - 20, cell + 138), (far - 1, cell + 138)),
        Box(
            x,
            cell + 276,
            wide,
            56,
            "context loss",
            ("seen on any thread: a sticky CUDA error,", "or a launch that outlasts hang_timeout"),
            ROSE,
        ),
        Box(
            far,
            cell + 276,
            wide,
            56,
            "Children.context_lost",
            ("calls get ContextLost, generation + 1,", "health is failed: replace the process"),
            ROSE,
        ),
        ((x + wide, cell + 304), (far - 1, cell + 304)),
    ]
    return picture(far + wide + left, cell + 350, shapes)


def pool() -> str:
    left, width, height, step = 20, 210, 62, 84
    shapes: list[Shape] = [
        Text(left, 26, "A pool: requests without state go to any worker, sequences to their home", SIZE, INK),
        Box(left, 60, width, height, "pool.ask(request)", ("attention, gradients, graphs:", "no state"), GREEN),
        Box(left, 60 + 2 * step, width, height, "pool.kv_cache(...)", ("create, append, attend:", "sequences"), BLUE),
    ]
    middle, far = left + width + 70, left + 2 * (width + 70)
    shapes += [
        Box(middle, 60, width, height, "less loaded of two", ("lost or full: another one,", "within the budget"), SAND),
        Box(
            middle,
            60 + 2 * step,
            width,
            height,
            "home",
            ("by prefixes and load;", "lost: never replayed"),
            SAND,
        ),
        ((left + width, 60 + height / 2), (middle - 1, 60 + height / 2)),
        ((left + width, 60 + 2 * step + height / 2), (middle - 1, 60 + 2 * step + height / 2)),
    ]
    for number, state in enumerate(("generation 1", "generation 3: two were lost", "leaving: nothing new")):
        y = 60 + number * step
        shapes.append(Box(far, y, width, height, f"worker-{number + 1}", ("a context, in a process", state), ROSE))
    join = middle + width + 35
    for number, offset in ((0, -10), (1, -10)):
        y = 60 + number * step + height / 2 + offset
        start = 60 + height / 2
        shapes.append(((middle + width, start), (join - 12, start), (join - 12, y), (far - 1, y)))
    start = 60 + 2 * step + height / 2
    for number, offset in ((0, 12), (1, 12), (2, 12)):
        y = 60 + number * step + height / 2 + offset
        shapes.append(((middle + width, start), (join + 12, start), (join + 12, y), (far - 1, y)))
    return picture(far + width + left, 60 + 3 * step, shapes)


DRAWINGS = {"architecture.svg": architecture, "way.svg": way, "supervision.svg": supervision, "pool.svg": pool}


if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (Path(__file__).parent / name).write_text(draw(), encoding="utf-8")
