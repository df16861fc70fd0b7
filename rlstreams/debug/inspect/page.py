"""Samples as one HTML page: pure, self-contained, light and dark, in the style of the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from rlstreams.debug.inspect.page_facts import experts_map, facts, group_table, segments_table
from rlstreams.debug.inspect.page_style import CSS, SCRIPT
from rlstreams.debug.inspect.page_tokens import bar, strip, text
from rlstreams.debug.inspect.sample_detail import SampleDetail
from rlstreams.debug.inspect.terminal import clock_text, figures, one_line, seconds_text
from rlstreams.debug.inspect.timeline import timeline
from rlstreams.show.report import style
from rlstreams.show.report.svg import number

_WORST = 8


def render(details: Sequence[SampleDetail], title: str, made_at: str = "") -> str:
    """The page, complete."""
    count = "" if len(details) == 1 else f" <small>{len(details)} samples</small>"
    body = "".join(
        (
            f"<h1>{escape(title)}{count}</h1>",
            f'<p class="muted">{escape(made_at)}</p>' if made_at else "",
            _overview(details) if len(details) > 1 else "",
            bar(details),
            *(_detail(detail, n, is_open=n == 0) for n, detail in enumerate(details)),
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(f'rlstreams: {title}')}</title><style>{style.CSS}{CSS}</style></head>"
        f'<body><main>{body}</main><div id="tip"></div><script>{SCRIPT}</script></body></html>\n'
    )


def _overview(details: Sequence[SampleDetail]) -> str:
    names = ("sample", "outcome", "step", "reward", "mismatch", "staleness", "tokens", "versions")
    head = "".join(f"<th{'' if n < 2 else ' class=num'}>{x}</th>" for n, x in enumerate(names))
    rows = "".join(
        f'<tr class="go" data-to="{_key(detail)}"><td><a href="#{_key(detail)}">'
        f"{detail.lineage.sample}</a></td><td>{detail.lineage.outcome}</td>"
        + "".join(f'<td class="num">{escape(value)}</td>' for value in figures(detail))
        + f'<td class="said"><code>{escape(one_line(detail))}</code></td>'
        f"<td>{strip(detail)}</td></tr>"
        for detail in details
    )
    return (
        f'<div class="wide"><table><thead><tr>{head}<th>text</th>'
        f"<th>differences along the tokens</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _key(detail: SampleDetail) -> str:
    """Name of its place on the page."""
    return str(detail.lineage.sample).replace("/", "-")


def _detail(detail: SampleDetail, number_: int, *, is_open: bool) -> str:
    lineage = detail.lineage
    outcome = str(lineage.outcome)
    prompt = lineage.prompt.event.text if lineage.prompt is not None else detail.said_by("prompt")
    snippet = " ".join(prompt.split())[:60]
    parts = [
        f'<details class="sample" id="{_key(detail)}"{" open" if is_open else ""}><summary>'
        f'{lineage.sample}<span class="outcome {outcome.replace(" ", "-")}">{outcome}</span>'
        f"<code>{escape(snippet)}</code></summary>",
        _figures(detail),
        f'<p class="verdict bad">{escape(detail.problem)}</p>' if detail.problem else "",
        _tokens(detail, f"s{number_}"),
        "<h3>Lineage</h3>",
        timeline(detail.hops),
        _hops(detail),
        segments_table(detail),
        f'<div class="pair"><div>{group_table(detail)}{experts_map(detail)}</div>'
        f"<div>{facts(detail)}</div></div></details>",
    ]
    return "".join(parts)


def _figures(detail: SampleDetail) -> str:
    step, reward, worst, stale, tokens, versions = figures(detail)
    trained = detail.lineage.trained
    shown = [(reward, "reward"), (worst, "largest mismatch, nats"), (tokens, "sampled tokens")]
    if trained is not None:
        shown[1:1] = [(f"{trained.ref.advantage:+.3f}", "advantage")]
        shown += [
            (stale, "staleness, versions"),
            (step, "trained in step"),
            (_took(detail), "issue to new weights"),
            (f"{versions} → {trained.step.policy_version}", "versions, and the one made"),
        ]
    else:
        shown += [(versions, "versions")]
    items = "".join(f"<li><b>{escape(v)}</b><span>{name}</span></li>" for v, name in shown)
    return f'<ul class="figures">{items}</ul>'


def _took(detail: SampleDetail) -> str:
    own = [hop for hop in detail.hops if hop.is_own]
    seconds = (max(hop.until_ms for hop in own) - own[0].at_ms) / 1000
    return seconds_text(seconds).removeprefix("+")


def _tokens(detail: SampleDetail, key: str) -> str:
    if detail.tokens is None:
        return ""
    return f"{text(detail, key)}{strip(detail)}{''.join(_worst(detail, key))}"


def _worst(detail: SampleDetail, key: str) -> Iterator[str]:
    """Links to the tokens whose log-probs differ most."""
    tokens, worst = detail.tokens, detail.worst_tokens(_WORST)
    if tokens is None or not worst:
        return
    yield '<p class="muted">Largest differences, proximal minus behavior: '
    for at in worst:
        gap = float(tokens.difference_N[at])
        yield (
            f'<a href="#" data-detail="{key}" data-token="{at}">token {at} '
            f"<code>{escape(detail.words[at].strip() or repr(detail.words[at]))}</code></a> "
            f"{'+' if gap > 0 else '-'}{number(abs(gap))}{'' if at == worst[-1] else ', '}"
        )
    yield "</p>"


def _hops(detail: SampleDetail) -> str:
    rows = []
    before_ms: int | None = None
    for hop in detail.hops:
        wait = ""
        if hop.is_own:
            if before_ms is not None:
                wait = seconds_text((hop.at_ms - before_ms) / 1000)
            before_ms = hop.until_ms
        took = hop.until_ms - hop.at_ms
        where = "" if hop.position is None else f"<code>{escape(str(hop.position))}</code>"
        rows.append(
            f'<tr class="{"own" if hop.is_own else "weights"}"><td class="time">'
            f'{clock_text(hop.at_ms)}</td><td class="num">{wait}</td><td class="num">'
            f"{f'{took / 1000:.3f} s' if took else ''}</td><td>{escape(hop.role)}</td>"
            f"<td class=short>{escape(hop.what)}</td><td>{escape(hop.detail)}</td>"
            f'<td class="place">{where}</td></tr>'
        )
    copies = ", ".join(str(position) for position in detail.lineage.copies)
    return (
        '<div class="wide"><table><thead><tr><th>time, UTC</th><th class="num">after</th>'
        '<th class="num">took</th><th>role</th><th>what</th><th>how</th><th>where in the log</th>'
        f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        + (f'<p class="muted">{escape(detail.note)}</p>' if detail.note else "")
        + (f'<p class="muted">Later records, which nobody uses: {copies}</p>' if copies else "")
    )
