"""Charts of a run: their titles, notes and lines, and their numbers by step. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from rlstreams.show.metrics.figures import denoised
from rlstreams.show.metrics.rows import step_row
from rlstreams.show.report.fold import RunFold
from rlstreams.streams.views.feed import ViewState
from rlstreams.streams.views.pace import PARTS
from rlstreams.streams.views.run import StepPoint
from rlstreams.streams.workers import Life, Restart
from rlstreams.words.screen import KillMark, number

SMOOTH = 5  # steps that throughput is averaged over
PART = "reward/"  # begins the name of a metric that is a part of the reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One figure: its lines by name."""

    id: str
    title: str
    note: str
    unit: str
    lines: tuple[str, ...]
    theme: str = ""  # of those that are folded; empty: it is open


def _chart(id_: str, title: str, unit: str, note: str, *lines: str, theme: str = "") -> Chart:
    return Chart(id=id_, title=title, note=note, unit=unit, lines=lines or (id_,), theme=theme)


FIRST: tuple[Chart, ...] = (
    _chart("learning", "Reward and held-out {measure}", "",
           "reward of the training batch, and of the held-out rows, which are not trained on",
           "reward", "held_out", "held_out_best"),
    _chart("loss", "Loss", "", "policy loss, mean over the trained tokens"),
    _chart("kl", "KL divergence", "nats",
           "of the trained policy from the sampling policy, per token"),
    _chart("entropy", "Entropy", "nats", "of the policy while it was trained, per token"),
    _chart("grad_norm", "Gradient norm", "", "before clipping"),
    _chart("throughput", "Throughput", "tokens/s",
           f"tokens trained per second, prompts included, over {SMOOTH} steps", "tokens_per_s"),
    _chart("staleness", "Staleness", "versions",
           "of the trained tokens: mean, and the largest", "staleness_mean", "staleness_max"),
)  # fmt: skip
ANSWERS, OPTIMIZER, ENGINES = "Rewards and answers", "Optimizer", "Sampler against trainer"
EXPERTS, SPEED, REST = "Experts", "Speed and memory", "Other metrics"
THEMES: Mapping[str, tuple[Chart, ...]] = {
    ANSWERS: (
        _chart("reward_std", "Spread of the reward", "", "standard deviation over the batch"),
        _chart("equal_reward_groups", "Groups without a signal", "share",
               "share whose samples all got the same reward, so that their advantage is 0"),
        _chart("response_tokens", "Answer length", "tokens", "mean over the batch"),
        _chart("truncated", "Truncated answers", "share",
               "samples of the batch that were cut at their length"),
        _chart("turns", "Turns per sample", "turns", "of the policy, mean over the batch"),
        _chart("environment_tokens", "Environment's tokens", "tokens",
               "per sample, mean over the batch; not in the loss"),
    ),
    OPTIMIZER: (
        _chart("clip_fraction", "Clipped tokens", "share",
               "share of tokens whose gradient is clipped"),
        _chart("kl_reference", "Distance from the reference", "nats",
               "KL divergence as the loss has it, before kl_coef, per token"),
        _chart("lr", "Learning rate", "", "of the optimizer"),
    ),
    ENGINES: (
        _chart("mismatch", "Engine mismatch", "nats",
               "proximal against behavior log-prob under one version, mean per token before a "
               "pull within its answer", "mismatch_mean"),
        _chart("mismatch_max", "Largest mismatch", "nats", "of one token of the batch"),
        _chart("mismatch_after_pull_mean", "Mismatch after a pull", "nats",
               "as engine mismatch, of answers that went on under newer weights: with a kept "
               "cache the older ones are in it"),
        _chart("ratio_max", "Largest ratio", "", "of the trained to the sampling version, by step"),
        _chart("weight_mean", "Importance weight", "",
               "proximal over behavior policy, capped, mean"),
        _chart("ess", "Effective sample size", "share",
               "of the weights that tokens were trained with, as a share of the tokens; 1: all "
               "alike"),
        _chart("rejected_fraction", "Rejected tokens", "share",
               "share of tokens of importance weight 0"),
        _chart("rollout_kl", "Rollout KL", "nats",
               "of the proximal policy from the sampler's own log-probs, by its estimators k1 "
               "and k3", "rollout_k1", "rollout_k3"),
        _chart("rollout_chi2", "Rollout chi-square", "",
               "of proximal / behavior, by token and by sample", "rollout_chi2_token",
               "rollout_chi2_seq"),
        _chart("rollout_ppl_ratio", "Rollout perplexity ratio", "",
               "perplexity of an answer under the proximal policy over the sampler's own, mean"),
        _chart("rollout_prob_diff", "Rollout probability difference", "",
               "of a token, proximal against behavior: mean, and the largest",
               "rollout_prob_diff_mean", "rollout_prob_diff_max"),
        _chart("rollout_pearson", "Rollout correlation", "",
               "Pearson's, of the two probabilities of each token"),
    ),
    EXPERTS: (
        _chart("routing_flips", "Routing flips", "share",
               "share of the recorded (token, layer) rows for which the live router would choose "
               "other experts than the replayed ones"),
        _chart("routing_recorded", "Recorded routes", "share",
               "share of the (token, layer) rows that are replayed; the live router chooses for "
               "the rest"),
    ),
    SPEED: (
        _chart("train_s", "Time to train", "s", "forward, backward, update and hash of a step"),
        _chart("parts_s", "A step by part", "s",
               "seconds by what the trainer does, and waits for", *PARTS),
        _chart("mfu", "MFU", "share",
               "FLOPs that a step needs, over what its GPUs can do in its time"),
        _chart("gpu_free_gb", "Memory left", "GB", "of the trainer's GPU, after each step"),
    ),
}  # fmt: skip
_ELSEWHERE = frozenset(
    {"reward", "num_loss_tokens", "tokens_real", "tokens_shared", "tokens_computed"}
) | {line for chart in (*FIRST, *chain(*THEMES.values())) for line in chart.lines}


