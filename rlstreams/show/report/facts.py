"""Tables of a run for report and live page: values in, text out. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rlstreams.schemas.events import TrainerStarted
from rlstreams.show.metrics.figures import metric_text, of_run
from rlstreams.show.metrics.rows import step_row
from rlstreams.show.report.html import clock_time
from rlstreams.streams.log.text import counted
from rlstreams.streams.views.evaluation import HeldOutAnswer
from rlstreams.streams.views.feed import ViewState
from rlstreams.streams.views.pace import pace_line, ranks_of, shortage
from rlstreams.streams.views.run import StepPoint
from rlstreams.streams.views.workers import releases_line
from rlstreams.words.sample_detail import SampleDetail
from rlstreams.workers.config.layers import leaves
from rlstreams.workers.trainer.family import branch_line, computed_with

VERSION_COLORS = 5  # classes v0 to v4
STEP_HEAD = ("step", "version", "reward", "loss", "KL", "entropy", "gradient", "clipped",
             "mismatch", "staleness", "samples", "tokens", "seconds", "finished (UTC)")  # fmt: skip
_SHOWN = (
    "reward", "loss", "kl", "entropy", "grad_norm", "clip_fraction", "mismatch_mean",
    "staleness_mean",
)  # fmt: skip
_LEVELS = {"logprob": (0.1, 0.7, 2.3, 4.6), "mismatch": (1e-3, 1e-2, 0.05, 0.2)}  # nats
LEGENDS = {
    "version": "a small number before a piece is the policy version that sampled it",
    "logprob": "underlined by how unlikely the sampling policy found a token: dotted below "
    "probability 0.9, dashed 0.5, solid 0.1, double 0.01",
    "mismatch": "underlined by the distance of proximal and behavior log-prob: dotted above 0.001 "
    "nats, dashed 0.01, solid 0.05, double 0.2",
}


def config_of(claims: Sequence[TrainerStarted]) -> Mapping[str, Any]:
    """The resolved configuration of the newest claim; empty before it."""
    found: Mapping[str, Any] = json.loads(claims[-1].config) if claims else {}
    return found


def facts(state: ViewState) -> list[tuple[str, str]]:
    """Model, data, algorithm and hosts of a run as (name, value), by the newest claim."""
    claims = state.run.claims
    if not claims:
        return []
    found = dict(leaves(config_of(claims)))

    def get(name: str) -> str:
        value = found.get(name)
        return "" if value in (None, "", [], {}) else str(value)

    loss = f"{get('trainer.loss.kind')}, advantages by {get('trainer.loss.advantage')}"
    loss += f", mean by {get('trainer.loss.reduce')}, KL coefficient {get('trainer.loss.kl_coef')}"
    if found.get("trainer.loss.kl_coef"):
        loss += f" ({get('trainer.loss.kl_estimator')}, from {get('logprob.reference')})"
    lora = f", LoRA of rank {get('trainer.lora.rank')}" if found.get("trainer.lora.rank") else ""
    hosts = dict.fromkeys([*(c.host for c in claims), *(w.host for w in state.throughput.workers)])
    versions = claims[-1].versions
    num_ranks, device = get("trainer.ranks"), get("trainer.device")
    ranks = f" x {num_ranks}" if num_ranks != "1" else ""
    branch = state.run.branch
    texts = {
        "family": branch_line(branch, claims[-1].config) if branch else "",
        "model": f"{get('model.path')} ({get('model.dtype')}){lora}",
        "data": next(
            (get(f"data.{n}") for n in ("train", "gym", "preset") if get(f"data.{n}")), ""
        ),
        "reward": get("reward.verifier"),
        "rewards that do not compare": judges_line(state.run.steps),
        "environment": get("environment.name"),
        "algorithm": loss,
        "batch": f"{get('trainer.groups_per_step')} groups of {get('prompts.group_size')} samples",
        "learning rate": get("trainer.optimizer.lr"),
        "seed": get("run.seed"),
        "engine": get("rollout.engine"),
        "trainer's device": f"{versions.get('device', device)}{ranks}",
        "rollout's device": get("rollout.device") if get("rollout.engine") == "builtin" else "",
        "largest staleness": get("trainer.max_staleness"),
        "hosts": ", ".join(host for host in hosts if host),
        "releases of workers": releases_line(state.throughput.workers),
        "commit": versions.get("commit", ""),
        "versions": ", ".join(
            f"{name} {versions[name]}"
            for name in ("rlstreams", "torch", "transformers", "python")
            if name in versions
        ),
    }
    if not found:  # a claim that names no configuration
        texts = {name: texts[name] for name in ("hosts", "commit", "versions")}
    return [(name, value) for name, value in texts.items() if value.strip()]


def judges_line(steps: Sequence[StepPoint]) -> str:
    """Steps from which answers were judged by other code or settings; "": there are none."""
    texts, before = [], ""
    for point in steps:
        for judge in point.judged_by:
            if judge and judge != before:
                texts.append(f"from step {point.step} on judged by {judge}")
                before = judge
    return "; ".join(texts) if len(texts) > 1 else ""


def pace_of(state: ViewState) -> str:
    """Pace, the role that holds back others, and short memory; "" before two steps."""
    run = state.run
    parts = (pace_line(run.steps, ranks_of(run.claims)), shortage(run.steps))
    return "; ".join(text for text in parts if text)


def step_cells(p: StepPoint) -> list[str]:
    """A step's cells, as `STEP_HEAD` names them."""
    values = step_row(p).values
    return [
        str(p.step),
        str(p.policy_version),
        *(metric_text(name, values.get(name)) for name in _SHOWN),
        f"{p.num_samples:,}",
        f"{p.num_tokens:,}",
        f"{values['seconds']:.2f}",
        clock_time(p.finished_at_ms),
    ]


