"""The tokens of a sample as HTML: one span each, with a class for every way to colour it.

Which colouring is shown is a choice of radio buttons in the style sheet; a token's numbers are its
title. So the page needs no script.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from rlstreams.debug.inspect.sample_detail import SampleDetail
from rlstreams.debug.inspect.scale import (
    DIFFERENCE_BOUNDS,
    ENTROPY_BOUNDS,
    SURPRISE_BOUNDS,
    level,
    signed_level,
)
from rlstreams.show.report.template import NUM_VERSION_COLORS
from rlstreams.streams.lineage.tokens import TokenTable

WAYS = ("version", "difference", "author", "surprise", "entropy")
_STRIP = 160  # columns
_AUTHORS = {"prompt": "ap o", "policy": "ao", "environment": "ae o"}
_PERCENT = (0, 12, 28, 48, 74)  # of a level's colour in the background
_VERSIONS = ("a", "d", "c", "good", "e")  # variables of the colours of v0 to v4
_LEVELS = {  # way: (class, variable of its colour)
    "difference": (("dl", "a"), ("dh", "bad")),
    "surprise": (("s", "c"),),
    "entropy": (("e", "d"),),
}


def _rules() -> Iterator[str]:
    """What each choice of the switch makes visible."""
    for way in WAYS:
        yield f"main:has(#by-{way}:checked) .keys.{way} {{ display: inline; }}"
    for n, color in enumerate(_VERSIONS):
        yield f"main:has(#by-version:checked) .text .v{n} {{ --t: var(--{color}); }}"
    for css, color in (("ap", "b"), ("ao", "a"), ("ae", "d")):
        yield f"main:has(#by-author:checked) .{css} {{ --t: var(--{color}); }}"
    for way, sides in _LEVELS.items():
        for css, color in sides:
            for n, percent in enumerate(_PERCENT[1:], 1):
                of = f"{{ --t: var(--{color}); --p: {percent}%; }}"
                yield f"main:has(#by-{way}:checked) .{css}{n}, .keys .{css}{n} {of}"
    for css, color in _LEVELS["difference"]:
        for n, percent in enumerate(_PERCENT[1:], 1):
            yield f".strip .{css}{n} {{ --t: var(--{color}); --p: {percent}%; }}"


CSS = """
.bar { position: sticky; top: 0; background: var(--paper); padding: .5rem 0; }
.bar label { margin-right: .8rem; cursor: pointer; } .keys { display: none; color: var(--muted);
  font-size: .85rem; }
.keys i { font-style: normal; padding: .05rem .4rem; border-radius: 4px; color: var(--ink); }
.text { background: var(--panel); border-radius: 8px; padding: .8rem 1rem; white-space: pre-wrap;
  overflow-wrap: anywhere; font: 15px/1.9 ui-monospace, monospace; max-height: 32rem;
  overflow-y: auto; }
.text span, .keys i { background: color-mix(in srgb, var(--t, transparent) var(--p, 26%),
  transparent); }
.text span { color: var(--ink); border-radius: 3px; padding: .12em 0;
  box-shadow: inset -1px 0 0 var(--panel); }
.text span.o { color: var(--muted); } .text span:hover, .text span:target {
  outline: 2px solid var(--ink); }
