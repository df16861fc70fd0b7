"""Figures of a run, a step, an agent: name, value, unit and what each means, computed here alone.

Terminal, page and report are skins: they choose among these, and lay them out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from rlstreams.show.metrics.rows import step_row
from rlstreams.streams.views.agents import NEWEST, AgentState
from rlstreams.streams.views.cost import Comeback, CostState
from rlstreams.streams.views.feed import ViewState
from rlstreams.streams.views.pace import STEPS, pace
from rlstreams.streams.views.run import StepPoint
from rlstreams.words.house import MEANING
from rlstreams.words.screen import KillMark, clock, ends, number

NONE = "-"  # while there is no value


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure, as it is shown."""

    name: str
    value: str
    unit: str = ""  # empty: the name says it, or it has none
    about: str  # its meaning, in a sentence

    @property
    def title(self) -> str:
        """Name and unit."""
        return f"{self.name}, {self.unit}" if self.unit else self.name


_ABOUT_RUN: Mapping[str, tuple[str, str]] = {  # unit, and what it means
    "held_out": (
        "",
        "Mean reward of rows that are never trained on, at the first and the newest evaluation "
        "that is complete.",
    ),
    "steps": ("", "Steps whose StepCompleted is in the log, and where the run ends."),
    "reward": ("", "Mean reward of the samples of the newest step."),
    "samples": ("", "Samples of all steps; each is trained once."),
    "rate": (
        "tokens/s",
        f"Answer tokens of trained samples, mean over the last {STEPS} steps.",
    ),
    "time": ("", f"From the first claim of the run to its newest step; {MEANING['claim']}."),
    "kills": ("", "Processes that ended without a goodbye, and came back."),
    "training": (
        "",
        "Seconds of the steps that count, over the time from the begin of the first to the end "
        "of the last, or to now while the run goes on. Waiting, pauses, kills and steps that were "
        "done again are the rest.",
    ),
    "in_vain": (
        "",
        "Sampled tokens that no step trains: lost with a process that died, as of its last report, "
        "unfinished as a process stopped, beside the path of an agent, or of a sample that was "
        "dropped, left out or dead-lettered.",
    ),
    "lost": ("", "Samples that were issued, and of which the audit finds no end in the log."),
    "letters": (
        "",
        "Records and samples that could not be handled, and were set aside with the reason.",
    ),
}


def of_run(
    state: ViewState, *, target: int = 0, kills: Sequence[KillMark] = (), lost: int | None = None
) -> Mapping[str, Figure]:
    """Figures of a run so far, by key and in the order in which they are read.

    Args:
        target: steps to do, while no trainer has said it.
        kills: processes that ended without a goodbye.
        lost: samples that the audit misses; None: there was no audit.
    """
    run, curve = state.run, state.evaluation.curve
    points = [f"{point.accuracy:.2f}" for point in (*curve[:1], *curve[1:][-1:])]
    rate = pace(run.steps)
    seconds = 0.0
    if run.steps and run.claims:
        seconds = (run.steps[-1].finished_at_ms - run.claims[0].started_at_ms) / 1000
    found = {
        "held_out": (f"held-out {state.evaluation.measure}", " to ".join(points) or NONE),
        "steps": ("optimizer steps", f"{run.step} of {run.step_target or target or '?'}"),
        "reward": ("newest reward", number(run.steps[-1].reward) if run.steps else NONE),
        "samples": ("samples trained", f"{sum(point.num_samples for point in run.steps):,}"),
        "rate": ("trained answers", f"{rate.sampled_per_s:,.0f}" if rate else NONE),
        "time": ("trainer start to last step", clock(seconds)),
        "kills": (f"processes {ends(kills)}", str(len(kills))),
        "lost": ("samples lost", NONE if lost is None else f"{lost:,}"),
        "letters": ("dead letters", f"{state.dead.num:,}"),
    }
    found |= _cost(state.cost)
    figures = {
        key: Figure(name=name, value=value, unit=_ABOUT_RUN[key][0], about=_ABOUT_RUN[key][1])
        for key, (name, value) in found.items()
        if key != "lost" or lost is not None
    }
    return figures | {f"{BACK}{role}": _back(role, it) for role, it in state.cost.comebacks.items()}


COSTS = ("training", "in_vain")
BACK = "back_"  # begins the key of a role's deaths


def of_cost(state: ViewState) -> list[Figure]:
    """Figures of the run's cost: training time, tokens in vain, deaths of each role."""
    return parted(of_run(state))[1]


def parted(found: Mapping[str, Figure]) -> tuple[list[Figure], list[Figure]]:
    """Part the figures of a run into those of its progress and those of its cost."""
    costs = [key for key in found if key in COSTS or key.startswith(BACK)]
    return [found[key] for key in found if key not in costs], [found[key] for key in costs]


