"""Since when what waits longest does, topic by topic, and what the roles' deadlines make of it."""

from __future__ import annotations

import pytest

from rlstreams.schemas.events import Event
from rlstreams.show.metrics.prometheus import families, objectives
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import PROMPTS, SCORED, STEPS, TRAJECTORIES
from rlstreams.streams.views.feed import Views
from rlstreams.workers.config.load import load, resolved_json
from tests import factories

ONE_TRY = ["rollout.max_attempts=1", "rollout.sample_deadline_s=100", "deadlines.stall_s=50"]


def folded(*events: Event) -> Views:
    views = Views()
    for offset, event in enumerate(events):
        topic = STEPS if hasattr(event, "epoch") else PROMPTS
        views.apply(event, Position(topic.name, 0, offset))
    return views


def issued(sample: int, at_ms: int) -> Event:
    return factories.prompt(group_id="7", sample=sample, group_size=8, issued_at_ms=at_ms)


def sampled(sample: int, at_ms: int) -> Event:
    return factories.trajectory(group_id="7", sample=sample, group_size=8, finished_at_ms=at_ms)


def counted(number: int) -> Event:
    return factories.worker_report(
        worker="logprob-0", role="logprob", instance="l", counters={"samples": float(number)}
    )


def test_the_oldest_of_each_topic_is_told() -> None:
    """A sample leaves a topic as it comes into the next; where scores are counted alone, the
    earliest are the ones that were scored."""
    events = [issued(0, 1000), issued(1, 1000), issued(2, 2000)]
    assert folded(*events).state.oldest == {PROMPTS.name: 1000}
    events += [sampled(0, 5000), sampled(1, 4000)]
    assert folded(*events).state.oldest == {PROMPTS.name: 2000, TRAJECTORIES.name: 4000}
    events += [counted(1)]
    expected = {PROMPTS.name: 2000, TRAJECTORIES.name: 5000, SCORED.name: 4000}
    assert folded(*events).state.oldest == expected
    events += [counted(2), factories.dead_letter(group_id="7", sample=2)]
    assert folded(*events).state.oldest == {SCORED.name: 4000}


def test_what_waits_is_held_against_the_deadlines_of_the_claim() -> None:
    """By topic and by the role that reads it, in seconds; the newest claim counts."""
    config = load([], [*ONE_TRY, "trainer.group_deadline_s=300"])
    claims = [
        factories.trainer_started(epoch=1, config=resolved_json(load([], ["run.id=old"]))),
        factories.trainer_started(epoch=2, config=resolved_json(config)),
    ]
    values = {f.name: f.values for f in families(folded(*claims, issued(0, 1500)).state)}
    assert values["oldest_waiting_timestamp_seconds"] == {(PROMPTS.name,): 1.5}
    goals = values["objective_seconds"]
    assert set(goals) == {
        (PROMPTS.name, "rollout"), (TRAJECTORIES.name, "logprob"), (SCORED.name, "trainer"),
    }  # fmt: skip
    assert goals[PROMPTS.name, "rollout"] >= 200
    assert (goals[TRAJECTORIES.name, "logprob"], goals[SCORED.name, "trainer"]) == (50, 300)


@pytest.mark.parametrize("config", ["{}", '{"newer": {"field": 1}}', "no JSON"])
def test_a_claim_that_cannot_be_read_has_no_objective_of_its_own(config: str) -> None:
    """Another release's: the figures beside it are served all the same."""
    found = objectives(config)
    assert found == {} or set(found) == set(objectives(resolved_json(load([], []))))


def test_who_never_stalls_promises_nothing() -> None:
    config = resolved_json(load([], ["deadlines.stall_s=0"]))
    assert (TRAJECTORIES.name, "logprob") not in objectives(config)