def workers(state: ViewState) -> list[list[str]]:
    """A row for each worker."""
    rows = []
    for worker in state.throughput.workers:
        parts = [
            (name, worker.seconds.get(name, 0.0)) for name in ("working", "waiting", "pulling")
        ]
        whole = sum(worker.seconds.values()) or 1.0
        rows.append([
            worker.worker, worker.state, worker.detail,
            "-" if worker.policy_version < 0 else str(worker.policy_version),
            worker.host, str(worker.restarts), clock_time(worker.from_ms), clock_time(worker.at_ms),
            ", ".join(f"{100 * value / whole:.0f} %" for _, value in parts),
        ])  # fmt: skip
    return rows


def pulls_line(state: ViewState) -> str:
    """All weight pulls in a sentence."""
    pulls = state.pulls
    if not pulls.num_pulls:
        return "no weights were pulled yet"
    return (
        f"{pulls.num_pulls:,} weight pulls, {pulls.num_bytes / 1e6:,.1f} MB, "
        f"{pulls.seconds / pulls.num_pulls:.3f} s each, generation paused "
        f"{pulls.paused_s:.2f} s in all"
    )


def stations(state: ViewState) -> list[dict[str, Any]]:
    """Roles, and the topics between them, in the order in which a sample passes them."""
    flow = state.flow
    passed = (flow.issued, flow.rolled_out, flow.scored)
    topics = {
        topic: [f"{num:,} samples", f"lag {lag:,}"]
        for (topic, lag), num in zip(flow.waiting.items(), passed, strict=True)
    }
    topics["steps"] = [f"{state.run.step:,} of {state.run.step_target:,}"]
    units = {"prompts": "samples", "rollout": "tokens", "logprob": "tokens", "trainer": "samples"}
    listed: list[dict[str, Any]] = []
    for (role, unit), (topic, about) in zip(units.items(), topics.items(), strict=True):
        own = [w for w in state.throughput.workers if w.role == role]
        lines = [counted(len(own), "process", "processes")]
        rate = sum(w.rates.get(unit, 0.0) for w in own)
        lines += [f"{rate:,.0f} {unit}/s"] if own else []
        lines += [
            f"{w.worker}: {w.state} {w.detail}"
            for w in own
            if w.state not in ("working", "stopped")
        ]
        listed.append({"name": role, "is_topic": False, "lines": lines})
        listed.append({"name": topic, "is_topic": True, "lines": about})
    return listed


