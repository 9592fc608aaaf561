"""Draws docs/hopper_timeline.svg, who does what at the same time in forward_sm90: python docs/hopper_timeline.py

Products are as wide as they take on the tensor cores for a tile of 128 x 128 at head dim 128; the rest is a sketch.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import NamedTuple

PRODUCT = 512  # clocks: 64 rows x 128 keys x 128 columns at 2048 multiply-adds a clock
PERIOD = 4 * PRODUCT
LEFT, WIDTH, TOP, LANE, BAR = 150, 1000, 46, 58, 34
CLOCKS = 5 * PRODUCT * 2
TITLE = f"a sketch, not a measurement; between dashed lines one step of both consumers, {PERIOD} clocks of products"
FONT = 'font-family="sans-serif" font-size="13"'
COLOURS = {"S": "#3b6593", "O": "#72b7b2", "load": "#b0b0b0", "softmax": "#f2a541", "finish": "#e8d5a9"}
DARK = ("S",)
SIZE, LINE = 11, 13
LETTER = 0.62  # of a letter's height: how wide the widest usual sans-serif fonts are on average


class Block(NamedTuple):
    lane: int
    start: int
    length: int
    kind: str
    text: str


LANES = ("producer (TMA)", "tensor cores", "consumer 1", "consumer 2")


def blocks() -> list[Block]:
    drawn: list[Block] = []
    for step in range(3):
        n = ("n", "n-1", "n-2")[step]
        after = ("n+1", "n", "n-1")[step]
        following = ("n-1", "n-2", "n-3")[step]
        for consumer in range(2):
            start = step * PERIOD + consumer * 2 * PRODUCT
            drawn += [
                Block(1, start, PRODUCT, "S", f"S{consumer + 1}({n})"),
                Block(1, start + PRODUCT, PRODUCT, "O", f"O{consumer + 1} += P V({after})"),
                Block(2 + consumer, start + PRODUCT, PRODUCT + 90, "softmax", f"softmax({n})"),
                Block(2 + consumer, start + 2 * PRODUCT + 90, 260, "finish", "pack, rescale"),
            ]
        # Both consumers have left K(n) when the second one's S is there, and V(n + 1) when its O is.
        free = step * PERIOD + 3 * PRODUCT
        drawn.append(Block(0, free, 700, "load", f"K({following[:-1]}{int(following[-1]) + 1})"))
        drawn.append(Block(0, free + PRODUCT + 200, 700, "load", f"V({following})"))
    return [block for block in drawn if block.start < CLOCKS]


def x(clock: int) -> float:
    return LEFT + clock * WIDTH / CLOCKS


def label(block: Block, left: float, right: float, top: float) -> list[str]:
    """A block's text, on as many lines as it needs; none where the block ends at the edge before a line fits."""
    fits = int((right - left) / (SIZE * LETTER))
    rows = textwrap.wrap(block.text, max(1, fits), break_long_words=False)
    if not rows or max(map(len, rows)) > fits:
        return []
    first = top + BAR / 2 + 4 - (len(rows) - 1) * LINE / 2
    fill = "white" if block.kind in DARK else "black"
    shared = f'x="{(left + right) / 2:.1f}" text-anchor="middle" font-size="{SIZE}" fill="{fill}"'
    return [f'<text {shared} y="{first + number * LINE:.1f}">{row}</text>' for number, row in enumerate(rows)]


def svg() -> str:
    height = TOP + LANE * len(LANES) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" {FONT}>',
        f'<rect width="100%" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="24">{TITLE}</text>',
    ]
    for number, name in enumerate(LANES):
        lines.append(f'<text x="8" y="{TOP + number * LANE + 22}">{name}</text>')
    bottom = TOP + LANE * len(LANES)
    steps = [x(step * PERIOD) for step in range(1, 1 + CLOCKS // PERIOD)]
    dashes = 'stroke="#999" stroke-dasharray="3 4"'
    lines += [f'<line x1="{at:.0f}" x2="{at:.0f}" y1="{TOP - 8}" y2="{bottom}" {dashes}/>' for at in steps]
    for block in blocks():
        left, right = x(block.start), min(x(block.start + block.length), LEFT + WIDTH)
        top = TOP + block.lane * LANE
        lines.append(
            f'<rect x="{left:.1f}" y="{top}" width="{right - left - 1:.1f}" height="{BAR}" rx="3" '
            f'fill="{COLOURS[block.kind]}"/>'
        )
        lines += label(block, left, right, top)
    note = "A consumer waits for S before its softmax, for O before it packs P, and in the gaps for its turn."
    lines += [f'<text x="{LEFT}" y="{height - 14}" fill="#555">{note}</text>', "</svg>"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(svg(), encoding="utf-8")
