"""The report of a run as one HTML page: pure, self-contained, light and dark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from rlstreams.show.report import plot
from rlstreams.show.report.template import NUM_VERSION_COLORS, figures, number, page, table
from rlstreams.streams.audit.report import AuditReport
from rlstreams.streams.views.dead import list_command
from rlstreams.streams.views.evaluation import Answer
from rlstreams.streams.views.feed import ViewState
from rlstreams.streams.views.pace import PARTS, pace_line, ranks_of, shortage
from rlstreams.streams.views.run import StepPoint
from rlstreams.up.live.words import (
    KillMark,
    clock,
    ends,
    over,
    redone_lines,
    spell,
    spelled,
    step_seconds,
)

_SMOOTH = 5  # steps that throughput is averaged over
_KNOWN = {
    "entropy": ("Entropy", "of the policy while it was trained, per token", "nats"),
    "kl": ("KL divergence", "of the trained policy from the sampling policy, per token", "nats"),
    "kl_reference": (
        "Distance from the reference",
        "KL divergence as the loss has it, before kl_coef, per token",
        "nats",
    ),
    "clip_fraction": ("Clipped tokens", "share of tokens whose gradient is clipped", "share"),
    "ratio_max": ("Largest ratio", "of the trained to the sampling version, per step", "ratio"),
    "mismatch_after_pull_mean": (
        "Mismatch behind a pull",
        "as engine mismatch, of answers that went on under newer weights: with a kept cache the "
        "older ones are in it",
        "nats",
    ),
    "ess": (
        "Effective sample size",
        "of the weights that tokens were trained with, as a share of the tokens; 1: all alike",
        "share",
    ),
    "routing_flips": (
        "Routing flips",
        "share of the recorded (token, layer) rows for which the live router would choose other "
        "experts than the replayed ones",
        "share",
    ),
    "routing_recorded": (
        "Recorded routes",
        "share of the (token, layer) rows that are replayed; the live router chooses for the rest",
        "share",
    ),
    "weight_mean": ("Importance weight", "proximal over behavior policy, capped, mean", "ratio"),
    "grad_norm": ("Gradient norm", "before clipping", "norm"),
    "reward_std": ("Spread of the reward", "standard deviation over the batch", "reward"),
    "equal_reward_groups": (
        "Groups without a signal",
        "share whose samples all got the same reward, so that their advantage is 0",
        "share",
    ),
    "response_tokens": ("Answer length", "mean over the batch", "tokens"),
    "turns": ("Turns per sample", "of the policy, mean over the batch", "turns"),
    "environment_tokens": (
        "Environment's tokens",
        "per sample, mean over the batch; not in the loss",
        "tokens",
    ),
    "train_s": ("Time to train", "forward, backward, update and hash of a step", "s"),
    "mfu": ("MFU", "FLOPs that a step needs, over what its GPUs can do in its time", "share"),
    "gpu_free_gb": ("Memory left", "of the trainer's GPU, behind each step", "GB"),
}
_PART = "reward/"  # begins the name of a metric that is a part of the reward
_SHOWN_ELSEWHERE = frozenset(
    {"reward", "entropy", "mismatch_mean", "mismatch_max", "num_loss_tokens", "lr", *PARTS}
    | {"tokens_real", "tokens_computed", "gpu_alloc_retries"}
)
FEW_DEAD = 0.05  # of the samples; the verdict is not green above it
_STATES = ("working", "waiting", "pulling")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportInput:
    """All that the report shows."""

    run: str
    views: ViewState
    audit: AuditReport | None = None
    kills: Sequence[KillMark] = ()
    made_at: str = ""  # when the page was made, as text
    stopped: str = ""  # why the run stopped before its end; empty: it did not, or goes on
    decode: Callable[[Sequence[int]], str] = field(default=spell)


def render(given: ReportInput) -> str:
    """The page, complete."""
    body = "".join(
        (
            _head(given),
            _learning(given),
            _parts(given.views.run.steps),
            "<h2>Training health</h2>",
            f'<div class="charts">{"".join(_health(given))}</div>',
            "<h2>Where the time went</h2>",
            f'<div class="charts">{"".join(_speed(given))}</div>',
            _workers(given),
            _problems(given),
            _audit(given.audit),
            _dead(given),
            _drops(given),
        )
    )
    return page(given.run, body)


def _head(given: ReportInput) -> str:
    run, curve = given.views.run, given.views.evaluation.curve
    gain = f"{curve[0].accuracy:.2f} to {curve[-1].accuracy:.2f}" if len(curve) > 1 else "-"
    steps = run.steps
    seconds = (steps[-1].finished_at_ms - run.claims[0].started_at_ms) / 1000 if steps else 0.0
    if not run.claims:
        seconds = 0.0
    shown = [
        (gain, "held-out accuracy"),
        (f"{run.step} of {run.step_target or '?'}", "optimizer steps"),
        (f"{sum(p.num_samples for p in steps):,}", "samples trained"),
        (clock(seconds), "time, claim to last step"),
        (str(len(given.kills)), f"processes {ends(given.kills)}"),
        (f"{given.audit.lost:,}" if given.audit else "-", "samples lost"),
        (f"{given.views.dead.num:,}", "dead letters"),
    ]
    made = f'<p class="muted">{escape(given.made_at)}</p>' if given.made_at else ""
    if given.stopped:
        made += f"<p><b>The run stopped:</b> {escape(given.stopped)}</p>"
    return f"<h1>Run {escape(given.run)}</h1>{made}{figures(shown)}"


def curve_title(given: ReportInput) -> str:
    """What the curve shows, in one line."""
    curve, kills = given.views.evaluation.curve, given.kills
    if len(curve) < 2:
        return f"Run {given.run}"
    killed = f"; {len(kills)} process{'es' * (len(kills) > 1)} {ends(kills)}" if kills else ""
    first, last = curve[0].accuracy, curve[-1].accuracy
    return f"Held-out accuracy {first:.2f} to {last:.2f}, {over(curve[0], curve[-1])}{killed}"


def _learning(given: ReportInput) -> str:
    redone = "".join(
        f"<p class=muted>{escape(line)}</p>" for line in redone_lines(given.views.run.redone)
    )
    return (
        f"<h2>Learning</h2><figure>{plot.curve(given.views, given.kills)}"
        f"<figcaption><small>{escape(curve_title(given))}</small></figcaption></figure>{redone}"
    )


def _parts(steps: Sequence[StepPoint]) -> str:
    """A chart for each named part of the reward; nothing where the verifier names none."""
    names = sorted({name for p in steps for name in p.metrics if name.startswith(_PART)})
    note = "mean over the batch; a sample without it counts 0"
    charts = [_metric(steps, name, name.removeprefix(_PART), note, "reward") for name in names]
    if not charts:
        return ""
    return f'<h2>Parts of the reward</h2><div class="charts">{"".join(charts)}</div>'


def _figure(title: str, note: str, chart: str) -> str:
    return (
        f"<figure><figcaption>{escape(title)}<small>{escape(note)}</small></figcaption>"
        f"{chart}</figure>"
    )


def _metric(steps: Sequence[StepPoint], name: str, title: str, note: str, unit: str) -> str:
    points = [(p.step, p.metrics[name]) for p in steps if name in p.metrics]
    low = min((y for _, y in points), default=0.0)
    chart = plot.lines({name: points}, title, unit, y_min=0.0 if low >= 0 else None)
    return _figure(title, note, chart)


def _health(given: ReportInput) -> Iterator[str]:
    steps = given.views.run.steps
    yield _metric(steps, "entropy", *_KNOWN["entropy"])
    yield _metric(
        steps,
        "mismatch_mean",
        "Engine mismatch",
        "proximal against behavior log-prob under one version, mean per token before a pull within "
        "its answer",
        "nats",
    )
    yield _staleness(given)
    points = [(p.step, p.loss) for p in steps]
    chart = plot.lines({"loss": points}, "Loss by step", "loss")
    yield _figure("Loss", "policy loss, mean over the trained tokens", chart)
    names = dict.fromkeys(name for p in steps for name in p.metrics)
    for name in names:
        if name not in _SHOWN_ELSEWHERE and not name.startswith(_PART):
            yield _metric(steps, name, *_KNOWN.get(name, (name, "", "")))


def _staleness(given: ReportInput) -> str:
    tokens: Counter[int] = Counter()
    if given.audit is not None:
        tokens.update(given.audit.staleness)
        source = "measured on the tokens by the audit"
    else:
        for point in given.views.run.steps:
            tokens.update(point.staleness)
        source = "as the steps recorded it"
    total = sum(tokens.values())
    rows = [
        (f"{k} behind", {"tokens": round(100 * v / total, 1)}) for k, v in sorted(tokens.items())
    ]
    bound = "" if given.audit is None else f"; bound {given.audit.max_staleness}"
    note = f"share of trained tokens by versions since they were sampled, {source}{bound}"
    return _figure("Staleness", note, plot.bars(rows, "%", "Share of trained tokens"))


def _speed(given: ReportInput) -> Iterator[str]:
    steps = given.views.run.steps
    points = [
        (
            steps[i].step,
            sum(p.num_tokens for p in steps[i - _SMOOTH + 1 : i + 1])
            * 1000
            / (steps[i].finished_at_ms - steps[i - _SMOOTH].finished_at_ms),
        )
        for i in range(_SMOOTH, len(steps))
        if steps[i].finished_at_ms > steps[i - _SMOOTH].finished_at_ms
    ]
    chart = plot.lines({"tokens": points}, "Throughput by step", "tokens / s", y_min=0.0)
    pace_s = step_seconds(steps, len(steps))
    note = (
        f"tokens trained per second, prompts included, over {_SMOOTH} steps; {pace_s:.2f} s a step"
    )
    yield _figure("Throughput", note, chart)
    named = [(n, [p.metrics[n] for p in steps if n in p.metrics]) for n in PARTS]
    rows = [(PARTS[n], {"": round(sum(found) / len(found), 3)}) for n, found in named if found]
    chart = plot.bars(rows, "s", "A trainer's step by part")
    yield _figure("A step by part", _pace(given) or "means over all steps", chart)
    rows = []
    for role in given.views.throughput.roles:
        seconds = given.views.throughput.seconds(role)
        parts = {state: seconds.get(state, 0.0) for state in _STATES}
        parts["other"] = sum(v for state, v in seconds.items() if state not in _STATES)
        rows.append((role, parts))
    note = "summed over its processes, by the state that they reported: working (blue), waiting "
    note += "(grey), pulling (ochre), other (violet)"
    yield _figure("Time by role", note, plot.bars(rows, "s", "Time by role"))


def _pace(given: ReportInput) -> str:
    run = given.views.run
    told = (pace_line(run.steps, ranks_of(run.claims)), shortage(run.steps))
    return "; ".join(text for text in told if text)


def _workers(given: ReportInput) -> str:
    throughput, pulls = given.views.throughput, given.views.pulls
    if not throughput.workers:
        return ""
    rows = [
        (
            escape(worker.worker),
            escape(worker.state),
            "-" if worker.policy_version < 0 else str(worker.policy_version),
            number(worker.totals.get("samples", 0.0)),
            number(worker.totals.get("tokens", 0.0)),
            str(worker.restarts),
        )
        for worker in throughput.workers
    ]
    pulled = (
        f'<p class="muted">{pulls.num_pulls:,} weight pulls, {pulls.num_bytes / 1e6:,.1f} MB, '
        f"{pulls.seconds / pulls.num_pulls:.3f} s each, generation paused "
        f"{pulls.paused_s:.2f} s in all</p>"
        if pulls.num_pulls
        else ""
    )
    head = ("worker", "last state", "version", "samples", "tokens", "restarts")
    return f"<h2>Workers</h2>{table(head, rows, numbers=range(2, 6))}{pulled}"


def _problems(given: ReportInput) -> str:
    problems = given.views.samples.problems
    if not problems:
        return ""
    rows = [
        (
            f"<code class=tokens>{escape(given.decode(p.then.prompt_ids))}</code>",
            _answer(p.then, given),
            _answer(p.now, given),
        )
        for p in sorted(problems, key=lambda p: p.then.is_right or not p.now.is_right)
    ]
    return (
        "<h2>The same problem, then and now</h2>"
        "<p class=muted>Held-out problems, one sample each. A change of colour is a change of "
        f"policy version inside one answer.</p>"
        f"{table(('problem', 'first answer', 'newest answer'), rows)}"
    )


def _answer(answer: Answer, given: ReportInput) -> str:
    verdict = "right" if answer.is_right else "wrong"
    pieces = "".join(
        f'<span class="{_author_css(version)}" title="{_author(version)}">{escape(text)}</span>'
        for version, text in spelled(answer, given.decode)
    )
    return (
        f"<code class=tokens>{pieces}</code><br><small><span class={verdict}>{verdict}</span> "
        f"<span class=muted>version {answer.policy_version}</span></small>"
    )


def _author(version: int) -> str:
    return f"policy version {version}" if version >= 0 else "environment"


def _author_css(version: int) -> str:
    return f"v{version % NUM_VERSION_COLORS}" if version >= 0 else "muted"


def _audit(audit: AuditReport | None) -> str:
    if audit is None:
        return '<h2>Audit</h2><p class="none">not made</p>'
    share = audit.dead_lettered / max(1, audit.issued - sum(audit.in_flight.values()))
    is_fine = audit.ok and share <= FEW_DEAD
    css = "verdict" if is_fine else "verdict bad"
    word = "Every sample is accounted for." if audit.ok else "The log violates a guarantee."
    if audit.ok and not is_fine:
        word = f"Nothing is lost, but {100 * share:.0f} % of the samples were dead-lettered."
    return (
        f'<h2>Audit</h2><p class="{css}"><b>{word}</b><br>{escape(audit.line())}</p>'
        f"<details{'' if audit.ok else ' open'}><summary>All of it</summary>"
        f"<pre>{escape(audit.text())}</pre></details>"
    )


def _dead(given: ReportInput) -> str:
    dead = given.views.dead
    if not dead.num:
        return ""
    rows = [(escape(r.reason), f"{r.num:,}", escape(r.newest)) for r in dead.reasons]
    told = f"<p class=muted>All of them: <code>{escape(list_command())}</code></p>"
    return f"<h2>Dead letters</h2>{table(('reason', 'number', 'newest'), rows, numbers=[1])}{told}"


def _drops(given: ReportInput) -> str:
    run = given.views.run
    claims = "".join(
        f"<li>epoch {c.epoch}, from step {c.next_step}, version {c.policy_version}</li>"
        for c in run.claims
    )
    drops = ", ".join(f"{escape(name)} {count:,}" for name, count in sorted(run.dropped.items()))
    return (
        f"<h2>Ledger</h2><p>Groups dropped: {drops or 'none'}. "
        f"Void events of dethroned trainers: {run.num_void}. Trainers that claimed the run:</p>"
        f"<ul>{claims}</ul>"
    )
