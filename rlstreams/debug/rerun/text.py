"""A re-run step as lines for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlstreams.streams.views.pace import MEASURED

if TYPE_CHECKING:
    from rlstreams.debug.rerun.findings import Finding
    from rlstreams.debug.rerun.rerun import Change, Rerun

LABEL = "offline experiment on recorded data: true for the gradient of this step alone"


def lines(found: Rerun) -> list[str]:
    """For the terminal."""
    between = f", {found.num_redone} steps redone on the way" if found.num_redone else ""
    head = [
        f"step {found.step}, from {found.started_from}{between}",
        f"{len(found.recorded.samples)} samples in {len(found.recorded.micro_batches)} "
        f"micro-batches, from version {found.recorded.policy_version - 1} to "
        f"{found.recorded.policy_version}",
        "",
        f"{'':<15} {'recorded':<22} {'again':<22}",
    ]
    body = [line for finding in found.findings for line in _finding(finding)]
    verdict = (
        "every one is equal, bit for bit"
        if found.is_equal
        else "NOT equal; " + (f"since it was recorded {found.environment}" if found.environment else
                              "of what the claim records, nothing differs")
    )  # fmt: skip
    tail = ["", verdict]
    return [*head, *body, *tail, *(_change(found, found.change) if found.change else [])]


def _finding(finding: Finding) -> list[str]:
    verdict = "equal" if finding.is_equal else "DIFFERS"
    line = (
        f"{finding.name:<15} {_short(finding.recorded):<22} {_short(finding.again):<22} {verdict}"
    )
    if finding.is_equal or not finding.place:
        return [line]
    return [line, f"{'':<15} first: {finding.place}"]


def _change(found: Rerun, change: Change) -> list[str]:
    rows = [("loss", found.again.loss, change.loss)]
    rows += [
        (name, value, change.metrics.get(name, float("nan")))
        for name, value in found.again.metrics.items()
        if name not in MEASURED
    ]
    rows.append(("norm of the update", found.update_norm, change.update_norm))
    return [
        "",
        f"CHANGED: {'; '.join(change.settings) or 'nothing'}",
        LABEL,
        f"{'':<20} {'as it was':>14} {'changed':>14} {'difference':>14}",
        *(
            f"{name:<20} {was:>14.6g} {now:>14.6g} {now - was:>+14.3g}"
            + ("" if was == now else "  *")
            for name, was, now in rows
        ),
        f"weights {found.again.weight_hash[:12]} as it was, {change.weight_hash[:12]} changed; "
        f"cosine between the two updates {change.cosine:.6f}",
        *(
            ["the same weights, bit for bit: in this step the change makes no difference"]
            if found.again.weight_hash == change.weight_hash
            else []
        ),
    ]


def _short(text: str) -> str:
    if len(text) == 64 and not text.startswith("("):
        return text[:12]
    return text if len(text) <= 22 else f"{text[:19]}..."
