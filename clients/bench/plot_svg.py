"""A few shapes as SVG. Knows nothing of benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

INK = "#16202c"
MUTED = "#5b6b7b"
FAINT = "#8d9baa"
GRID = "#e6ebf0"
SOFT = "#f4f7fa"
ACCENT = "#2f6fed"
LATE = "#c2410c"
PAPER = "#ffffff"

FONT = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


class Canvas:
    """A white sheet in pixels. Text is escaped; later shapes cover earlier ones."""

    def __init__(self, width: int, height: int, *, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family={quoteattr(FONT)} role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        ]

    def text(self) -> str:
        """Return the whole file."""
        return "\n".join([*self._parts, "</svg>", ""])

    def write(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float,
        colour: str,
        weight: int = 400,
        anchor: str = "start",
        spacing: float = 0.0,
        halo: bool = False,
    ) -> None:
        """Write one line whose baseline is at y. `halo` keeps it readable on lines."""
        extra = f' letter-spacing="{spacing:g}"' if spacing else ""
        extra += f' paint-order="stroke" stroke="{PAPER}" stroke-width="4" stroke-linejoin="round"' if halo else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" font-weight="{weight}" fill="{colour}" '
            f'text-anchor="{anchor}"{extra}>{escape(text)}</text>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, colour: str, width: float = 1.0, dashes: str = ""
    ) -> None:
        extra = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
            f'stroke-width="{width:g}"{extra}/>'
        )

    def box(self, x: float, y: float, width: float, height: float, *, colour: str, radius: float) -> None:
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:g}" fill="{colour}"/>'
        )

    def path(self, points: Sequence[tuple[float, float]], *, colour: str, width: float, opacity: float) -> None:
        """Join points by straight lines; nothing for fewer than two."""
        if len(points) > 1:
            steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            self._parts.append(
                f'<polyline points="{steps}" fill="none" stroke="{colour}" stroke-width="{width:g}" '
                f'stroke-linejoin="round" opacity="{opacity:g}"/>'
            )

    def dot(self, x: float, y: float, *, colour: str, radius: float) -> None:
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}"/>')

    def triangle(self, x: float, y: float, *, colour: str) -> None:
        """Draw a small triangle that points up, its tip at (x, y)."""
        self._parts.append(f'<path d="M {x:.1f} {y:.1f} l 5 9 h -10 z" fill="{colour}"/>')
