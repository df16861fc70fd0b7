"""A lineage as a picture: a lane for each role, work as bars, the waits between them dashed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rlstreams.debug.inspect.terminal import seconds_text
from rlstreams.show.report.svg import number, ticks
from rlstreams.streams.lineage.hops import Hop

ROLES = ("prompts", "rollout", "logprob", "trainer")
_BAD = ("set aside", "dropped")
_WIDTH, _LEFT, _RIGHT, _LANE, _AXIS = 1000, 76, 96, 40, 42
_NARROWEST = 3.0
_ROOM = 84  # a wait's label needs so much


def timeline(hops: Sequence[Hop]) -> str:
    """An SVG; empty where nothing but weights is known."""
    own = [hop for hop in hops if hop.is_own]
    if not own:
        return ""
    start = own[0].at_ms
    end = max(hop.until_ms for hop in hops)
    scale = _Scale(start, max(end - start, 1))
    height = len(ROLES) * _LANE + _AXIS
    parts = [
        *_grid(scale),
        *(part for hop in hops if not hop.is_own for part in _weights(hop, scale)),
        *_waits(own, scale),
        *(part for hop in own for part in _work(hop, scale)),
    ]
    told = ". ".join(f"{hop.role}: {hop.what}" for hop in own)
    return (
        f'<div class="way"><svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(told)}">{"".join(parts)}</svg></div>'
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    """Wall clock to the view box."""

    start_ms: int
    span_ms: int

    def x(self, at_ms: int) -> float:
        """What came before the sample stands at the left edge."""
        share = max(0, at_ms - self.start_ms) / self.span_ms
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)


def _y(role: str) -> float:
    """The middle of a lane; what is none of the four has the trainer's."""
    return (ROLES.index(role) if role in ROLES else len(ROLES) - 1) * _LANE + _LANE / 2


def _grid(scale: _Scale) -> Iterator[str]:
    right, bottom = _WIDTH - _RIGHT + 8, len(ROLES) * _LANE
    for role in ROLES:
        y = _y(role)
        yield (
            f'<rect class="lane" x="{_LEFT - 8}" y="{y - _LANE / 2 + 2:g}" '
            f'width="{right - _LEFT + 8}" height="{_LANE - 4}" rx="6"/>'
            f'<text class="role end" x="{_LEFT - 16}" y="{y + 4:g}">{role}</text>'
        )
    for second in ticks(0.0, scale.span_ms / 1000, 7):
        x = scale.x(scale.start_ms + round(second * 1000))
        yield f'<path class="grid" d="M{x} {bottom}v5"/>'
        yield f'<text class="mid" x="{x}" y="{bottom + 18}">{number(second)}</text>'
    middle = (_LEFT + right) / 2
    yield f'<text class="mid" x="{middle:g}" y="{bottom + 34}">seconds since it was issued</text>'
    yield (
        f'<path class="weights" d="M{right - 190} {bottom + 24}l5 5l-5 5l-5 -5z"/>'
        f'<text class="end" x="{right}" y="{bottom + 34}">weights published or loaded</text>'
    )


def _waits(own: Sequence[Hop], scale: _Scale) -> Iterator[str]:
    for before, after in itertools.pairwise(own):
        x0, x1 = scale.x(before.until_ms), scale.x(after.at_ms)
        y0, y1 = _y(before.role), _y(after.role)
        yield f'<path class="wait" d="M{x0} {y0:g}V{y1:g}H{x1}"/>'
        if x1 - x0 > _ROOM:
            told = seconds_text((after.at_ms - before.until_ms) / 1000).removeprefix("+")
            middle = (x0 + x1) / 2
            yield f'<text class="mid" x="{middle:g}" y="{y1 + 14:g}">waits {told}</text>'


def _work(hop: Hop, scale: _Scale) -> Iterator[str]:
    x0, x1, y = scale.x(hop.at_ms), scale.x(hop.until_ms), _y(hop.role)
    width = max(x1 - x0, _NARROWEST)
    css = "work bad" if hop.what in _BAD else "work"
    yield f"<g><title>{escape(f'{hop.what}: {hop.detail}')}</title>"
    yield (
        f'<rect class="{css}" x="{x0:g}" y="{y - 9:g}" width="{width:g}" height="18" rx="2"/>'
        f'<text class="in" x="{x0 + width + 5:g}" y="{y + 13:g}">{escape(hop.what)}</text></g>'
    )


def _weights(hop: Hop, scale: _Scale) -> Iterator[str]:
    x, y = scale.x(hop.until_ms), _y(hop.role)
    yield (
        f"<g><title>{escape(f'{hop.what}: {hop.detail}')}</title>"
        f'<path class="weights" d="M{x} {y - 15:g}l5 5l-5 5l-5 -5z"/></g>'
    )
