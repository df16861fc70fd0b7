"""A receipt says of each span what made it and how that is known; what does not fit is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.__main__ import main
from rlstreams.schemas.events import Event, PolicyLoaded, StepCompleted, TrainerStarted, Trajectory
from rlstreams.streams.lineage.receipt import VERIFIED, Receipt, receipt
from tests import factories as f
from tests.unit.inspect.told_run import bus_log, events, memory_bus, recorded

OTHER = "0d" * 32
JUDGED = {"reward": {"verifier": "exact"}, "trainer": {"steps": 3}}


def told() -> list[Event]:
    """Each version has a hash of its own; the first claim names settings; step 2 was redone."""
    redone = f.steps_redone(epoch=2, first_step=2, last_step=2, num_equal=1)
    return [*map(with_hash, events()), redone]


def hash_of(version: int) -> str:
    return f"{version:02d}" * 32


def with_hash(event: Event) -> Event:
    match event:
        case TrainerStarted(epoch=epoch):
            is_first = epoch == 1
            return replace(
                event, config=json.dumps(JUDGED if is_first else {}),
                hashes={"reward.py": "ab" * 32}, weight_hash=hash_of(0 if is_first else 2),
                started_at_ms=f.NOW_MS + (0 if is_first else 9000),
                policy_version=0 if is_first else 2,
            )  # fmt: skip
        case StepCompleted():
            return replace(event, weight_hash=hash_of(event.policy_version))
        case PolicyLoaded():
            own = hash_of(event.policy_version)
            return replace(event, weight_hash=own, verified="weight_hash")
        case Trajectory():
            segments = tuple(
                replace(s, weight_hash=hash_of(s.policy_version)) if s.author == "policy" else s
                for s in event.segments
            )
            return replace(event, segments=segments, judged_by="cafe")
    return event


def receipt_of(name: str, wanted: list[Event]) -> Receipt:
    (lineage,) = bus_log(wanted).samples(name)
    return receipt(lineage)


def test_each_span_has_its_weights_their_load_and_who_made_them() -> None:
    found = receipt_of("1/0", told())
    prompt, first, second = found.spans
    assert (prompt.author, prompt.first, prompt.last, prompt.load) == ("prompt", 0, 4, None)
    assert [(s.first, s.last, s.policy_version, s.staleness) for s in (first, second)] == [
        (5, 7, 0, 1), (8, 10, 1, 0),
    ]  # fmt: skip
    assert first.made is not None
    assert (first.made.step, first.made.position, first.made.weight_hash) == (0, "", "00" * 32)
    assert second.made is not None
    assert (second.made.step, second.made.position) == (1, "steps[0]@1")
    load = second.load
    assert load is not None
    assert (load.worker, load.load_id, load.weight_hash) == ("rollout-0", "rollout-0/1", "01" * 32)
    assert load.verified == VERIFIED["weight_hash"]
    score = second.score
    assert score is not None
    assert (score.worker, score.policy_version, score.anchor) == ("logprob-0", 1, "sampled")
    assert score.load is not None
    assert score.load.load_id == "logprob-0/1"
    assert score.mismatch == pytest.approx((0 + 0.125 + 0.5) / 3)
    assert (found.trained["step"], found.trained["position"]) == (2, "steps[0]@2")
    assert (found.judged_by, found.epoch) == ("cafe", 1)  # the second claim came after it
    assert found.judge == {"reward": {"verifier": "exact"}}
    assert found.code == {"reward.py": "ab" * 32}
    assert [(one["steps"], one["equal"]) for one in found.redone] == [([2, 2], 1)]
    assert found.copies == ("trajectories[1]@1",)
    assert found.is_proven
    assert receipt_of("0/0", told()).redone == ()


def test_weights_that_are_not_what_the_step_made_are_a_problem() -> None:
    """The worker loaded others under the same number: what a sampler confirms is not enough."""
    wanted = [
        replace(e, weight_hash=OTHER)
        if isinstance(e, PolicyLoaded) and e.load_id == "rollout-0/1" else e
        for e in told()
    ]  # fmt: skip
    (problem,) = receipt_of("1/0", wanted).problems
    assert problem == (
        "tokens 8 to 10: the load's hash of version 1 is 0d0d0d0d0d0d, the ledger's 010101010101"
    )


def test_what_the_log_does_not_have_is_a_problem() -> None:
    """A load that nobody wrote, and a version that no step made."""
    no_load = [e for e in told() if getattr(e, "load_id", "") != "rollout-0/0"]
    assert receipt_of("1/0", no_load).problems == (
        "tokens 5 to 7: their load rollout-0/0 is not in this log",
    )
    no_step = [e for e in told() if not (isinstance(e, StepCompleted) and e.step == 1)]
    assert "tokens 8 to 10: what made version 1 is not in this log" in (
        receipt_of("1/0", no_step).problems
    )


def test_inspect_prints_it_and_fails_if_it_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(recorded(tmp_path / "sound", memory_bus(told())))
    assert main(["inspect", "1/0", folder, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["spans"][2]["load"]["load_id"] == "rollout-0/1"
    assert main(["inspect", "1/0", folder, "--receipt"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("receipt of 1/0: every token's weights are known")
    assert "    made     by step 1 (steps[0]@1): 010101010101" in text
    assert "  redone     steps 2 to 2 by t2: 1 of 1 weight hashes equal" in text
    no_load = [e for e in told() if getattr(e, "load_id", "") != "rollout-0/0"]
    folder = str(recorded(tmp_path / "gap", memory_bus(no_load)))
    assert main(["inspect", "1/0", folder, "--receipt"]) == 1
    assert "PROBLEM  tokens 5 to 7" in capsys.readouterr().out
