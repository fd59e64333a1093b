"""Drawings in SVG, which the page and the sheets of figures share, and PNGs of them.

The page draws in its own style sheet. A sheet is a file of its own: it carries the same
rules with the light theme's colours filled in. A PNG is a conversion of the sheet.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Literal

from planner.errors import PlanFileError
from planner.report.markup import asset, escape

__all__ = [
    "SHEET_WIDTH",
    "Drawing",
    "Plane",
    "absent_drawing",
    "block",
    "blocks",
    "fitted",
    "hatching",
    "hint",
    "key",
    "label",
    "palette",
    "png_or_svg",
    "require_renderer",
    "sheet",
    "ticks",
    "time_unit",
    "told",
]

#: Pixels of the drawings of a sheet, and left and right of them.
SHEET_WIDTH, _MARGIN = 350, 6
#: Width of a sheet, a column of a paper, and resolution of a PNG.
_INCHES, _DOTS_PER_INCH = 3.5, 300
#: Size of text on a sheet, in pixels of the drawings.
_SHEET_FONT = 10
#: Mean width of a letter, as a share of the size of the font.
_LETTER = 0.58
#: Direction of a swatch's lines in the style sheet, as a path in a tile of 6 x 6.
_LINES = {
    "0deg": "M0 3h6",
    "90deg": "M3 0v6",
    "45deg": "M-1-1L7 7M-1 5L1 7M5-1L7 1",
    "135deg": "M-1 7L7-1M-1 1L1-1M5 7L7 5",
}
_SWATCH = re.compile(r"^\.([kmo]-[\w-]+) \{ --c: var\(--([\w-]+)\);(.*)\}$", re.M)


@cache
def palette() -> Mapping[str, str]:
    """Name of a colour to ``#rrggbb``, of the light theme; after Okabe and Ito."""
    found: dict[str, str] = {}
    for name, colour in re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6});", _css()):
        # The light theme comes first; others repeat its names.
        found.setdefault(name, colour)
    return MappingProxyType(found)


@cache
def _css() -> str:
    return asset("report.css") + asset("stream.css")


@cache
def _hatched() -> Mapping[str, str]:
    """Class of a swatch to its pattern of lines or dots; classes without are left out.

    A pattern is SVG, in a tile that repeats.
    """
    found = {}
    for name, _, rest in _SWATCH.findall(_css()):
        mark = 'stroke="#000" opacity=".34"'
        if "--idle-mark" in rest:
            mark = f'stroke="{palette()["idle-mark"]}"'
        if "255, 255, 255" in rest:
            mark = 'stroke="#fff" stroke-width="2" opacity=".55"'
        if "radial" in rest:
            found[name] = '<circle cx="2" cy="2" r=".8" opacity=".34"/>'
        for direction, path in _LINES.items():
            if f"gradient({direction}" in rest:
                found[name] = f'<path d="{path}" {mark}/>'
    return MappingProxyType(found)


def hatching() -> str:
    """Definitions of all patterns, once for a page or a sheet."""
    tiles = "".join(
        f'<pattern id="on-{name}" width="{size}" height="{size}" '
        f'patternUnits="userSpaceOnUse">{mark}</pattern>'
        for name, mark in _hatched().items()
        for size in (4 if "circle" in mark else 6,)
    )
    return f"<defs>{tiles}</defs>"


