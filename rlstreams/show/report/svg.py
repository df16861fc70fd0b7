"""Charts as inline SVG: colours come from the page's CSS, so they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 14, 12, 40  # margins, in units of the view box
_LETTER = 6.5  # width of one, about
_BAR_HEIGHT = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points of one quantity, x ascending. `css` names its colour: a, b, c or d."""

    name: str
    points: Sequence[tuple[float, float]]
    css: str = "a"
    has_dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Size, labels and ranges of a line chart."""

    title: str  # read aloud; shown as the figure's caption
    x_label: str
    y_label: str
    width: int = 460
    height: int = 230
    y_min: float | None = None  # None: from the data
    y_max: float | None = None
    x_max: float | None = None
    marks: Sequence[tuple[float, str]] = ()  # x, and what happened there


def ticks(low: float, high: float, num: int = 5) -> list[float]:
    """About `num` round numbers from at or above `low` to at or below `high`."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    rough = span / max(1, num - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if rough <= power * factor * 1.001)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float) -> str:
    """A tick or a value, short: `0.25`, `1,200`, `2e-04`."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) < 0.001:
        return f"{value:.0e}"
    return f"{value:.3g}"


def line_chart(series: Sequence[Series], frame: Frame) -> str:
    """An SVG of finite points; a sentence says so where there are none."""
    kept = [
        Series(
            name=s.name,
            points=[(x, y) for x, y in s.points if math.isfinite(x) and math.isfinite(y)],
            css=s.css,
            has_dots=s.has_dots,
        )
        for s in series
    ]
    if not any(s.points for s in kept):
        return '<p class="none">no data yet</p>'
    plane = _Plane.of(kept, frame)
    parts = [*plane.grid(frame), *plane.marks(frame)]
    for s in kept:
        parts += plane.line(s)
    label = escape(f"{frame.title}. {_summary(kept)}")
    return (
        f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def _summary(series: Sequence[Series]) -> str:
    return " ".join(
        f"{s.name}: from {number(s.points[0][1])} to {number(s.points[-1][1])}."
        for s in series
        if s.points
    )


@dataclass(frozen=True, slots=True)
class _Plane:
    """Maps data to the view box."""

    x_min: float
    x_max: float
    y_min: float
    y_max: float
    width: int
    height: int

    @classmethod
    def of(cls, series: Sequence[Series], frame: Frame) -> _Plane:
        xs = [x for s in series for x, _ in s.points]
        ys = [y for s in series for _, y in s.points]
        y_min = min(ys) if frame.y_min is None else frame.y_min
        y_max = max(ys) if frame.y_max is None else frame.y_max
        if y_max <= y_min:
            y_min, y_max = y_min - (abs(y_min) or 1) / 2, y_min + (abs(y_min) or 1) / 2
        elif frame.y_max is None:
            y_max += (y_max - y_min) * 0.05
        x_max = max(xs) if frame.x_max is None else frame.x_max
        x_min = min(0.0, *xs)
        return cls(x_min, max(x_max, x_min + 1), y_min, y_max, frame.width, frame.height)

    def x(self, value: float) -> float:
        share = (value - self.x_min) / (self.x_max - self.x_min)
        return round(_LEFT + share * (self.width - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        share = (value - self.y_min) / (self.y_max - self.y_min)
        share = min(1.0, max(0.0, share))
        return round(self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM), 1)

    def grid(self, frame: Frame) -> list[str]:
        bottom, right = self.height - _BOTTOM, self.width - _RIGHT
        parts = []
        for value in ticks(self.y_min, self.y_max):
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{_LEFT} {y}H{right}"/>')
            parts.append(f'<text x="{_LEFT - 7}" y="{y + 4}" class="end">{number(value)}</text>')
        for value in ticks(self.x_min, self.x_max, 7):
            x = self.x(value)
            parts.append(f'<text x="{x}" y="{bottom + 17}" class="mid">{number(value)}</text>')
        parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>')
        middle = (_LEFT + right) / 2
        parts.append(
            f'<text x="{middle}" y="{self.height - 5}" class="mid">{escape(frame.x_label)}</text>'
        )
        parts.append(
            f'<text transform="translate(12 {(bottom + _TOP) / 2}) rotate(-90)" class="mid">'
            f"{escape(frame.y_label)}</text>"
        )
        return parts

    def marks(self, frame: Frame) -> list[str]:
        """Strokes. Each has its words beside it if they end before the next; all tell them."""
        marks = sorted(frame.marks)
        places = [*(self.x(at) for at, _ in marks), float(self.width)]
        parts = []
        for (_, what), (x, end) in zip(marks, pairwise(places), strict=True):
            bottom = self.height - _BOTTOM
            parts.append(f'<g class="mark"><title>{escape(what)}</title>')
            parts.append(f'<path d="M{x} {_TOP}V{bottom}"/>')
            if x + 6 + _LETTER * len(what) <= end:
                parts.append(f'<text x="{x + 6}" y="{bottom - 8}">{escape(what)}</text>')
            parts.append("</g>")
        return parts

    def line(self, series: Series) -> list[str]:
        spots = [(self.x(x), self.y(y)) for x, y in series.points]
        path = "L".join(f"{x} {y}" for x, y in spots)
        parts = [f'<path class="line {series.css}" d="M{path}"/>'] if len(spots) > 1 else []
        if series.has_dots or len(spots) == 1:
            parts += [
                f'<circle class="dot {series.css}" cx="{cx}" cy="{cy}" r="3.2"><title>'
                f"{escape(series.name)}, {number(x)}: {number(y)}</title></circle>"
                for (cx, cy), (x, y) in zip(spots, series.points, strict=True)
            ]
        return parts


def bars(rows: Sequence[tuple[str, Mapping[str, float]]], unit: str, title: str) -> str:
    """Horizontal bars, one per row, stacked by part; parts take the colours a, b, c, d in turn."""
    most = max((sum(parts.values()) for _, parts in rows), default=0.0)
    if most <= 0:
        return '<p class="none">no data yet</p>'
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    width, label_width = 460, 84
    room = width - label_width - 62
    out = []
    for index, (label, parts) in enumerate(rows):
        y, x = index * (_BAR_HEIGHT + 8), float(label_width)
        middle = y + _BAR_HEIGHT / 2 + 4
        out.append(f'<text x="{label_width - 8}" y="{middle}" class="end">{escape(label)}</text>')
        for name, value in parts.items():
            extent = value / most * room
            css = "abcd"[names.index(name) % 4]
            out.append(
                f'<rect class="bar {css}" x="{x:.1f}" y="{y}" width="{extent:.1f}" '
                f'height="{_BAR_HEIGHT}"><title>{escape(label)}, {escape(name)}: '
                f"{number(value)} {escape(unit)}</title></rect>"
            )
            x += extent
        total = f"{number(sum(parts.values()))} {escape(unit)}"
        out.append(f'<text x="{x + 6:.1f}" y="{middle}">{total}</text>')
    height = len(rows) * (_BAR_HEIGHT + 8)
    spoken = escape(
        f"{title}. " + " ".join(f"{n}: {number(sum(p.values()))} {unit}." for n, p in rows)
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{spoken}">{"".join(out)}</svg>'
    )


def legend(names: Sequence[tuple[str, str]]) -> str:
    """(name, css class) pairs as a line of coloured keys."""
    keys = (f'<span class="key {css}"></span>{escape(name)}' for name, css in names)
    return f'<p class="legend">{"".join(f"<span>{key}</span>" for key in keys)}</p>'
