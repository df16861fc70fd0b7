"""A few samples of each evaluation as text: the best, the worst and the newest one."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from rlstreams.debug.inspect.words import NUMBERS, Spelling
from rlstreams.schemas.events import EVALUATE, Event, Trajectory
from rlstreams.streams.log.fencing import FirstRecords
from rlstreams.streams.log.group_ids import evaluation_id
from rlstreams.streams.views.evaluation import Answer, answer_of

EVERY = 10  # versions, where no held-out rows are answered
COLUMNS = ("which", "sample", "reward", "version", "finish", "prompt", "answer", "look")


class SamplePicks:
    """Folds `trajectories`: samples of each evaluation, or, without, of each tenth version.

    Args:
        spelling: how tokens become text.
        place: what commands call the run.
    """

    def __init__(self, spelling: Spelling, place: str, *, has_held_out: bool) -> None:
        self._spelling = spelling
        self._place = place
        self._has_held_out = has_held_out
        self._first = FirstRecords()
        self._kept: dict[tuple[str, int], dict[str, tuple[str, Answer, int]]] = {}
        self._shown: set[tuple[str, int]] = set()

    def apply(self, event: Event) -> None:
        """Take one event; the first record of a sample counts."""
        if not isinstance(event, Trajectory):
            return
        version = self._version(event)
        if version is None or (event.purpose, version) in self._shown:
            return
        if not self._first.admits(event):
            return
        try:
            answer = answer_of(event, version)
        except ValueError:  # a foreign writer's: nothing of it can be shown
            return
        found = (f"{event.group_id}/{event.sample}", answer, event.finished_at_ms)
        kept = self._kept.setdefault((event.purpose, version), {})
        _, best, _ = kept.setdefault("best", found)
        _, worst, _ = kept.setdefault("worst", found)
        _, _, newest_ms = kept.setdefault("newest", found)
        if answer.reward > best.reward:
            kept["best"] = found
        if answer.reward < worst.reward:
            kept["worst"] = found
        if event.finished_at_ms > newest_ms:
            kept["newest"] = found

    def _version(self, event: Trajectory) -> int | None:
        """Under which a sample is kept; None: it is not."""
        if event.purpose == EVALUATE:
            identity = evaluation_id(event.group_id)
            return identity[0] if identity else None
        versions = [s.policy_version for s in event.segments if s.author == "policy"]
        is_kept = versions and not self._has_held_out and (max(versions) + 1) % EVERY == 0
        return max(versions) if is_kept else None

    def of(self, drawn: tuple[str, int]) -> Sequence[Mapping[str, str]]:
        """Rows with `COLUMNS` of samples with this purpose and version; they are dropped then."""
        self._shown.add(drawn)
        return [
            {
                "which": which,
                "sample": name,
                "reward": f"{answer.reward:.4g}",
                "version": str(answer.policy_version),
                "finish": answer.finish_reason,
                "prompt": self._text(answer.prompt_ids),
                "answer": self._text([token for run in answer.runs for token in run.token_ids]),
                "look": shlex.join(["rlstreams", "inspect", name, self._place]),
            }
            for which, (name, answer, _) in self._kept.pop(drawn, {}).items()
        ]

    def _text(self, token_ids: Sequence[int]) -> str:
        try:
            return self._spelling.decode(token_ids)
        except (OverflowError, TypeError):
            return NUMBERS.decode(token_ids)
