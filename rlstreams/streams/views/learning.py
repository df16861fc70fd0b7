"""The cause that keeps a run from learning, by its steps and evaluations, with its cure. Pure.

Each check takes the same facts and returns a `Hindrance`, or None. Thresholds are constants with
their reasons; sound runs (the demo, a 270M model over 439 steps) stay below all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev

from rlstreams.streams.views.feed import ViewState
from rlstreams.streams.views.hindrance import (
    SURE,
    Hindrance,
    LearningFacts,
    error_of,
    flat_end,
    group_error,
    held_out_error,
    inspect_command,
    is_learnt,
    is_solved,
    mean_of,
    mean_reward,
    mean_staleness,
    rises,
    spread_of,
    window_of,
)
from rlstreams.streams.views.run import StepPoint

FLAT_STEPS = 3  # steps in a row without a signal
LAST = f"in the last {FLAT_STEPS} steps"
PEAK_STEPS = 2  # steps of the best reward: a policy may be lost in its third
NEVER_REWARDED = (
    "is it their form (data.template, data.few_shot, a warm-up), their length "
    "(rollout.max_new_tokens), or are the rows too hard?"
)
WINDOW = 10  # steps whose mean is compared with that of others
LONG = 6  # such windows: of three sound runs of a 270M model one stood still for 35 steps
FAR_KL = 0.1  # nats a token between two versions; the demo has 4e-5 to 2e-3
STILL_KL = 1e-6  # nats a token: a learning rate that teaches moves a policy farther in every step
CLIPPED = 0.2  # share of tokens; the demo has 4e-3, with a clip of 1e-5 it has 0.32
_CLIPS = "clip_low", "clip_high"
BOUNDS = {None: _CLIPS, "ppo": _CLIPS, "dppo": ("divergence_max",)}  # that gspo binds is meant
CUT = 0.5  # share of answers that are cut: seldom what was wanted
FEW_CUT, FULL = 0.2, 0.95  # the same, where their mean length is this share of the longest
ALIKE = 0.8  # share of groups without a signal
CERTAIN = 0.1  # entropy over that of the first steps
COLD = 0.02  # nats a token: answers to a prompt are nearly all the same one
LOW = 0.6  # temperature: the demo at 0.05 had 95 % of its groups alike, at 1 6 %
HOT = 1.3  # temperature: above it a model says what it finds unlikely
FELL = 0.6  # spreads of the reward: no other rows explain such a fall
OLD = 2.0  # versions: staleness that is the first thing to lower
FEW_GROUPS = 16  # of a window: its mean is mostly their luck below
MANY_GROUPS = 48  # of a window: the share of those without a signal is partly luck below
FEW_SAMPLES = 64  # of a step: a mean of fewer is mostly noise
_AGAIN = "begin again, or branch off an earlier step (rlstreams replay branch)"


def hindrance(state: ViewState) -> Hindrance | None:
    """Return what keeps the run from learning; None: nothing is seen, or the steps are too few.

    Of several causes the first of `CAUSES` is returned: others follow from it.
    """
    run = state.run
    facts = LearningFacts(
        steps=run.steps,
        held_out=state.evaluation.curve,
        measure=state.evaluation.measure,
        cut=state.cut,
        config=json.loads(run.claims[-1].config or "{}") if run.claims else {},
    )
    if len(facts.steps) < FLAT_STEPS:
        return None
    return next((found for check in CAUSES if (found := check(facts))), None)


def is_cut(facts: LearningFacts) -> Hindrance | None:
    """Many answers end at their longest length, not by themselves."""
    newest = facts.steps[-FLAT_STEPS:]
    known = [facts.cut[p.step] for p in newest if p.step in facts.cut]
    tokens, longest = mean_of(newest, "response_tokens"), facts.get("rollout.max_new_tokens") or 0
    least = FEW_CUT if FULL * longest <= tokens <= longest else CUT
    if len(known) < FLAT_STEPS or min(known) < least:
        return None
    return Hindrance(
        cause="answers are cut",
        evidence=f"{LAST} {fmean(known):.0%} of them did not end by themselves; they have "
        f"{tokens:.0f} tokens, on average",
        cure=f"raise {facts.setting('rollout.max_new_tokens')}; if they do not end however long "
        "they are, the model does not know the end token: data.template, data.few_shot or a "
        f"warm-up. Read some: {inspect_command(newest)}",
    )


def moves_too_far(facts: LearningFacts) -> Hindrance | None:
    """The policy leaves that of its samples within a few versions."""
    newest = facts.steps[-PEAK_STEPS:]
    least = min(p.metrics.get("kl", 0.0) for p in newest)
    if mean_of(newest, "kl") < FAR_KL or least < FAR_KL / 2:
        return None
    return Hindrance(
        cause="the policy moves too far",
        evidence=f"in the last {PEAK_STEPS} steps it was {mean_of(newest, 'kl'):.2g} nats a token "
        f"from the one that sampled ({FAR_KL:g} is much)",
        cure=f"{_slower(facts, newest)}: --resume with it while the reward holds, else {_AGAIN}",
    )


def _slower(facts: LearningFacts, newest: Sequence[StepPoint]) -> str:
    """Settings to lower for a policy that moves too far, in words."""
    parts = [f"lower {facts.setting('trainer.optimizer.lr')}, to a third or less"]
    if mean_staleness(newest) >= OLD:
        parts.insert(0, f"lower {facts.setting('trainer.max_staleness')}")
    for name in ("trainer.batch_epochs", "trainer.minibatches"):
        if (facts.get(name) or 1) > 1:
            parts.append(f"lower {facts.setting(name)}")
    return ", then ".join(parts)


def is_clipped(facts: LearningFacts) -> Hindrance | None:
    """The clip binds for many tokens."""
    newest = facts.steps[-FLAT_STEPS:]
    bounds = BOUNDS.get(facts.get("trainer.loss.kind"))
    if not bounds or min(p.metrics.get("clip_fraction", 0.0) for p in newest) < CLIPPED:
        return None
    settings = " and ".join(facts.setting(f"trainer.loss.{name}") for name in bounds)
    return Hindrance(
        cause="many tokens are clipped",
        evidence=f"{LAST} {mean_of(newest, 'clip_fraction'):.0%} had no gradient, for they "
        "had moved past the clip",
        cure=f"raise {settings}, if below 0.1; else {_slower(facts, newest)}",
    )


def collapsed(facts: LearningFacts) -> Hindrance | None:
    """The reward is far below what it was."""
    steps = facts.steps
    peak, num = (window_of(steps, n, groups=FEW_GROUPS) for n in (PEAK_STEPS, FLAT_STEPS))
    newest = steps[-num:]
    blocks = [steps[n : n + peak] for n in range(len(steps) - num - peak + 1)]
    if not blocks:
        return None
    best = max(blocks, key=mean_reward)
    fell = mean_reward(best) - mean_reward(newest)
    spread = max(spread_of(block) for block in (best, newest))
    if not spread or fell < max(FELL * spread, SURE * group_error(best, newest)):
        return None
    cure = f"{_slower(facts, newest)}, and {_AGAIN}"
    far = next((p for p in steps if p.metrics.get("kl", 0.0) > FAR_KL), None)
    if far is None:
        moved = f"KL stayed below {FAR_KL:g} nats a token"
        cure = f"look first whether rows or judge changed there; if not, {cure}"
    else:
        moved = f"in step {far.step} KL was {far.metrics['kl']:.2g} nats a token, the first above "
        moved += f"{FAR_KL:g}"
    return Hindrance(
        cause="the reward collapsed",
        evidence=f"from {mean_reward(best):.2f} in steps {best[0].step} to {best[-1].step}, to "
        f"{mean_reward(newest):.2f}; {moved}; entropy went from "
        f"{mean_of(best, 'entropy'):.2g} to {mean_of(newest, 'entropy'):.2g}",
        cure=f"{cure}. Read some answers: {inspect_command(newest)}",
    )


def nothing_to_learn(facts: LearningFacts) -> Hindrance | None:
    """Every answer, or every answer to the same prompt, earned the same."""
    newest = facts.steps[-FLAT_STEPS:]
    is_flat = all(p.metrics.get("reward_std", 1.0) == 0.0 for p in newest)
    if not facts.learns_rewards or not (is_flat or facts.compares_groups):
        return None
    flat = flat_end(facts.steps, in_groups=facts.compares_groups)
    if len(flat) < FLAT_STEPS or is_learnt(flat, facts.steps):
        return None
    rewards = {p.reward for p in newest}
    same, cure = f"every answer was rewarded with {newest[-1].reward:g}", ""
    if is_flat and rewards == {0.0}:
        cure = f"{NEVER_REWARDED} "
    if not (is_flat and len(rewards) == 1):
        same = "all answers to the same prompt were rewarded alike"
        cure = _alike_cure(facts, newest)
    return Hindrance(
        cause="nothing can be learnt",
        evidence=f"{LAST} {same}, so one answer is as good as another",
        cure=f"{cure}read some: {inspect_command(newest)}",
    )


def too_alike(facts: LearningFacts) -> Hindrance | None:
    """Most groups have no signal, and not because their rows are solved."""
    num = window_of(facts.steps, WINDOW, groups=MANY_GROUPS)
    newest = facts.steps[-num:]
    share = mean_of(newest, "equal_reward_groups")
    if not facts.compares_groups or len(newest) < num or share < ALIKE or is_solved(newest):
        return None
    return Hindrance(
        cause="most of a batch teaches nothing",
        evidence=f"in the last {num} steps all answers to the same prompt were rewarded alike "
        f"in {share:.0%} of the groups; mean reward {mean_reward(newest):.2g}",
        cure=f"{_alike_cure(facts, newest)}read some: {inspect_command(newest)}",
    )


def _alike_cure(facts: LearningFacts, newest: Sequence[StepPoint]) -> str:
    """Why groups are alike, by entropy, group size and reward; with what to change."""
    first = mean_of(facts.steps[:FLAT_STEPS], "entropy")
    entropy = mean_of(newest[-FLAT_STEPS:], "entropy")
    if (facts.get("rollout.temperature") or 1.0) < LOW:
        return (
            f"answers to one prompt hardly differ: raise {facts.setting('rollout.temperature')}; "
        )
    if first >= COLD and entropy < CERTAIN * first:
        return (
            f"the policy became certain, entropy went from {first:.2g} to {entropy:.2g} nats: "
            f"lower {facts.setting('trainer.optimizer.lr')}, raise "
            f"{facts.setting('trainer.loss.clip_high')} or trainer.loss.entropy_coef, and "
            f"{_AGAIN}; "
        )
    if entropy < COLD:
        return (
            f"answers to one prompt hardly differ (entropy {entropy:.2g} nats a token): raise "
            f"{facts.setting('rollout.temperature')}; "
        )
    if 0 < (facts.get("prompts.group_size") or 0) <= 4:
        return f"raise {facts.setting('prompts.group_size')}; "
    return (
        "rows are too hard or too easy: take others (rlstreams try shows how often each is "
        f"solved), raise {facts.setting('prompts.group_size')}, or let such groups be replaced "
        "(trainer.equal_rewards = 'drop'); "
    )


def parts_conflict(facts: LearningFacts) -> Hindrance | None:
    """The reward rises by one of its parts, and another one falls."""
    before, after = facts.steps[:WINDOW], facts.steps[-WINDOW:]
    if not facts.learns_rewards or len(facts.steps) < 2 * WINDOW or not rises(before, after):
        return None
    names = {name for p in after for name in p.metrics if name.startswith("reward/")}
    changes = {
        name: (mean_of(before, name), mean_of(after, name), _part_error(name, before, after))
        for name in sorted(names)
    }
    fallen = {n: c for n, c in changes.items() if c[0] - c[1] > SURE * c[2] and c[1] < c[0] * 0.8}
    risen = {n: c for n, c in changes.items() if c[1] - c[0] > SURE * c[2]}
    if not fallen or not risen:
        return None
    said = " and ".join(
        f"{name.removeprefix('reward/')} {'rises' if c[1] > c[0] else 'falls'} from {c[0]:.2f} to "
        f"{c[1]:.2f}"
        for name, c in (*risen.items(), *fallen.items())
    )
    return Hindrance(
        cause="one part of the reward is learnt at the cost of another",
        evidence=said,
        cure="give the part that falls more weight, or make the other one count only where it is "
        f"earned (reward.parts). Read the best answers: {inspect_command(after)}",
    )


def _part_error(name: str, *windows: Sequence[StepPoint]) -> float:
    parts = [[p.metrics.get(name, 0.0) for p in steps] for steps in windows]
    return math.sqrt(sum(pstdev(values) ** 2 / max(1, len(values) - 1) for values in parts))


def is_exploited(facts: LearningFacts) -> Hindrance | None:
    """Held-out rows get worse, or stay as they were while the reward rises."""
    curve, steps = facts.held_out, facts.steps
    if len(curve) < 2 or len(steps) < WINDOW:
        return None
    before, after, first, last = steps[:WINDOW], steps[-WINDOW:], curve[0], curve[-1]
    is_rising = facts.learns_rewards and len(steps) >= 2 * WINDOW and rises(before, after)
    gained, error = last.accuracy - first.accuracy, held_out_error(first, last, steps)
    is_worse = gained < -SURE * error and max(p.accuracy for p in curve[1:][-2:]) < first.accuracy
    behind = mean_reward(after) - mean_reward(before) - gained
    is_missed = gained < error and behind > SURE * math.hypot(error, error_of(before, after))
    if not is_worse and not (is_rising and is_missed and len(curve) > 2):
        return None
    tokens = mean_of(before, "response_tokens"), mean_of(after, "response_tokens")
    return Hindrance(
        cause="held-out rows get worse" if is_worse else "held-out rows do not gain by it",
        evidence=f"the reward went from {mean_reward(before):.2f} to {mean_reward(after):.2f}, "
        f"held-out {facts.measure} from {first.accuracy:.2f} to {last.accuracy:.2f} (version "
        f"{last.policy_version}), answers from {tokens[0]:.1f} to {tokens[1]:.1f} tokens",
        cure=_control(facts)
        or "the reward pays for something else than held-out rows do, or few rows are repeated: "
        f"read the best answers ({inspect_command(after)}) and mend the reward; if they are right, "
        f"the steps are noise: {_slower(facts, after)}, or set trainer.loss.kl_coef",
    )


def _control(facts: LearningFacts) -> str:
    """Why a run does not learn that is not led by its rewards; "": it is."""
    name = facts.get("trainer.control")
    if name not in (None, "none"):
        return f"trainer.control is {name}: such a run is not to learn"
    if facts.learns_rewards:
        return ""
    return "are the answers that are learnt, or the teacher, better than the policy? read some"


def hardly_moves(facts: LearningFacts) -> Hindrance | None:
    """Versions are nearly the same one, though groups have a signal."""
    newest = facts.steps[-WINDOW:]
    known = [p for p in facts.steps if "kl" in p.metrics and mean_staleness([p]) >= 0.5]
    moved = [p.metrics["kl"] for p in known[-WINDOW:]]
    warmups = ("trainer.optimizer.warmup_steps", "trainer.loss.value_warmup_steps")
    is_warm = facts.steps[-1].step > WINDOW + max(facts.get(name) or 0 for name in warmups)
    has_moved = any(p.metrics["kl"] > STILL_KL for p in known)  # before its rate fell
    if len(moved) < WINDOW // 2 or not is_warm or has_moved:
        return None
    return Hindrance(
        cause="the policy hardly moves",
        evidence=f"in the last {WINDOW} steps a version was at most {max(moved):.1g} nats a token "
        f"from the one before; the reward was {mean_reward(facts.steps[:WINDOW]):.2f} at first "
        f"and is {mean_reward(newest):.2f} now",
        cure=f"raise {facts.setting('trainer.optimizer.lr')}, by 3 to 10 at a time",
    )


def stays(facts: LearningFacts) -> Hindrance | None:
    """Neither reward nor held-out rows rose, for many steps, though groups have a signal."""
    steps, curve = facts.steps, facts.held_out
    num = window_of(steps, WINDOW, samples=WINDOW * FEW_SAMPLES)
    if len(steps) < LONG * num or not facts.learns_rewards:
        return None
    before, after = steps[:num], steps[-num:]
    error = error_of(before, after)
    has_risen = mean_reward(after) - mean_reward(before) > error
    if len(curve) > 1:
        error = held_out_error(curve[0], curve[-1], steps)
        has_risen |= curve[-1].accuracy - curve[0].accuracy > error
    elif any(p.num_dropped for p in steps):
        return None  # of a policy that gains, harder groups are left
    if has_risen or is_solved(after):
        return None
    evidence = (
        f"the reward was {mean_reward(before):.2f} at first and is {mean_reward(after):.2f} now"
    )
    return Hindrance(
        cause="the reward does not rise", evidence=evidence, cure=_stays_cure(facts, after)
    )


def _stays_cure(facts: LearningFacts, newest: Sequence[StepPoint]) -> str:
    if found := _control(facts):
        return found
    if (facts.get("rollout.temperature") or 0) >= HOT:
        return f"lower {facts.setting('rollout.temperature')}: 1 is what the model was trained for"
    num = fmean(p.num_samples for p in newest)
    if num < FEW_SAMPLES:
        return (
            f"{num:.0f} samples a step are mostly noise: raise "
            f"{facts.setting('trainer.groups_per_step')} or {facts.setting('prompts.group_size')}"
        )
    return (
        f"raise {facts.setting('trainer.optimizer.lr')} by 3; if it then falls, the reward does "
        f"not say what is better: read some answers ({inspect_command(newest)})"
    )


def not_replayed(facts: LearningFacts) -> Hindrance | None:
    """Replay of routes is on, and nobody records any."""
    newest = facts.steps[-FLAT_STEPS:]
    # Only steps with replay have the metric.
    if any(p.metrics.get("routing_recorded", 1.0) for p in newest):
        return None
    return Hindrance(
        cause="no route is replayed",
        evidence=f"{LAST} the model server reported no routed experts, so scorer and trainer took "
        "their own, as without trainer.routing_replay",
        cure="run a version of the server that reports them, or set trainer.routing_replay = false",
    )


Check = Callable[[LearningFacts], Hindrance | None]
CAUSES: tuple[Check, ...] = (
    collapsed,
    moves_too_far,
    is_cut,
    is_clipped,
    nothing_to_learn,
    too_alike,
    hardly_moves,
    parts_conflict,
    is_exploited,
    stays,
    not_replayed,
)
