"""What else the page says of a sample: segments, group, prompt, rollout and step, experts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape

import numpy as np

from rlstreams.debug.inspect.sample_detail import SampleDetail
from rlstreams.show.report.svg import number

_MAX_CELLS = 8_192  # layers x experts of a map


def segments_table(detail: SampleDetail) -> str:
    """One row for each segment: who wrote it, under which weights, who rescored it how."""
    rollout = detail.lineage.rollout
    if rollout is None:
        return ""
    scored = detail.lineage.scored
    scores = {score.segment: score for score in scored.event.scores} if scored else {}
    trained = detail.lineage.trained
    rows = []
    turn = 1
    for n, segment in enumerate(rollout.segments):
        turn += segment.author == "environment"
        score = scores.get(n)
        is_policy = segment.author == "policy"
        masked = "" if trained is None or n not in trained.masked else ", masked"
        stale = str(trained.base_version - segment.policy_version) if trained and is_policy else ""
        cells = (
            f'<td class="num">{n}</td><td>{escape(segment.author)}</td>'
            f'<td class="num">{turn if is_policy else ""}</td>'
            f'<td class="num">{len(segment.token_ids)}</td>'
            f'<td class="num">{segment.policy_version if is_policy else ""}</td>'
            f'<td class="hash"><code>{escape(segment.weight_hash[:8])}</code></td>'
            f"<td>{escape(segment.finish_reason)}</td>"
            f"<td>{f'{score.policy_version} ({escape(score.anchor)})' if score else ''}</td>"
            f"<td>{stale}{masked}</td>"
        )
        rows.append(f"<tr>{cells}</tr>")
    return (
        '<h3>Segments</h3><div class="wide"><table><tr><th class=num></th><th>author</th>'
        "<th class=num>turn</th>"
        "<th class=num>tokens</th><th class=num>version</th><th>weights</th><th>ended by</th>"
        "<th>scored under</th><th>staleness</th>"
        f"</tr>{''.join(rows)}</table></div>"
    )


def group_table(detail: SampleDetail) -> str:
    """The samples of its group that the step trained on: what its advantage compares with."""
    trained = detail.lineage.trained
    if trained is None:
        return ""
    own = detail.lineage.sample.sample
    rows = "".join(
        f"<tr{' class=self' if ref.sample == own else ''}><td>{escape(ref.group_id)}/{ref.sample}"
        f'</td><td class="num">{ref.num_tokens}</td><td class="num">{ref.reward:g}</td>'
        f'<td class="num">{ref.advantage:+.3f}</td>'
        f'<td class="num">{trained.base_version - ref.oldest_policy_version}</td></tr>'
        for ref in trained.step.samples
    )
    rows += "".join(
        f"<tr><td>{escape(absent.group_id)}/{absent.sample}</td>"
        f'<td colspan="4">left out: {escape(absent.reason)}</td></tr>'
        for absent in trained.step.absent
    )
    return (
        "<h3>Its group in the step</h3><table><tr><th>sample</th><th class=num>tokens</th>"
        "<th class=num>reward</th><th class=num>advantage</th><th class=num>staleness</th></tr>"
        f"{rows}</table>"
    )


def facts(detail: SampleDetail) -> str:
    """Prompt, rollout and step, as far as they were recorded."""
    told = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
        for name, value in _facts(detail)
        if value
    )
    return f"<h3>Facts</h3><table class=facts>{told}</table>" if told else ""


def _facts(detail: SampleDetail) -> Iterator[tuple[str, str]]:
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
        if sampled:
            last = sampled[-1]
            yield (
                "sampling",
                f"temperature {last.temperature:g}, top_p {last.top_p:g}, top_k {last.top_k}",
            )
    if lineage.trained is not None:
        step = lineage.trained.step
        yield "loss of the step", number(step.loss)
        yield "of the step", _numbers(step.metrics)
        yield "batch", f"{step.batch_hash[:16]}, from weights {step.previous_hash[:12]}"


def _numbers(values: Mapping[str, float]) -> str:
    return json.dumps({name: float(f"{v:.4g}") for name, v in values.items()})[1:-1].replace(
        '"', ""
    )


def experts_map(detail: SampleDetail) -> str:
    """Share of the tokens that each expert of each layer took; a row is a layer."""
    if detail.tokens is None or detail.tokens.experts is None:
        return ""
    routed = detail.tokens.experts.numpy()
    if routed.ndim != 3 or not routed.size:
        return ""
    num_layers, num_experts = routed.shape[1], int(routed.max()) + 1
    if num_layers * num_experts > _MAX_CELLS:
        return ""
    side = min(26.0, 460 / num_experts, 320 / num_layers)
    cells = []
    for layer in range(num_layers):
        counts = np.bincount(routed[:, layer].reshape(-1), minlength=num_experts)
        for expert in np.flatnonzero(counts):
            share = counts[expert] / routed.shape[0]
            cells.append(
                f'<rect class="cell" x="{expert * side:.1f}" y="{layer * side:.1f}" '
                f'width="{side - 1:.1f}" height="{side - 1:.1f}" opacity="{share:.2f}"><title>'
                f"layer {layer}, expert {expert}: {share:.0%} of the tokens</title></rect>"
            )
    width, height = num_experts * side, num_layers * side
    return (
        f"<h3>Experts</h3><p class=muted>{num_layers} layers, {routed.shape[2]} of {num_experts} "
        "experts a token: a row is a layer, a column an expert, dark where more tokens went.</p>"
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px" role="img" '
        f'aria-label="experts by layer">{"".join(cells)}</svg>'
    )