def _cost(state: CostState) -> Mapping[str, tuple[str, str]]:
    causes = ", ".join(
        f"{name.replace('_', ' ')} {num:,}" for name, num in sorted(state.in_vain.items())
    )
    of = f"of {state.sampled_tokens:,} " if state.sampled_tokens else ""
    of += "tokens sampled in vain"
    return {
        "training": ("of the time was training", _share(state.training_share)),
        "in_vain": (f"{of}: {causes}" if causes else of, _share(state.in_vain_share)),
    }


def _share(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f} %"


def _back(role: str, found: Comeback) -> Figure:
    num_back = found.deaths - found.away
    if not num_back:
        died = f"death{'s' * (found.deaths > 1)} of a {role} process with no work after it"
        return Figure(name=died, value=str(found.deaths), about="No process took its place so far.")
    parts = [f"median of {num_back}, worst {_seconds(found.worst_s)}"] if num_back > 1 else []
    parts += [f"{found.away} not back"] if found.away else []
    more = f" ({'; '.join(parts)})" if parts else ""
    return Figure(
        name=f"from the death of a {role} process to its next work{more}",
        value=_seconds(found.median_s),
        about="Seconds from the last report of a process that ended without a goodbye to the first "
        "sample, score or step of the process that took its place, on the clock of their host.",
    )


def _seconds(value: float) -> str:
    return NONE if math.isnan(value) else f"{value:.1f} s"


_ABOUT_AGENT: Mapping[str, tuple[str, str, str]] = {  # name, unit, and what it means
    "sessions": ("sessions", "", "Sessions that are over, by how they closed; and those open."),
    "calls": ("calls per session", "", "Mean over sessions that are over."),
    "latency_p50": ("call, p50", "s", f"Request to answer, median of the newest {NEWEST:,} calls."),
    "latency_p95": ("call, p95", "s", "Time that 95 % of the same calls did not exceed."),
    "replayed": ("from the log", "%", "Requests of new starts that recorded calls answered."),
    "beside": ("not learnt from", "%", "Sampled tokens that are not on the main chain."),
}


def of_agents(state: ViewState) -> Mapping[str, Mapping[str, Figure]]:
    """Figures of each agent so far, by its name; empty: the run has none."""
    return {one.agent or "unknown": _of_agent(one) for one in state.agents}


def _of_agent(one: AgentState) -> Mapping[str, Figure]:
    closed = [f"{num:,} {kind}" for kind, num in one.ended.items()]
    closed += [f"{one.num_open:,} open"] if one.num_open else []
    found = {"sessions": ", ".join(closed)} | {
        key: NONE if value is None else number(value) for key, value in one.values.items()
    }
    return {
        key: Figure(name=name, value=found[key], unit=unit, about=about)
        for key, (name, unit, about) in _ABOUT_AGENT.items()
    }


_LEARNING = {  # by the step's metric
    "kl": ("KL", "Distance of the trained policy from the one that sampled, in nats a token."),
    "kl_reference": (
        "KL from reference",
        "Distance of the trained policy from logprob.reference, in nats a token, before kl_coef.",
    ),
    "entropy": ("entropy", "How undecided the policy is, in nats a token."),
    "grad_norm": ("gradient", "Norm of the step's gradient before it is clipped."),
}


# Below these a figure is the rounding of float32, and is shown as 0. A loss is a mean of terms near
# 1. Log-probs that rounding alone sets 4e-6 nats apart have a divergence of half its square.
_ROUNDING = {"loss": 1e-7, "kl": 1e-11, "kl_reference": 1e-11}


def denoised(metric: str, value: float) -> float:
    """The value of a step's metric, 0 where rounding alone made it."""
    return 0.0 if abs(value) < _ROUNDING.get(metric, 0.0) else value


def metric_text(metric: str, value: float | None) -> str:
    """A step's metric as every view shows it; exports have the recorded number."""
    return NONE if value is None else number(denoised(metric, value))


def of_step(point: StepPoint) -> Mapping[str, Figure]:
    """Whether a step learns: loss, KL, entropy, gradient norm; how old its samples were. The KL
    divergence from a reference, where the loss has one."""
    found = {
        "loss": Figure(
            name="loss",
            value=metric_text("loss", point.loss),
            about="What the step minimised, at its start.",
        )
    }
    for key, (name, about) in _LEARNING.items():
        if key in point.metrics:
            found[key] = Figure(name=name, value=metric_text(key, point.metrics[key]), about=about)
    staleness = step_row(point).values["staleness_mean"]
    found["staleness"] = Figure(
        name="staleness",
        value=f"{staleness:.2f}",
        unit="versions",
        about="Versions between the weights that sampled a token and those that were trained.",
    )
    return found


def step_s(steps: Sequence[StepPoint]) -> float:
    """Seconds from step to step, median of the last ones: a kill or a pause changes nothing."""
    ends_ms = [point.finished_at_ms for point in steps[-STEPS - 1 :]]
    return median([b - a for a, b in pairwise(ends_ms)] or [0]) / 1000
