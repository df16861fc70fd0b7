"""Findings of `blame`, for the terminal."""

from __future__ import annotations

import math

from rlstreams.debug.blame.blame import Blamed, Effect
from rlstreams.debug.blame.series import SAMPLED, is_reward
from rlstreams.streams.log.text import counted
from rlstreams.words.screen import visible
from rlstreams.words.texts import short

SAMPLES = 4  # samples of a set that are shown, those with the largest advantages
LABEL = "offline experiment on recorded data: later samples are those of the policy as it was"


def lines(found: Blamed) -> list[str]:
    """Return a table of the sets that were tried alone, and samples of the sets to blame."""
    is_judged = any(s.reward_instead is not None for e in found.effects for s in e.samples)
    steps = f"steps {found.first} to {found.last}" if found.last > found.first else (
        f"step {found.first}"
    )  # fmt: skip
    where = f"{'behind' if found.metric in SAMPLED else 'of'} step {found.at}"
    if is_judged:
        else_ = f"with the other rewards in {steps}"
    elif found.at == found.last and found.metric not in SAMPLED:
        else_ = f"at step {found.first - 1}"
    else:
        else_ = f"without the updates of {steps}"
    rows = [_row(one) for one in found.effects]
    names = ", ".join(one.name for one in found.to_blame)
    return [
        f"{found.metric} {where}: {found.now:.6g}; {else_} {found.without:.6g}",
        f"{'set':<22} {'samples':>7} {'effect':>11} {'other draws':>11} {'share':>7}",
        *rows,
        _random_line(found),
        f"to blame: {names}" if names else "to blame: nobody; no set stands out of random ones",
        *(line for one in found.to_blame for line in _samples(one)),
        f"{counted(found.num_experiments, 'experiment')} over {found.num_sets} sets, "
        f"{counted(found.num_steps, 'step')} done again, from {found.started_from}",
        LABEL,
    ]


def _row(one: Effect) -> str:
    again = f"{one.again:+.4g}" if one.again is not None else ""
    share = f"{one.share:.0%}" if math.isfinite(one.share) else "-"
    mark = "  to blame" if one.is_to_blame else ""
    return f"{one.name:<22} {len(one.samples):>7} {one.effect:>+11.4g} {again:>11} {share:>7}{mark}"


def _random_line(found: Blamed) -> str:
    known = [one for one in found.random_effects if math.isfinite(one)]
    if not known:
        return "too few other samples to say how large an effect is by chance"
    is_fall = is_reward(found.metric) or found.now < found.without  # the direction that is sought
    beyond = f"below {-found.border:.4g}" if is_fall else f"above {found.border:.4g}"
    return (
        f"{len(known)} random sets of as many samples: {min(known):+.4g} to {max(known):+.4g}; "
        f"an effect must be {beyond} to be no chance"
    )


def _samples(one: Effect) -> list[str]:
    rows = []
    for sample in one.samples[:SAMPLES]:
        instead = "" if sample.reward_instead is None else f" (other: {sample.reward_instead:g})"
        text = visible(f"{short(sample.prompt)} -> {short(sample.answer)}")
        rows.append(
            f"  {sample.sample:<10} step {sample.step}  reward {sample.reward:g}{instead}  "
            f"advantage {sample.advantage:.3g}  {text}"
        )
    more = len(one.samples) - SAMPLES
    return [f"{one.name}:", *rows, *([f"  and {more} more"] if more > 0 else [])]