def shown_tokens(detail: SampleDetail, color: str = "version") -> list[dict[str, Any]]:
    """Segments with their tokens as text, each marked by `color`: version, logprob or mismatch."""
    rollout, table = detail.lineage.rollout, detail.tokens
    if rollout is None or table is None:
        return []
    values_N = table.behavior_N if color == "logprob" else table.difference_N
    found, start = [], 0
    for number, segment in enumerate(rollout.segments):
        num = len(segment.token_ids)
        end = start + num
        is_policy = segment.author == "policy"
        version = f", version {segment.policy_version}" if is_policy else ""
        ended = f", {segment.finish_reason}" if segment.finish_reason else ""
        title = f"{number + 1}. {segment.author}{version}, {num} token{'s' * (num != 1)}{ended}"
        pieces = detail.words[start:end]
        if color == "version" or not is_policy:
            runs = [_run("".join(pieces), segment.policy_version if is_policy else -1)]
        else:
            runs = [
                {
                    "text": text,
                    "mark": "",
                    "css": _level(float(value), color),
                    "title": f"{value:.4g} nats",
                }
                for text, value in zip(pieces, values_N[start:end], strict=True)
            ]
        found.append({"title": title, "runs": runs})
        start = end
    return found


def _run(text: str, version: int) -> dict[str, str]:
    if version < 0:
        return {"text": text, "mark": "", "css": "muted", "title": ""}
    title = f"policy version {version}"
    return {
        "text": text,
        "mark": f"v{version}",
        "css": f"v{version % VERSION_COLORS}",
        "title": title,
    }


def _level(value: float, color: str) -> str:
    level = sum(abs(value) >= bound for bound in _LEVELS[color])
    return f"q{level}" if level else ""


def shown_answer(answer: HeldOutAnswer, pieces: Iterator[tuple[int, str]]) -> dict[str, Any]:
    """A held-out answer, its pieces by version."""
    runs = [_run(text, version) for version, text in pieces]
    return {
        "is_right": answer.is_right,
        "version": answer.policy_version,
        "shown": {"title": "", "runs": runs},
    }


def claim_changes(claims: Sequence[TrainerStarted]) -> list[str]:
    """Fields, files and versions in which each claim differs from the one before; "": in none."""
    found = [""] if claims else []
    for before, claim in pairwise(claims):
        rows = differences([[before], [claim]])
        found.append("; ".join(f"{name}: {was} -> {now}" for name, was, now in rows))
    return found


def differences(claims: Sequence[Sequence[TrainerStarted]]) -> list[list[str]]:
    """Fields, files and versions in which the newest claims of runs differ, a column each."""
    found = [_fields(of_one) for of_one in claims]
    names = sorted({name for fields in found for name in fields})
    rows = [[name, *(str(fields.get(name, "-")) for fields in found)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def _fields(claims: Sequence[TrainerStarted]) -> dict[str, object]:
    if not claims:
        return {}
    hashes = {f"SHA-256 of {name}": digest[:12] for name, digest in claims[-1].hashes.items()}
    versions = {f"trainer's {name}": version for name, version in claims[-1].versions.items()}
    return computed_with(claims[-1].config) | hashes | versions


SUMMARY = ("steps", "held_out", "reward", "samples", "time")


def summary(name: str, state: ViewState) -> list[str]:
    """A row of a comparison."""
    found = of_run(state)
    return [name, *(found[key].value for key in SUMMARY)]
