"""The drawings in docs are what their scripts draw, their labels are readable, and the names in them exist."""

from __future__ import annotations

import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from support.service import REPOSITORY

DOCS = REPOSITORY / "docs"
PICTURES: dict[str, Any] = runpy.run_path(str(DOCS / "pictures.py"))
DRAWN = {**PICTURES["DRAWINGS"], "hopper_timeline.svg": runpy.run_path(str(DOCS / "hopper_timeline.py"))["svg"]}
SVG = "{http://www.w3.org/2000/svg}"
LEAST_CONTRAST = 4.5  # for normal text, Web Content Accessibility Guidelines 2.1, 1.4.3
LETTER, BOLD = 0.62, 0.69  # average letter width of the widest usual sans-serif fonts, as a part of the height


def luminance(colour: str) -> float:
    named = {"white": "#ffffff", "black": "#000000"}
    digits = named.get(colour, colour)[1:]
    channels = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def labels(drawing: Path) -> list[tuple[ElementTree.Element, ElementTree.Element]]:
    """Each text inside a block, with the block."""
    root = ElementTree.fromstring(drawing.read_text(encoding="utf-8"))
    blocks = [rect for rect in root.iter(f"{SVG}rect") if "rx" in rect.attrib]
    found = []
    for text in root.iter(f"{SVG}text"):
        if text.get("text-anchor") == "middle":
            x, y = float(text.attrib["x"]), float(text.attrib["y"])
            (block,) = [rect for rect in blocks if holds(rect, x, y)]
            found.append((text, block))
    return found


def holds(rect: ElementTree.Element, x: float, y: float) -> bool:
    left, top, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
    return left <= x <= left + width and top <= y <= top + height


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_is_what_its_script_draws(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == DRAWN[name]()


@pytest.mark.parametrize("name", DRAWN)
def test_every_label_fits_its_block_and_stands_out_from_it(name: str) -> None:
    found = labels(DOCS / name)
    assert found
    for text, block in found:
        letter = BOLD if "font-weight" in text.attrib else LETTER
        width = letter * float(text.attrib["font-size"]) * len(text.text or "")
        assert width <= float(block.attrib["width"]) + 1, text.text
        assert contrast(text.attrib["fill"], block.attrib["fill"]) >= LEAST_CONTRAST, text.text


@pytest.mark.parametrize("name", DRAWN)
def test_every_drawing_is_on_a_page(name: str) -> None:
    assert any(f"]({name})" in page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))


def test_every_file_on_the_way_of_a_request_is_there() -> None:
    files = [file for _, _, files in PICTURES["WAY"] for file in files]
    assert [file for file in files if not (REPOSITORY / "gpu_actors" / file).is_file()] == []


def test_contrast_is_that_of_the_guidelines() -> None:
    assert contrast("white", "#000000") == pytest.approx(21.0)
    assert contrast("#767676", "white") == pytest.approx(4.54, abs=0.01)
