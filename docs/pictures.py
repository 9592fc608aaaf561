"""Draws the way of a request and a pool as SVG: python docs/pictures.py

WAY names files, and a test holds them against the package.
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


Arrow = tuple[Point, ...]
Shape = Box | Text | Arrow


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
    else:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape)
        yield f'<polyline points="{points}" fill="none" stroke="{QUIET}" marker-end="url(#tip)"/>'


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


DRAWINGS = {"way.svg": way, "pool.svg": pool}


if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (Path(__file__).parent / name).write_text(draw(), encoding="utf-8")
