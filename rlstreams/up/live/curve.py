"""A small line chart in braille dots: two columns and four rows of dots to each character cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

KILL = "\u250a"  # a dotted stroke
_BLANK = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] of one cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points of one quantity, x ascending, and the style of its dots."""

    points: Sequence[tuple[float, float]]
    style: str
    marker: str = ""  # a character at each point: lines differ without colour too


def chart(
    lines: Sequence[Line],
    *,
    width: int,
    height: int,
    x_max: float,
    y_min: float = 0.0,
    y_max: float = 1.0,
    marks: Sequence[float] = (),
) -> list[Text]:
    """`height` rows of `width` cells; x from 0 to `x_max`, y from `y_min` to `y_max`.

    Args:
        lines: later ones are drawn over earlier ones, cell by cell.
        marks: x of vertical strokes, drawn under everything.
    """
    cells: dict[tuple[int, int], tuple[str, str]] = {}  # style and character of a cell

    def dot(x: int, y: int, style: str) -> None:
        owner, char = cells.get((y // 4, x // 2), ("", " "))
        # Mixed dots would take the wrong colour: the newer line owns the cell.
        dots = ord(char) if owner == style and char >= chr(_BLANK) else _BLANK
        cells[y // 4, x // 2] = (style, chr(dots | _DOTS[y % 4][x % 2]))

    for x in marks:
        for row in range(height):
            cells[row, _scale(x, x_max, width * 2) // 2] = ("red", KILL)
    for line in lines:
        spots = [
            (
                _scale(x, x_max, width * 2),
                height * 4 - 1 - _scale(y - y_min, y_max - y_min, height * 4),
            )
            for x, y in line.points
            if math.isfinite(y)
        ]
        for (x0, y0), (x1, y1) in zip(spots, spots[1:] or spots, strict=False):
            num = max(abs(x1 - x0), abs(y1 - y0), 1)
            for i in range(num + 1):
                dot(x0 + round((x1 - x0) * i / num), y0 + round((y1 - y0) * i / num), line.style)
        for x, y in spots if line.marker else ():
            cells[y // 4, x // 2] = (line.style, line.marker)
    return [
        Text.assemble(*((char, style) for style, char in row), no_wrap=True)
        for row in ([cells.get((y, x), ("", " ")) for x in range(width)] for y in range(height))
    ]


def _scale(value: float, most: float, num_dots: int) -> int:
    share = min(1.0, max(0.0, value / most)) if most > 0 else 0.0
    return round(share * (num_dots - 1))