@cache
def _sheet_style() -> str:
    """Rules of the page's style sheet for SVG, in the light theme's colours."""
    rules = re.findall(r"^svg (\.?\w[^{]*)\{([^}]*)\}", _css(), re.M)
    rules += [
        (f".{name}", f"fill: var(--{colour});")
        for name, colour, _ in _SWATCH.findall(_css())
    ]
    rules += [(f".is-{name}", f"fill: {colour};") for name, colour in palette().items()]
    rules += [(f".p{i}", f"stroke: var(--p{i});") for i in range(8)]
    told = "\n".join(f"{selector.strip()} {{{body}}}" for selector, body in rules)
    return re.sub(r"var\(--([\w-]+)\)", lambda found: palette()[found[1]], told)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from low to high, about ``count`` of them."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    rough = span / max(count, 1)
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(s * scale for s in (1, 2, 2.5, 5, 10) if s * scale >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def time_unit(span_s: float) -> tuple[float, str]:
    """Seconds of the unit that a time axis is given in, and its name."""
    for size, name in ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes")):
        if span_s >= 2 * size:
            return size, name
    return 1.0, "seconds"


def told(text: object) -> str:
    """Text that XML may hold, on one line."""
    seen = "".join(sign if sign.isprintable() else " " for sign in str(text))
    return escape(" ".join(seen.split()))


def fitted(text: str, room: float) -> str:
    """Cut a text to the room that there is, in pixels."""
    most = max(int(room / (_LETTER * _SHEET_FONT)), 1)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def label(
    x: float, y: float, text: object, anchor: str = "start", css: str = ""
) -> str:
    """A line of text whose base is at ``y``."""
    kind = f' class="{css}"' if css else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{told(text)}'
        f"</text>"
    )


def hint(tip: str) -> str:
    """Attribute with the lines that a page shows to whoever points at a shape."""
    return f' data-tip="{chr(10).join(map(told, tip.split(chr(10))))}"' if tip else ""


def block(
    css: str, x: float, y: float, width: float, height: float, tip: str = ""
) -> str:
    """A filled rectangle, hatched if its class is and it is wide enough."""
    place = (
        f'x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.0):.2f}" height="{height:.1f}"'
    )
    drawn = f'<rect class="{css}" {place}{hint(tip)}/>'
    if css in _hatched() and width > 4:
        drawn += f'<rect fill="url(#on-{css})" {place} pointer-events="none"/>'
    return drawn


