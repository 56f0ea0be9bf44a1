"""A few shapes as SVG, in colours that follow the viewer's light or dark theme. Knows nothing of benchmarks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr


@dataclass(frozen=True, slots=True, kw_only=True)
class Colour:
    """One colour by name; viewers that know no themes show the light one."""

    name: str
    light: str
    dark: str


INK = Colour(name="ink", light="#16202c", dark="#e8eef5")
MUTED = Colour(name="muted", light="#5b6b7b", dark="#9fb0c2")
FAINT = Colour(name="faint", light="#7d8c9b", dark="#7c8da0")
GRID = Colour(name="grid", light="#e6ebf0", dark="#263341")
SOFT = Colour(name="soft", light="#f4f7fa", dark="#1a2430")
ACCENT = Colour(name="accent", light="#2f6fed", dark="#5b93ff")
LATE = Colour(name="late", light="#c2410c", dark="#ff9b6a")
PAPER = Colour(name="paper", light="#ffffff", dark="#10171f")
ON_COLOUR = Colour(name="on-colour", light="#ffffff", dark="#10171f")

BOLD = 600
REGULAR_EM, BOLD_EM = 0.54, 0.62
"""Width of a character over the size of its text: the mean of words and numbers in the widest font of the list."""

FONT = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


class Canvas:
    """A sheet in pixels. Text is escaped; later shapes cover earlier ones."""

    def __init__(self, width: int, height: int, *, title: str) -> None:
        self._colours: dict[tuple[str, str], Colour] = {}
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family={quoteattr(FONT)} role="img">',
            f"<title>{escape(title)}</title>",
        )
        self._parts = [f'<rect width="{width}" height="{height}" {self._fill(PAPER)}/>']

    def text(self) -> str:
        """Return the whole file."""
        return "\n".join([*self._head, self._style(), *self._parts, "</svg>", ""])

    def _style(self) -> str:
        light = "\n".join(f".{name} {{ {kind}: {each.light} }}" for (kind, name), each in self._colours.items())
        dark = "\n".join(f".{name} {{ {kind}: {each.dark} }}" for (kind, name), each in self._colours.items())
        return f"<style>\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n</style>"

    def _fill(self, colour: Colour) -> str:
        """Return the attribute that fills a shape."""
        return f'class="{self._class("fill", colour)}"'

    def _stroke(self, colour: Colour) -> str:
        """Return the attribute that draws a shape's line."""
        return f'class="{self._class("stroke", colour)}"'

    def _class(self, kind: str, colour: Colour) -> str:
        name = f"{kind}-{colour.name}"
        self._colours[kind, name] = colour
        return name

    def write(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float,
        colour: Colour,
        weight: int = 400,
        anchor: str = "start",
        spacing: float = 0.0,
        halo: bool = False,
        room: float = math.inf,
    ) -> None:
        """Write one line whose baseline is at y, smaller if it would need more than `room`.

        `halo` keeps it readable on lines.
        """
        size = min(size, room / (len(text) * (BOLD_EM if weight >= BOLD else REGULAR_EM))) if text else size
        extra = f' letter-spacing="{spacing:g}"' if spacing else ""
        extra += ' paint-order="stroke" stroke-width="4" stroke-linejoin="round"' if halo else ""
        classes = self._class("fill", colour) + (f" {self._class('stroke', PAPER)}" if halo else "")
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.4g}" font-weight="{weight}" class="{classes}" '
            f'text-anchor="{anchor}"{extra}>{escape(text)}</text>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, colour: Colour, width: float = 1.0, dashes: str = ""
    ) -> None:
        extra = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {self._stroke(colour)} '
            f'stroke-width="{width:g}"{extra}/>'
        )

    def box(self, x: float, y: float, width: float, height: float, *, colour: Colour, radius: float) -> None:
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:g}" '
            f"{self._fill(colour)}/>"
        )

    def path(self, points: Sequence[tuple[float, float]], *, colour: Colour, width: float, opacity: float) -> None:
        """Join points by straight lines; nothing for fewer than two."""
        if len(points) > 1:
            steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            self._parts.append(
                f'<polyline points="{steps}" fill="none" {self._stroke(colour)} stroke-width="{width:g}" '
                f'stroke-linejoin="round" opacity="{opacity:g}"/>'
            )

    def dot(self, x: float, y: float, *, colour: Colour, radius: float) -> None:
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" {self._fill(colour)}/>')

    def triangle(self, x: float, y: float, *, colour: Colour) -> None:
        """Draw a small triangle that points up, its tip at (x, y)."""
        self._parts.append(f'<path d="M {x:.1f} {y:.1f} l 5 9 h -10 z" {self._fill(colour)}/>')
