"""Samples as one HTML page: pure, self-contained, light and dark, in the style of the report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from rlstreams.debug.inspect.page_tokens import CSS as TOKENS_CSS
from rlstreams.debug.inspect.page_tokens import bar, strip, text
from rlstreams.debug.inspect.sample_detail import SampleDetail
from rlstreams.debug.inspect.terminal import clock_text, figures, one_line, seconds_text
from rlstreams.show.report import plot, template
from rlstreams.show.report.template import number, table

ROLES = ("prompts", "rollout", "logprob", "trainer")
_BAD = ("set aside", "dropped")
_WORST = 8
_CSS = """
details.sample { border-top: 1px solid var(--line); padding: 1rem 0; }
summary { cursor: pointer; font-size: 1.2rem; font-weight: 600; }
summary code, summary small { font-weight: 400; font-size: .85rem; color: var(--muted);
  margin-left: .5rem; }
td code { white-space: nowrap; color: var(--muted); }
"""


def render(details: Sequence[SampleDetail], title: str, made_at: str = "") -> str:
    """The page, complete."""
    count = "" if len(details) == 1 else f" <small>{len(details)} samples</small>"
    body = "".join(
        (
            f"<h1>{escape(title)}{count}</h1>",
            f'<p class="muted">{escape(made_at)}</p>' if made_at else "",
            _overview(details) if len(details) > 1 else "",
            bar(details),
            *(_detail(detail, f"s{n}", is_open=n == 0) for n, detail in enumerate(details)),
        )
    )
    return template.page(title, body, _CSS + TOKENS_CSS)


def _overview(details: Sequence[SampleDetail]) -> str:
    names = ("sample", "outcome", "step", "reward", "mismatch", "staleness", "tokens", "versions")
    rows = [
        (
            f'<a href="#s{n}">{detail.lineage.sample}</a>',
            str(detail.lineage.outcome),
            *map(escape, figures(detail)),
            f"<code>{escape(one_line(detail))}</code>",
            strip(detail),
        )
        for n, detail in enumerate(details)
    ]
    head = (*names, "text", "differences along the tokens")
    return table(head, rows, numbers=range(2, len(names)))


def _detail(detail: SampleDetail, key: str, *, is_open: bool) -> str:
    lineage = detail.lineage
    prompt = lineage.prompt.event.text if lineage.prompt is not None else detail.said_by("prompt")
    snippet = " ".join(prompt.split())[:60]
    parts = [
        f'<details class="sample"{" open" if is_open else ""}><summary>{lineage.sample}'
        f"<small>{lineage.outcome}</small><code>{escape(snippet)}</code></summary>",
        f'<div id="{key}">{_figures(detail)}</div>',  # a link to it opens what it is in
        f'<p class="verdict bad">{escape(detail.problem)}</p>' if detail.problem else "",
        _tokens(detail, key),
        "<h3>Lineage</h3>",
        timeline(detail),
        _stages(detail),
        _segments(detail),
        _group(detail),
        _facts(detail),
        "</details>",
    ]
    return "".join(parts)


def _figures(detail: SampleDetail) -> str:
    step, reward, worst, stale, tokens, versions = figures(detail)
    trained = detail.lineage.trained
    shown = [(reward, "reward"), (worst, "largest mismatch, nats"), (tokens, "sampled tokens")]
    if trained is None:
        return template.figures([*shown, (versions, "versions")])
    shown[1:1] = [(f"{trained.ref.advantage:+.3f}", "advantage")]
    own = [stage for stage in detail.stages if stage.is_own]
    took_s = (max(stage.until_ms for stage in own) - own[0].at_ms) / 1000
    shown += [
        (stale, "staleness, versions"),
        (step, "trained in step"),
        (seconds_text(took_s).removeprefix("+"), "issue to new weights"),
        (f"{versions} → {trained.step.policy_version}", "versions, and the one made"),
    ]
    return template.figures(shown)


def _tokens(detail: SampleDetail, key: str) -> str:
    if detail.tokens is None:
        return ""
    worst = detail.worst_tokens(_WORST)
    links = ", ".join(
        f'<a href="#{key}-{at}">token {at} <code>'
        f"{escape(detail.words[at].strip() or repr(detail.words[at]))}</code></a> "
        f"{'+' if gap > 0 else '-'}{number(abs(gap))}"
        for at, gap in ((at, float(detail.tokens.difference_N[at])) for at in worst)
    )
    if links:
        links = f'<p class="muted">Largest differences, proximal minus behavior: {links}</p>'
    return f"{text(detail, key, worst)}{strip(detail)}{links}"


def timeline(detail: SampleDetail) -> str:
    """The sample's work as bars, a lane for each role; empty where nothing of it is known."""
    own = [stage for stage in detail.stages if stage.is_own]
    if not own:
        return ""
    start_ms = own[0].at_ms
    spans = [
        (
            stage.role if stage.role in ROLES else ROLES[-1],
            (stage.at_ms - start_ms) / 1000,
            (stage.until_ms - start_ms) / 1000,
            stage.what,
            stage.what in _BAD,
        )
        for stage in own
    ]
    return plot.lanes(ROLES, spans, ". ".join(f"{stage.role}: {stage.what}" for stage in own))


