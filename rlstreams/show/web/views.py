"""Pages of the live view, one function each: a run's fold as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from rlstreams.schemas.events import TRAIN
from rlstreams.show.metrics.figures import metric_text, of_agents, of_run, parted
from rlstreams.show.report import facts
from rlstreams.show.report.answers import FIGURES, answer_rows
from rlstreams.show.report.charts import measure_of, series
from rlstreams.show.report.collect import readable
from rlstreams.show.report.html import clock_time, render, short
from rlstreams.show.report.page import chart_values, kill_marks
from rlstreams.show.report.rows import Wanted, find, of_step, siblings
from rlstreams.show.web.reading import RunReader
from rlstreams.show.web.session import shown_session
from rlstreams.streams.lineage.receipt import receipt
from rlstreams.streams.views.learning import hindrance
from rlstreams.streams.views.pace import bottleneck
from rlstreams.words.causes import causes
from rlstreams.words.dialogue import words_of
from rlstreams.words.receipt_text import receipt_lines
from rlstreams.words.sample_detail import SampleDetail
from rlstreams.words.screen import KillMark
from rlstreams.workers.config.layers import leaves

VIEWS = (
    ("", "Run"),
    ("samples", "Samples"),
    ("steps", "Steps"),
    ("letters", "Dead letters"),
    ("flow", "Flow"),
    ("configuration", "Configuration"),
)
COLUMNS = (("reward", "reward"), *FIGURES)
PER_PAGE = 100
NEWEST = 4  # answers on the run's own page
TOKENS_LISTED = 2000
Query = Mapping[str, str]


class NotThereError(Exception):
    """The run, group, sample or step of a request does not exist; the message names it."""


def kills_of(reader: RunReader) -> Sequence[KillMark]:
    """Processes that came back without a goodbye."""
    state = reader.fold.state
    return kill_marks(state.throughput.restarts, state.run.steps)


def _page(reader: RunReader, view: str, template: str, title: str, **values: object) -> str:
    return render(
        template,
        title=f"{title} {reader.name}",
        run=reader.name,
        runs=[reader.name],
        view=view,
        views=VIEWS,
        place=reader.place,
        reading=reader.reading,
        problem=reader.problem,
        **values,
    )


def run(reader: RunReader, _: Query, all_runs: Sequence[str]) -> str:
    """Curves, and the run in figures."""
    state, kills = reader.fold.state, kills_of(reader)
    progress, costs = parted(of_run(state, kills=kills))
    return _page(
        reader, "", "run.html", "run", all_runs=all_runs, has_charts=True, state=state,
        answers=_newest_answers(reader), hindrance=hindrance(state),
        figures=progress, costs=costs, agents=of_agents(state),
        facts=facts.facts(state),
        pace=facts.pace_of(state),
        charts=chart_values({reader.name: series(reader.fold, kills)}),
    )  # fmt: skip


def _newest_answers(reader: RunReader) -> list[dict[str, Any]]:
    """Best and worst answers of the newest step's batch; before the first step the newest
    samples."""
    steps = reader.fold.state.run.steps
    with reader.fold.lock:
        rows = of_step(reader.fold.samples, steps[-1].step) if steps else []
        rows = rows or find(reader.fold.samples, Wanted())[:NEWEST]
    rows = sorted(rows, key=lambda row: row.reward or 0.0, reverse=True)
    half = NEWEST // 2
    shown = rows if len(rows) <= NEWEST else [*rows[:half], *rows[-half:]]
    return answer_rows(shown, reader.texts.of)


def samples(reader: RunReader, query: Query, all_runs: Sequence[str]) -> str:
    """The table of samples: sorted, filtered, a hundred at a time."""
    reward_max = query.get("reward_max", "")
    wanted = Wanted(
        sort=query.get("sort", "at_ms"),
        ascending=query.get("up") == "1",
        purpose=query.get("purpose", ""),
        ended=query.get("ended", ""),
        step=_whole(query, "step"),
        version=_whole(query, "version"),
        reward_max=float(reward_max) if reward_max else None,
    )
    text = query.get("text", "").strip()
    hits = reader.texts.find(text) if text else None
    with reader.fold.lock:
        found = find(reader.fold.samples, wanted)
    if hits is not None:
        found = [row for row in found if row.name in hits]
    if not wanted.purpose and "sort" not in query:
        found.sort(key=lambda row: row.purpose != TRAIN)
    page, pages, rows = _some(found, query)

    def sorted_by(name: str) -> str:
        turned = name == wanted.sort and not wanted.ascending
        return "?" + urlencode({**query, "sort": name, "up": int(turned), "page": 1})

    return _page(
        reader, "samples", "samples.html", "samples of", all_runs=all_runs, query=wanted,
        rows=answer_rows(rows, reader.texts.of), columns=COLUMNS, total=len(found), page=page,
        pages=pages, sorted_by=sorted_by, forgotten=reader.fold.samples.num_forgotten,
        text=text, unread=reader.texts.num_waiting,
        at_page=lambda number: "?" + urlencode({**query, "page": number}),
    )  # fmt: skip


def group(reader: RunReader, _: Query, all_runs: Sequence[str], name: str) -> str:
    """All answers to one prompt, side by side.

    Raises NotThereError: the log knows no such group.
    """
    with reader.fold.lock:
        rows = siblings(reader.fold.samples, name)
    if not rows:
        raise NotThereError(f"the log of {reader.name} does not know group {name}")
    prompt = next(filter(None, (reader.texts.of(row.name) for row in rows)), None)
    return _page(
        reader, "samples", "group.html", f"group {name} of", all_runs=all_runs, group=name,
        prompt=prompt.prompt if prompt else "-", rows=answer_rows(rows, reader.texts.of),
    )  # fmt: skip


def sample(reader: RunReader, query: Query, all_runs: Sequence[str], name: str) -> str:
    """One sample: its tokens, its outcome, and the records of both.

    Raises NotThereError: the log knows no such sample.
    """
    try:
        lineage, session, spelled = reader.sample(name)
    except ValueError as err:
        raise NotThereError(str(err)) from err
    detail = readable(lineage, spelled)
    if not detail.stages:
        raise NotThereError(f"the log of {reader.name} does not know sample {name}")
    color = query.get("color", "")
    is_colored, color = color in facts.LEGENDS, color if color in facts.LEGENDS else "version"
    rollout = detail.lineage.rollout
    with reader.fold.lock:
        beside = siblings(reader.fold.samples, detail.lineage.sample.group_id)
    trained = detail.lineage.trained
    lines = [
        ("reward", short(rollout.reward if rollout else None)),
        *(
            (f"reward: {part}", short(v))
            for part, v in (rollout.reward_parts if rollout else {}).items()
        ),
        *([("why that reward", rollout.reward_note)] if rollout and rollout.reward_note else []),
        ("tokens sampled", str(detail.num_sampled)),
        ("versions", ", ".join(map(str, detail.versions)) or "-"),
        ("staleness", ", ".join(map(str, detail.staleness)) or "-"),
        ("largest mismatch", "-" if detail.mismatch != detail.mismatch else short(detail.mismatch)),
        ("step", "-" if trained is None else str(trained.step.step)),
        ("advantage", "-" if trained is None else short(trained.ref.advantage)),
    ]
    return _page(
        reader, "samples", "sample.html", f"sample {name} of", all_runs=all_runs, name=name,
        detail=detail, siblings=[row.name for row in beside], color=color,
        legend=facts.LEGENDS[color],
        group=detail.lineage.sample.group_id, is_colored=is_colored,
        texts=_texts(detail, has_session=session is not None),
        session=None if session is None else shown_session(session, words_of(spelled)),
        shown=facts.shown_tokens(detail, color), sample_facts=lines,
        token_rows=_token_rows(detail),
        receipt=list(receipt_lines(receipt(detail.lineage))) if rollout else [],
    )  # fmt: skip


def _texts(detail: SampleDetail, *, has_session: bool) -> list[tuple[str, str]]:
    """Prompt, texts of each author in turn, and expected answer as (title, text). The texts of an
    agent and its model are in the session."""
    prompt, said = detail.lineage.prompt, [] if has_session else detail.turns()
    titles = {"policy": "Answer", "environment": "Environment"}
    asked = "Task" if has_session else "Prompt"
    found = [(asked, prompt.event.text if prompt else detail.said_by("prompt"))]
    found += [(titles[author], text) for author, text in said if author in titles]
    if prompt and prompt.event.answer:
        found.append(("Expected answer", prompt.event.answer))
    return [(title, text) for title, text in found if text]


def _token_rows(detail: SampleDetail) -> list[list[str]]:
    table = detail.tokens
    if table is None:
        return []
    columns = (table.behavior_N, table.proximal_N, table.difference_N, table.entropy_N)
    return [
        [
            str(int(table.ids_N[n])),
            repr(detail.words[n]),
            table.authors[int(table.segment_N[n])],
            "-" if table.version_N[n] < 0 else str(int(table.version_N[n])),
            *("-" if value[n] != value[n] else f"{float(value[n]):.4g}" for value in columns),
        ]
        for n in range(min(len(table.ids_N), TOKENS_LISTED))
    ]


def steps(reader: RunReader, query: Query, all_runs: Sequence[str]) -> str:
    """The table of steps, the newest first."""
    state = reader.fold.state.run
    page, pages, points = _some(state.steps[::-1], query)
    return _page(
        reader, "steps", "steps.html", "steps of", all_runs=all_runs, page=page, pages=pages,
        total=len(state.steps), claims=len(state.claims),
        rows=[facts.step_cells(point) for point in points],
    )  # fmt: skip


def step(reader: RunReader, _: Query, all_runs: Sequence[str], number: int) -> str:
    """One step: its batch, and how to do it again.

    Raises NotThereError: the log has no such step.
    """
    fold = reader.fold
    with fold.lock:
        fact = fold.views.ledger.steps.get(number)
        rows = of_step(fold.samples, number)
    point = next((p for p in fold.state.run.steps if p.step == number), None)
    if point is None or fact is None:
        raise NotThereError(f"the log of {reader.name} has no step {number}")
    metrics = [(name, metric_text(name, value)) for name, value in sorted(point.metrics.items())]
    there = {p.step for p in fold.state.run.steps}
    lines = [
        *zip(facts.STEP_HEAD[1:], facts.step_cells(point)[1:], strict=True),
        ("epoch of its trainer", str(point.epoch)),
        ("weight hash", fact.weight_hash[:12]),
        ("masked segments", str(point.num_masked)),
    ]
    return _page(
        reader, "steps", "step.html", f"step {number} of", all_runs=all_runs, number=number,
        step_facts=lines, rows=answer_rows(rows, reader.texts.of), metrics=metrics,
        before=number - 1 if number - 1 in there else 0,
        after=number + 1 if number + 1 in there else 0,
    )  # fmt: skip


def letters(reader: RunReader, query: Query, all_runs: Sequence[str]) -> str:
    """Dead letters with their reasons; with file and line where user code raised."""
    reason = query.get("reason", "")
    with reader.fold.lock:
        found = [x for x in reader.fold.letters if not reason or x.reason == reason]
    by_cause = [[f"{one.num:,}", one.reason, one.newest] for one in causes(found)]
    return _page(
        reader, "letters", "letters.html", "dead letters of", all_runs=all_runs,
        state=reader.fold.state, reason=reason, letters=found[:-PER_PAGE - 1:-1], causes=by_cause,
    )  # fmt: skip


def flow(reader: RunReader, _: Query, all_runs: Sequence[str]) -> str:
    """Topics and roles: who waits for whom."""
    state = reader.fold.state
    newest = [
        [p.worker, str(p.policy_version), f"{p.num_bytes / 1e6:,.1f}", f"{p.seconds:.3f}",
         f"{p.paused_s:.3f}", clock_time(p.loaded_at_ms)]
        for p in reversed(state.pulls.newest)
    ]  # fmt: skip
    return _page(
        reader, "flow", "flow.html", "flow of", all_runs=all_runs,
        holds=bottleneck(state.run.steps),
        stations=facts.stations(state), workers=facts.workers(state),
        pulls=facts.pulls_line(state), newest_pulls=newest,
    )  # fmt: skip


def configuration(reader: RunReader, _: Query, all_runs: Sequence[str]) -> str:
    """Fields, hashes and versions, as the claims name them."""
    state = reader.fold.state
    claims = state.run.claims
    rows = [
        [claim.epoch, claim.next_step, claim.policy_version, claim.host,
         clock_time(claim.started_at_ms), changed or "nothing"]
        for claim, changed in zip(claims, facts.claim_changes(claims), strict=True)
    ]  # fmt: skip
    found = facts.config_of(claims)
    return _page(
        reader, "configuration", "configuration.html", "configuration of", all_runs=all_runs,
        facts=facts.facts(state), claims=rows,
        versions=list(claims[-1].versions.items()) if claims else [],
        hashes=list(claims[-1].hashes.items()) if claims else [],
        sections=[(name, [[k, str(v)] for k, v in leaves({name: found[name]})])
                  for name in sorted(found)],
    )  # fmt: skip


def compare(readers: Sequence[RunReader], all_runs: Sequence[str]) -> str:
    """Several runs in the same charts."""
    found = {reader.name: series(reader.fold) for reader in readers}
    states = [reader.fold.state for reader in readers]
    return render(
        "compare.html", title="comparison", runs=list(found), all_runs=all_runs, view="compare",
        has_charts=True, charts=chart_values(found), measure=measure_of(list(found.values())),
        summary=[facts.summary(r.name, s) for r, s in zip(readers, states, strict=True)],
        differences=facts.differences([state.run.claims for state in states]),
    )  # fmt: skip


def _whole(query: Query, name: str) -> int | None:
    text = query.get(name)
    try:
        return int(text) if text else None
    except ValueError as err:
        raise ValueError(f"{name} must be a whole number, got {text!r}") from err


def _some(found: Sequence[Any], query: Query) -> tuple[int, int, Sequence[Any]]:
    """Number of the requested page, number of pages, and the items of that page."""
    pages = max(1, -(-len(found) // PER_PAGE))
    page = min(max(_whole(query, "page") or 1, 1), pages)
    return page, pages, found[(page - 1) * PER_PAGE : page * PER_PAGE]
