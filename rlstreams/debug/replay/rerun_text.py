"""Output of a re-run step: lines for the terminal, a JSON object, a plot of a change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlstreams.debug.rerun.findings import Finding
    from rlstreams.debug.rerun.rerun import Change, Rerun

_INK, _MUTED, _GRID = "#24292f", "#8c959f", "#e4e7eb"
_WAS, _NOW = "#afb8c1", "#0969da"
_TIMES = frozenset({"train_s"})
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
        if name not in _TIMES
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


def as_json(found: Rerun) -> dict[str, Any]:
    """The same for programs."""
    change = found.change
    return {
        "step": found.step,
        "started_from": found.started_from,
        "num_redone": found.num_redone,
        "is_equal": found.is_equal,
        "environment": found.environment,
        "findings": [
            {
                "name": f.name,
                "recorded": f.recorded,
                "again": f.again,
                "is_equal": f.is_equal,
                "place": "" if f.is_equal else f.place,
            }
            for f in found.findings
        ],
        "metrics": found.again.metrics | {"loss": found.again.loss},
        "change": None
        if change is None
        else {
            "label": LABEL,
            "settings": change.settings,
            "metrics": change.metrics | {"loss": change.loss},
            "weight_hash": change.weight_hash,
            "update_norm": change.update_norm,
            "cosine": change.cosine,
        },
    }


def save_plot(found: Rerun, path: Path) -> None:
    """Norm of the update by parameter, as it was and changed; 1280 pixels wide."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    change = found.change
    assert change is not None
    shares = _largest(change)
    figure = Figure(figsize=(8.0, 1.6 + 0.34 * len(shares)), dpi=160, facecolor="white",
                    layout="constrained")  # fmt: skip
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = range(len(shares))
    axes.barh([p - 0.19 for p in places], [was for _, was, _ in shares], 0.36, color=_WAS,
              label="as it was")  # fmt: skip
    axes.barh([p + 0.19 for p in places], [now for _, _, now in shares], 0.36, color=_NOW,
              label="changed")  # fmt: skip
    axes.set_yticks(list(places), [name for name, _, _ in shares], fontsize=8, color=_INK)
    axes.invert_yaxis()
    axes.set_xlabel("norm of the update", fontsize=9, color=_INK)
    axes.tick_params(colors=_MUTED, labelcolor=_INK, labelsize=8, length=0)
    axes.grid(axis="x", color=_GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    title = f"Step {found.step}: {'; '.join(change.settings) or 'nothing changed'}\n{LABEL}"
    axes.set_title(title, loc="left", fontsize=9, color=_INK, pad=10)
    axes.legend(loc="lower right", fontsize=8, labelcolor=_INK, edgecolor="none")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _largest(change: Change, limit: int = 12) -> Sequence[tuple[str, float, float]]:
    """The parameters that moved most either way."""
    rows = [(name, was, now) for name, (was, now) in change.by_parameter.items()]
    return sorted(rows, key=lambda row: -max(row[1], row[2]))[:limit]


def _short(text: str) -> str:
    if len(text) == 64 and not text.startswith("("):
        return text[:12]
    return text if len(text) <= 22 else f"{text[:19]}..."