def _stages(detail: SampleDetail) -> str:
    rows = []
    before_ms: int | None = None
    for stage in detail.stages:
        wait = ""
        if stage.is_own:
            if before_ms is not None:
                wait = seconds_text((stage.at_ms - before_ms) / 1000)
            before_ms = stage.until_ms
        took = stage.until_ms - stage.at_ms
        where = "" if stage.position is None else f"<code>{escape(str(stage.position))}</code>"
        cells = (clock_text(stage.at_ms), wait, f"{took / 1000:.3f} s" if took else "", stage.role,
                 stage.what, stage.detail)  # fmt: skip
        rows.append((*map(escape, cells), where))
    copies = ", ".join(str(position) for position in detail.lineage.copies)
    head = ("time, UTC", "after", "took", "role", "what", "how", "where in the log")
    return (
        table(head, rows, numbers=(1, 2))
        + (f'<p class="muted">{escape(detail.note)}</p>' if detail.note else "")
        + (f'<p class="muted">Later records, which nobody uses: {copies}</p>' if copies else "")
    )


def _segments(detail: SampleDetail) -> str:
    """One row for each segment: who wrote it, under which weights, who rescored it how."""
    rollout = detail.lineage.rollout
    if rollout is None:
        return ""
    scored, trained = detail.lineage.scored, detail.lineage.trained
    scores = {score.segment: score for score in scored.event.scores} if scored else {}
    rows = []
    turn = 1
    for n, segment in enumerate(rollout.segments):
        turn += segment.author == "environment"
        score = scores.get(n)
        is_policy = segment.author == "policy"
        masked = "" if trained is None or n not in trained.masked else ", masked"
        stale = str(trained.base_version - segment.policy_version) if trained and is_policy else ""
        cells = (
            segment.author,
            str(turn) if is_policy else "",
            str(len(segment.token_ids)),
            str(segment.policy_version) if is_policy else "",
            segment.weight_hash[:8],
            segment.finish_reason,
            f"{score.policy_version} ({score.anchor})" if score else "",
            f"{stale}{masked}",
        )
        rows.append(tuple(map(escape, cells)))
    head = ("author", "turn", "tokens", "version", "weights", "ended by", "scored under",
            "staleness")  # fmt: skip
    return f"<h3>Segments</h3>{table(head, rows, numbers=(1, 2, 3))}"


def _group(detail: SampleDetail) -> str:
    """The samples of its group that the step trained on: what its advantage compares with."""
    trained = detail.lineage.trained
    if trained is None:
        return ""
    own = detail.lineage.sample.sample
    rows = [
        (
            f"{'<b>this one</b> ' if ref.sample == own else ''}{escape(ref.group_id)}/{ref.sample}",
            str(ref.num_tokens),
            f"{ref.reward:g}",
            f"{ref.advantage:+.3f}",
            str(trained.base_version - ref.oldest_policy_version),
        )
        for ref in trained.step.samples
    ]
    rows += [
        (f"{escape(it.group_id)}/{it.sample}, left out: {escape(it.reason)}", "", "", "", "")
        for it in trained.step.absent
    ]
    head = ("sample", "tokens", "reward", "advantage", "staleness")
    return f"<h3>Its group in the step</h3>{table(head, rows, numbers=range(1, 5))}"


def _facts(detail: SampleDetail) -> str:
    """Prompt, rollout and step, as far as they were recorded."""
    rows = [(escape(name), escape(value)) for name, value in _found(detail) if value]
    return f"<h3>Facts</h3>{table(('what', 'value'), rows)}" if rows else ""


def _found(detail: SampleDetail) -> Iterator[tuple[str, str]]:
    lineage, rollout = detail.lineage, detail.lineage.rollout
    if lineage.prompt is not None:
        prompt = lineage.prompt.event
        yield "expected answer", prompt.answer
        yield "row of the data set", f"{prompt.row}, epoch {prompt.dataset_epoch}"
        yield "free fields of the row", "" if prompt.metadata == "{}" else prompt.metadata
        yield "seed", str(prompt.seed)
    if rollout is not None:
        yield "parts of the reward", _numbers(rollout.reward_parts)
        yield "engine", f"{rollout.engine} in {rollout.worker} ({rollout.instance})"
        sampled = [segment for segment in rollout.segments if segment.author == "policy"]
        for last in sampled[-1:]:
            told = f"temperature {last.temperature:g}, top_p {last.top_p:g}, top_k {last.top_k}"
            yield "sampling", told
    if lineage.trained is not None:
        step = lineage.trained.step
        yield "loss of the step", number(step.loss)
        yield "of the step", _numbers(step.metrics)
        yield "batch", f"{step.batch_hash[:16]}, from weights {step.previous_hash[:12]}"


def _numbers(values: Mapping[str, float]) -> str:
    shown = json.dumps({name: float(f"{value:.4g}") for name, value in values.items()})
    return shown[1:-1].replace('"', "")
