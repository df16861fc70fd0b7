"""The tokens of a sample as HTML: one span each, with a class for every way to colour it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

from rlstreams.debug.inspect.page_style import NUM_VERSION_COLORS
from rlstreams.debug.inspect.sample_detail import SampleDetail
from rlstreams.debug.inspect.scale import (
    DIFFERENCE_BOUNDS,
    ENTROPY_BOUNDS,
    SURPRISE_BOUNDS,
    level,
    signed_level,
)
from rlstreams.streams.lineage.tokens import TokenTable
from rlstreams.streams.log.plain_json import plain_json

WAYS = ("version", "difference", "author", "surprise", "entropy")
MAX_EXPERTS = 400_000  # numbers that a page carries for its tips
_STRIP = 160  # columns
_AUTHORS = {"prompt": "ap o", "policy": "ao", "environment": "ae o"}


def bar(details: Sequence[SampleDetail]) -> str:
    """The switch, and the legend of what it chooses."""
    switch = "".join(
        f'<input type="radio" name="by" id="by-{way}"{" checked" if way == "version" else ""}>'
        f'<label for="by-{way}">{way}</label>'
        for way in WAYS
    )
    legends = "".join(
        f'<span class="keys {way}">{"".join(keys)}</span>' for way, keys in _legends(details)
    )
    return (
        f'<div class="bar"><span class="muted">Colour tokens by</span>'
        f'<span class="switch" role="radiogroup">{switch}</span>{legends}</div>'
    )


def _legends(details: Sequence[SampleDetail]) -> Iterator[tuple[str, Iterator[str]]]:
    authors = (("prompt", "b"), ("policy", "v0"), ("environment", "v1"))
    yield "author", (f'<i style="--t:var(--{color})">{name}</i>' for name, color in authors)
    most = max((len(detail.versions) for detail in details), default=0)
    names: tuple[str, ...] = ("its first version", "second", "third", "fourth", "fifth")
    if len(details) == 1:
        names = tuple(f"version {version}" for version in details[0].versions)
    yield (
        "version",
        (
            f'<i style="--t:var(--v{n % NUM_VERSION_COLORS})">{escape(name)}</i>'
            for n, name in enumerate(names[: max(most, 1)])
        ),
    )
    yield "difference", _difference_keys()
    yield "surprise", _keys("minus behavior log-prob", SURPRISE_BOUNDS, "hot")
    yield "entropy", _keys("of the distribution", ENTROPY_BOUNDS, "v1")


def _keys(what: str, bounds: Sequence[float], color: str) -> Iterator[str]:
    yield f"{what}, nats: "
    for n, bound in enumerate(bounds):
        yield f'<i class="p{n + 1}" style="--t:var(--{color})">{bound:g}</i>'


def _difference_keys() -> Iterator[str]:
    yield "proximal minus behavior log-prob, nats: "
    for n in range(len(DIFFERENCE_BOUNDS), 0, -1):
        yield f'<i class="p{n}" style="--t:var(--low)">-{DIFFERENCE_BOUNDS[n - 1]:g}</i>'
    for n, bound in enumerate(DIFFERENCE_BOUNDS):
        yield f'<i class="p{n + 1}" style="--t:var(--high)">+{bound:g}</i>'


def text(detail: SampleDetail, key: str) -> str:
    """All tokens in their order, and their numbers as JSON for the script."""
    tokens = detail.tokens
    assert tokens is not None
    spans = "".join(_spans(detail, tokens))
    facts = plain_json(_facts(detail, tokens), separators=(",", ":"))
    safe = facts.replace("<", "\\u003c")  # a text of the run must not end the script
    return (
        f'<script type="application/json" id="data-{key}">{safe}</script>'
        f'<div class="text" data-of="{key}">{spans}</div>'
    )


def _spans(detail: SampleDetail, tokens: TokenTable) -> Iterator[str]:
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
        shown = escape(word).replace("\n", "⏎\n") or "·"
        is_other = shown != escape(word)
        own = f' data-w="{escape(word)}"' if is_other else ""
        yield f'<span class="{" ".join(classes)}" data-i="{at}"{own}>{shown}</span>'


def _facts(detail: SampleDetail, tokens: TokenTable) -> dict[str, Any]:
    rollout = detail.lineage.rollout
    assert rollout is not None
    segments = [
        {
            "author": segment.author,
            "version": segment.policy_version if segment.author == "policy" else None,
            "weights": segment.weight_hash[:12],
        }
        for segment in rollout.segments
    ]
    return {
        "ids": tokens.ids_N.tolist(),
        "segment": tokens.segment_N.tolist(),
        "segments": segments,
        "behavior": _short(tokens.behavior_N),
        "proximal": _short(tokens.proximal_N),
        "reference": _short(tokens.reference_N),
        "entropy": _short(tokens.entropy_N),
        "experts": _experts(tokens),
    }


def _experts(tokens: TokenTable) -> list[Any] | None:
    if tokens.experts is None or np.prod(tokens.experts.shape) > MAX_EXPERTS:
        return None
    return list(tokens.experts.numpy().tolist())


def _short(array_N: npt.NDArray[np.float32]) -> list[float | None]:
    """Seven digits, which is what a float32 has; null where nobody gave a number."""
    return [None if math.isnan(value) else float(f"{value:.7g}") for value in array_N.tolist()]


def strip(detail: SampleDetail) -> str:
    """The differences of all tokens at a glance: a column each, or for several the largest."""
    if detail.tokens is None or not detail.words:
        return ""
    values = np.nan_to_num(detail.tokens.difference_N, nan=0.0)
    is_policy = detail.tokens.is_policy_N
    parts = []
    for n, chunk in enumerate(np.array_split(np.arange(len(values)), min(_STRIP, len(values)))):
        largest = float(values[chunk[np.argmax(np.abs(values[chunk]))]])
        gap = signed_level(largest)
        css = f' class="{"h" if gap > 0 else "l"} p{abs(gap)}"' if gap else ""
        height = 16 if is_policy[chunk].any() else 6
        parts.append(f'<rect x="{n}" y="{(16 - height) / 2:g}" width="1" height="{height}"{css}/>')
    told = "differences along the tokens"
    return (
        f'<svg class="strip" viewBox="0 0 {max(1, len(parts))} 16" preserveAspectRatio="none" '
        f'role="img" aria-label="{told}">{"".join(parts)}</svg>'
    )