def series(fold: RunFold, kills: Sequence[KillMark] = (), after: int = 0) -> dict[str, Any]:
    """Numbers of all lines: `step` and `ms` [steps], each line of that length, None: no number.

    Args:
        after: only steps after this one; evaluations and marks are always all.
    """
    state = fold.state
    steps = state.run.steps
    rows = [
        (p, {**_derived(steps, n, p), "truncated": state.cut.get(p.step)})
        for n, p in enumerate(steps)
        if p.step > after
    ]
    names = dict.fromkeys(name for _, row in rows for name in row)
    step_of, curve = state.run.step_of, state.evaluation.curve
    points = [[step_of(p.policy_version), p.finished_at_ms, _plain(p.accuracy), _plain(p.best)]
              for p in curve]  # fmt: skip
    return {
        "step": [p.step for p, _ in rows],
        "ms": [p.finished_at_ms for p, _ in rows],
        "lines": {name: [_shown(name, row.get(name)) for _, row in rows] for name in names},
        "held_out": points,
        "measure": state.evaluation.measure,
        "marks": [{"step": k.step, "ms": _time_of(k, state), "text": str(k)} for k in kills],
        "target": state.run.step_target,
    }


def _derived(steps: Sequence[StepPoint], n: int, p: StepPoint) -> dict[str, float | None]:
    row = step_row(p).values
    own = ("reward", "loss", *(("staleness_mean", "staleness_max") if p.staleness else ()))
    values: dict[str, float | None] = {**p.metrics, **{name: row[name] for name in own}}
    first = max(0, n - SMOOTH)
    span_ms = p.finished_at_ms - steps[first].finished_at_ms
    trained = sum(point.num_tokens for point in steps[first + 1 : n + 1])
    values["tokens_per_s"] = trained * 1000 / span_ms if span_ms > 0 else None
    return values


def _plain(value: float | None) -> float | None:
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def _shown(name: str, value: float | None) -> float | None:
    return None if value is None else _plain(denoised(name, value))


def _time_of(kill: KillMark, state: ViewState) -> int:
    ended = (p.finished_at_ms for p in state.run.steps if p.step >= kill.step)
    return kill.killed_at_ms or next(ended, state.throughput.now_ms)