.strip { height: 12px; margin: .4rem 0; min-width: 8rem; }
.strip rect { fill: color-mix(in srgb, var(--t, var(--b)) var(--p, 22%), transparent); }
""" + "\n".join(_rules())


def bar(details: Sequence[SampleDetail]) -> str:
    """The switch, and the legend of what it chooses."""
    switch = "".join(
        f'<label><input type="radio" name="by" id="by-{way}"'
        f"{' checked' if way == 'version' else ''}> {way}</label>"
        for way in WAYS
    )
    legends = "".join(
        f'<span class="keys {way}">{"".join(keys)}</span>' for way, keys in _legends(details)
    )
    return f'<div class="bar"><span class="muted">Colour tokens by </span>{switch}{legends}</div>'


def _legends(details: Sequence[SampleDetail]) -> Iterator[tuple[str, Iterator[str]]]:
    authors = (("prompt", "b"), ("policy", "a"), ("environment", "d"))
    yield "author", (f'<i style="--t:var(--{color})">{name}</i> ' for name, color in authors)
    most = max((len(detail.versions) for detail in details), default=0)
    names: tuple[str, ...] = ("its first version", "second", "third", "fourth", "fifth")
    if len(details) == 1:
        names = tuple(f"version {version}" for version in details[0].versions)
    yield (
        "version",
        (
            f'<i style="--t:var(--{_VERSIONS[n % NUM_VERSION_COLORS]})">{escape(name)}</i> '
            for n, name in enumerate(names[: max(most, 1)])
        ),
    )
    bounds = DIFFERENCE_BOUNDS
    low = [("dl", n, f"-{bounds[n - 1]:g}") for n in range(len(bounds), 0, -1)]
    high = [("dh", n, f"+{bound:g}") for n, bound in enumerate(bounds, 1)]
    yield "difference", _keys("proximal minus behavior log-prob", [*low, *high])
    for way, css, what, steps in (
        ("surprise", "s", "minus behavior log-prob", SURPRISE_BOUNDS),
        ("entropy", "e", "of the distribution", ENTROPY_BOUNDS),
    ):
        yield way, _keys(what, [(css, n, f"{bound:g}") for n, bound in enumerate(steps, 1)])


def _keys(what: str, steps: Sequence[tuple[str, int, str]]) -> Iterator[str]:
    yield f"{what}, nats: "
    for css, n, name in steps:
        yield f'<i class="{css}{n}">{name}</i> '


def text(detail: SampleDetail, key: str, linked: Sequence[int] = ()) -> str:
    """All tokens in their order.

    Args:
        linked: tokens that have a name, `{key}-{number}`.
    """
    tokens = detail.tokens
    assert tokens is not None
    return f'<div class="text">{"".join(_spans(detail, tokens, key, set(linked)))}</div>'


def _spans(detail: SampleDetail, tokens: TokenTable, key: str, linked: set[int]) -> Iterator[str]:
    difference, surprise = tokens.difference_N.tolist(), (-tokens.behavior_N).tolist()
    entropy, segments = tokens.entropy_N.tolist(), tokens.segment_N.tolist()
    color = {version: n % NUM_VERSION_COLORS for n, version in enumerate(detail.versions)}
    for at, (word, version) in enumerate(zip(detail.words, tokens.version_N.tolist(), strict=True)):
        classes = [_AUTHORS.get(tokens.authors[segments[at]], "ae o")]
        if version in color:
            classes.append(f"v{color[version]}")
        if gap := signed_level(difference[at]):
            classes.append(f"d{'h' if gap > 0 else 'l'}{abs(gap)}")
        if rare := level(surprise[at], SURPRISE_BOUNDS):
            classes.append(f"s{rare}")
        if open_ := level(entropy[at], ENTROPY_BOUNDS):
            classes.append(f"e{open_}")
        name = f' id="{key}-{at}"' if at in linked else ""
        shown = escape(word).replace("\n", "⏎\n") or "·"
        yield f'<span class="{" ".join(classes)}"{name} title="{_title(tokens, at)}">{shown}</span>'


def _title(tokens: TokenTable, at: int) -> str:
    """The numbers that somebody gave, seven digits, which is what a float32 has."""
    version = int(tokens.version_N[at])
    author = tokens.authors[int(tokens.segment_N[at])]
    told = [f"token {at} (id {int(tokens.ids_N[at])}), {author}"]
    told += [f"version {version}"] if version >= 0 else []
    for name, array_N in (
        ("behavior", tokens.behavior_N),
        ("proximal", tokens.proximal_N),
        ("difference", tokens.difference_N),
        ("reference", tokens.reference_N),
        ("entropy", tokens.entropy_N),
    ):
        value = float(array_N[at])
        told += [] if math.isnan(value) else [f"{name} {value:.7g}"]
    return escape("\n".join(told))


def strip(detail: SampleDetail) -> str:
    """The differences of all tokens at a glance: a column each, or for several the largest."""
    if detail.tokens is None or not detail.words:
        return ""
    values = np.nan_to_num(detail.tokens.difference_N, nan=0.0)
    is_policy = detail.tokens.is_policy_N
    parts = []
    for n, chunk in enumerate(np.array_split(np.arange(len(values)), min(_STRIP, len(values)))):
        gap = signed_level(float(values[chunk[np.argmax(np.abs(values[chunk]))]]))
        css = f' class="d{"h" if gap > 0 else "l"}{abs(gap)}"' if gap else ""
        height = 16 if is_policy[chunk].any() else 6
        parts.append(f'<rect x="{n}" y="{(16 - height) / 2:g}" width="1" height="{height}"{css}/>')
    return (
        f'<svg class="strip" viewBox="0 0 {max(1, len(parts))} 16" preserveAspectRatio="none" '
        f'role="img" aria-label="differences along the tokens">{"".join(parts)}</svg>'
    )