def blocks(
    css: str, boxes: Iterable[tuple[float, float, float, float]], hatch: str = ""
) -> str:
    """Many rectangles as one path.

    Args:
        css: Class of them all.
        boxes: Left, top, width and height of each.
        hatch: Class whose pattern lies over them, if not their own.
    """
    path = "".join(
        f"M{x:.2f} {y:.1f}h{w:.2f}v{h:.1f}h-{w:.2f}z" for x, y, w, h in boxes
    )
    if not path:
        return ""
    hatch = hatch or css
    over = f'<path fill="url(#on-{hatch})" d="{path}"/>' if hatch in _hatched() else ""
    return f'<path class="{css}" d="{path}"/>{over}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """Values from left to right and from the floor up, in pixels of a drawing.

    Attributes:
        left: Edge, as the next three.
        x_range: Values at the left and right edge.
        y_range: Values at the floor and at the top.
        log_x: Logarithmic from left to right.
    """

    left: float
    right: float
    top: float
    floor: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log_x: bool = False

    def x(self, value: float) -> float:
        """Pixels from the left edge of the drawing."""
        low, high = self.x_range
        share = (
            math.log(value / low) / math.log(high / low)
            if self.log_x
            else (value - low) / ((high - low) or 1.0)
        )
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        """Pixels from the top of the drawing."""
        low, high = self.y_range
        return self.floor - (value - low) / ((high - low) or 1.0) * (
            self.floor - self.top
        )

    def level(self, value: float, css: str) -> str:
        """A line across, at a value."""
        y = self.y(value)
        return (
            f'<line class="{css}" x1="{self.left}" x2="{self.right}" y1="{y:.1f}" '
            f'y2="{y:.1f}"/>'
        )

    def y_axis(self, places: Iterable[tuple[float, str]], *, css: str = "rule") -> str:
        """Lines across, with what they stand for at their left."""
        return "".join(
            self.level(value, css)
            + label(self.left - 8, self.y(value) + 4, text, "end")
            for value, text in places
        )

    def x_axis(self, places: Iterable[tuple[float, str]], title: str = "") -> str:
        """The floor with ticks, and what they stand for below."""
        drawn = (
            f'<line class="axis" x1="{self.left}" x2="{self.right}" '
            f'y1="{self.floor}" y2="{self.floor}"/>'
        )
        for value, text in places:
            x = self.x(value)
            drawn += (
                f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{self.floor}" '
                f'y2="{self.floor + 5}"/>'
            ) + label(x, self.floor + 17, text, "middle")
        if title:
            middle = (self.left + self.right) / 2
            drawn += label(middle, self.floor + 36, title, "middle")
        return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """SVG in a box, without the element around it."""

    body: str
    width: float
    height: float

    def element(self, name: str, role: str = "img") -> str:
        """The drawing for a page, under a name for those who do not see it."""
        return (
            f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="{role}" '
            f'aria-label="{escape(name)}">{self.body}</svg>'
        )


def key(entries: Sequence[tuple[str, str]], *, columns: int = 3) -> Drawing:
    """A legend of a sheet: drawings in boxes of 16 x 16, and what they stand for."""
    each = SHEET_WIDTH / columns
    body = ""
    for index, (mark, name) in enumerate(entries):
        x, y = index % columns * each, index // columns * 16
        body += f'<g transform="translate({x:.1f} {y})">{mark}</g>'
        body += label(x + 20, y + 11.5, fitted(name, each - 22))
    return Drawing(
        body=body, width=SHEET_WIDTH, height=16.0 * -(-len(entries) // columns)
    )


def absent_drawing(why: str) -> Drawing:
    """The reason why there is no drawing, in place of it."""
    lines = textwrap.wrap(f"Not shown. {why}", 56)[:5]
    body = "".join(label(0, 12 + 14 * i, line) for i, line in enumerate(lines))
    return Drawing(body=body, width=SHEET_WIDTH, height=14.0 * len(lines) + 4)


def sheet(head: Sequence[str], panels: Iterable[tuple[str, Sequence[Drawing]]]) -> str:
    """A file of titled drawings, one below the other, as wide as a column of a paper.

    Args:
        head: Texts above the drawings, each on two lines at most.
        panels: Titles, and drawings that belong together.
    """
    lines = [line for text in head for line in textwrap.wrap(text, 48)[:2]]
    body = "".join(
        label(0, 16 + 15 * i, line, css="head") for i, line in enumerate(lines)
    )
    y = 15.0 * len(lines) + 12
    for title, drawings in panels:
        body += label(0, y + 16, title, css="strong")
        y += 26
        for drawing in drawings:
            body += f'<g transform="translate(0 {y:.1f})">{drawing.body}</g>'
            y += drawing.height + 4
        y += 6
    style = f"text {{font-size: {_SHEET_FONT}px;}} .head {{fill: #14181f;}}"
    wide = SHEET_WIDTH + 2 * _MARGIN
    box = f"{-_MARGIN} 0 {wide} {y:.0f}"
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" '
        f'width="{_INCHES}in" height="{_INCHES * round(y) / wide:.4f}in" '
        f'font-family="DejaVu Sans, Verdana, sans-serif">'
        f"<style>{_sheet_style()}\n{style}</style>{hatching()}"
        f'<rect x="{-_MARGIN}" width="{wide}" height="{y:.0f}" fill="#fff"/>{body}'
        "</svg>\n"
    )


def require_renderer() -> None:
    """Refuse a PNG where nothing can make one.

    Raises:
        PlanFileError: With the command that installs what is missing.
    """
    try:
        import resvg_py  # noqa: F401
    except ImportError as error:
        raise PlanFileError(
            f"{error.name} is not installed; a PNG needs pip install "
            f"'meshwright[figures]'"
        ) from error


def png_or_svg(drawn: str, form: Literal["png", "svg"]) -> bytes:
    """A sheet as a file; the same sheet gives the same bytes, on any machine.

    Args:
        drawn: By :func:`sheet`.
        form: Format of the file; PNG has 300 dots an inch.

    Raises:
        PlanFileError: If it is to be a PNG and resvg-py is not installed.
    """
    if form == "svg":
        return drawn.encode()
    require_renderer()
    import resvg_py

    assets = resources.files("planner.report") / "assets"
    with (
        resources.as_file(assets / "DejaVuSans.ttf") as plain,
        resources.as_file(assets / "DejaVuSans-Bold.ttf") as bold,
    ):
        made: bytes = resvg_py.svg_to_bytes(
            svg_string=drawn,
            dpi=_DOTS_PER_INCH,
            skip_system_fonts=True,
            font_files=[str(plain), str(bold)],
            sans_serif_family="DejaVu Sans",
        )
    return bytes(made)