def charts_of(
    found: Sequence[Mapping[str, Any]],
) -> tuple[list[Chart], list[Chart], list[tuple[Chart, str]]]:
    """Charts for the `series` of one or several runs: the first ones, the others, and those whose
    lines never change, each with its one number."""
    values: dict[str, list[float]] = {}
    for one in found:
        evaluated = {"held_out": 2, "held_out_best": 3}
        lines = {name: [p[at] for p in one["held_out"]] for name, at in evaluated.items()}
        for name, line in {**one["lines"], **lines}.items():
            values.setdefault(name, []).extend(value for value in line if value is not None)
    if values.get("held_out_best") == values.get("held_out"):
        values["held_out_best"] = []  # one answer a row
    parts = [_chart(n, n, "", "a part of the reward, mean over the batch", theme=ANSWERS)
             for n in sorted(values) if n.startswith(PART)]  # fmt: skip
    rest = [_chart(name, name, "", "", theme=REST) for name in sorted(values)
            if name not in _ELSEWHERE and not name.startswith(PART)]  # fmt: skip
    listed = [replace(c, theme=theme) for theme, charts in THEMES.items() for c in charts]
    others, flat = [], []
    for chart in (*parts, *listed, *rest):
        numbers = [value for name in chart.lines for value in values.get(name, ())]
        if len(set(numbers)) > 1:
            others.append(_known(chart, values))
        elif numbers:
            flat.append((chart, number(numbers[0])))
    return [_known(_named(chart, measure_of(found)), values) for chart in FIRST], others, flat


def measure_of(found: Sequence[Mapping[str, Any]]) -> str:
    """Name of the mean of held-out rewards over several runs: `accuracy` only if it is in all."""
    return "accuracy" if all(one["measure"] == "accuracy" for one in found) else "reward"


def _named(chart: Chart, measure: str) -> Chart:
    """The chart with the name of what it shows of held-out rows in its title."""
    return replace(chart, title=chart.title.format(measure=measure))


def _known(chart: Chart, values: Mapping[str, Sequence[float]]) -> Chart:
    """The chart with those of its lines that have numbers."""
    return replace(chart, lines=tuple(name for name in chart.lines if values.get(name)))


def spoken(chart: Chart, found: Mapping[str, Any]) -> str:
    """A chart in words, for people who do not see it: first and last number of each line."""
    parts = []
    for name in chart.lines:
        at = {"held_out": 2, "held_out_best": 3}.get(name)
        line = found["lines"].get(name, ()) if at is None else [p[at] for p in found["held_out"]]
        numbers = [value for value in line if value is not None]
        if numbers:
            parts.append(
                f"{label(name, found['measure'])} {number(numbers[0])} to {number(numbers[-1])}"
            )
    return "; ".join(parts)


def label(name: str, measure: str) -> str:
    """Name of a line, for people; `measure` is that of the held-out rows."""
    return {"held_out": f"held-out {measure}", "held_out_best": "best of each row",
            "tokens_per_s": "tokens/s", **PARTS}.get(name, name.replace("_", " "))  # fmt: skip


def timeline(
    fold: RunFold, kills: Sequence[KillMark], restarts: Sequence[Restart]
) -> dict[str, Any]:
    """Lives of the processes, and what happened when; times in ms."""
    state = fold.state
    with fold.lock:
        lives = fold.workers.lives
        pulls = [(pull.worker, pull.loaded_at_ms) for pull in fold.workers.pulls.newest]
        saved = list(fold.workers.checkpoints)
    return {
        "lives": [_life(life) for life in lives],
        "marks": {
            "kill": [[k.worker, _time_of(k, state), str(k)] for k in kills],
            "restart": [[r.worker, r.at_ms, f"{r.worker} started again"] for r in restarts],
            "weight pull": [[worker, ms, "weights pulled"] for worker, ms in pulls],
            "checkpoint": [[worker, ms, "checkpoint written"] for worker, ms in saved],
            "evaluation": [
                ["evaluation", p.finished_at_ms, f"version {p.policy_version}: {p.accuracy:.3f}"]
                for p in state.evaluation.curve
            ],
        },
    }


def _life(life: Life) -> list[Any]:
    host = f" on {life.host}" if life.host else ""
    return [life.worker, life.from_ms, life.at_ms, f"{life.worker}{host}, then {life.state}"]
