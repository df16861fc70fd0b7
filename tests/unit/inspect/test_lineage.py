"""The lineage of a sample: every fate, in any order of topics, first records only."""

from __future__ import annotations

import io
import random

import pytest
from rich.console import Console

from rlstreams.debug.inspect.terminal import table
from rlstreams.schemas.events import PolicyLoaded, Prompt, ScoredTrajectory, StepCompleted
from rlstreams.streams.lineage.fold import Lineage, LineageFold, _trained
from rlstreams.streams.log.group_ids import SampleId, is_group
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import TOPICS
from rlstreams.streams.samples.life import Outcome
from rlstreams.words.sample_detail import sample_detail, stages, staleness
from rlstreams.words.spelling import NUMBERS
from tests.factories import sample_ref, step_completed
from tests.unit.inspect import told_run

FATES = {
    "0/0": Outcome.TRAINED,
    "0/1": Outcome.TRAINED,
    "1/0": Outcome.TRAINED,
    "1/1": Outcome.ABSENT,
    "2/0": Outcome.DROPPED,
    "3/0": Outcome.ISSUED,
    "4/0": Outcome.DEAD,
    "4/1": Outcome.SCORED,  # the step that names it is of a trainer that was dethroned
    "e1-7/0": Outcome.EVALUATED,
    "99/0": Outcome.UNKNOWN,
}


def lineage_of(sample: str) -> Lineage:
    (found,) = told_run.bus_log().samples(sample)
    return found


@pytest.mark.parametrize(("sample", "expected"), FATES.items())
def test_every_fate_is_told(sample: str, expected: Outcome) -> None:
    assert expected == lineage_of(sample).outcome


def test_a_trained_sample_leads_from_its_prompt_to_who_uses_the_result() -> None:
    """Prompt, trajectory, scores, step and place in it, weights before and after, their users."""
    found = lineage_of("1/0")
    assert found.prompt is not None
    assert found.scored is not None
    assert found.trained is not None
    trained = found.trained
    assert (2, 0, 0) == (trained.step.step, trained.index, trained.micro_batch)
    assert {1: 1, 2: 0} == staleness(found)
    assert [0, 1, 2] == sorted(found.published)
    expected = ["logprob-0/0", "logprob-0/1", "rollout-0/0", "rollout-0/1"]
    assert expected == sorted(found.loads)
    assert {"rollout-0", "logprob-0"} == {load.worker for load in found.used_by}
    assert {2} == {load.policy_version for load in found.used_by}


def test_a_sample_of_several_rows_is_found_by_its_first() -> None:
    """`order` and `micro_batches` count rows."""
    refs = (sample_ref("7", 0), sample_ref("7", 1))
    step = step_completed(samples=refs, rows=(2, 1), order=(2, 0, 1), micro_batches=(1, 2))
    at = Position("steps", 0, 5)
    assert [_trained(step, at, ref, n).micro_batch for n, ref in enumerate(refs)] == [1, 0]


def test_later_records_of_a_sample_are_copies() -> None:
    """The first by offset counts; of a later one only the place is told."""
    found = lineage_of("1/0")
    assert 3 == len(found.trajectory.event.segments)
    assert ["trajectories"] == [position.topic for position in found.copies]


def test_a_dropped_group_names_its_successor() -> None:
    """The prompt that replaces it lies under another group's id."""
    assert "3" == lineage_of("2/0").replaced_by
    assert "stale; issued again as group 3" in stages(lineage_of("2/0"))[-1].detail


def test_all_samples_of_a_group() -> None:
    """However many there are; also one that only a step or a letter knows."""
    found = told_run.bus_log().samples("1", "4")
    fates = ("1/0 trained", "1/1 left out", "4/0 dead-lettered", "4/1 scored")
    assert list(fates) == sorted(f"{one.sample} {one.outcome}" for one in found)


def test_a_list_says_what_became_of_a_sample_and_where_or_why() -> None:
    """On a narrow terminal too; as the page's rows do, of which this is the column's text."""
    found = {name: lineage_of(name).after for name in ("1/0", "1/1", "2/0", "4/0", "4/1")}
    expected = {
        "1/0": "step 2", "1/1": "left out: reward", "2/0": "dropped: stale",
        "4/0": f"dead-lettered: {lineage_of('4/0').letters[0].event.reason}", "4/1": "scored",
    }  # fmt: skip
    assert expected == found
    details = [sample_detail(lineage_of(name), NUMBERS) for name in found]
    for width in (100, 180):
        console = Console(file=io.StringIO(), width=width, color_system=None)
        console.print(table(details, "all", width))
        drawn = console.file.getvalue()  # type: ignore[attr-defined]
        assert all(word in drawn for word in ("outcome", "step 2", "dropped:", "dead-lettered:"))


def test_topics_may_come_in_any_order() -> None:
    log = told_run.bus_log()
    by_topic = [list(log.read_topic(topic, skip_unreadable=True)) for topic in TOPICS[:-1]]
    told = set()
    for seed in range(5):
        random.Random(seed).shuffle(by_topic)
        fold = LineageFold([], ["0", "1", "2", "4"])
        for records in by_topic:
            for record in records:
                fold.apply(record)
        told.add(frozenset(f"{one.sample} {one.outcome} {one.loads}" for one in fold.lineages()))
    assert 1 == len(told)


def test_the_fold_keeps_nothing_of_others() -> None:
    fold = LineageFold([SampleId("0", 1)])
    for kind in (Prompt, StepCompleted, PolicyLoaded):
        for record in told_run.bus_log().read(kind):
            fold.apply(record)
    assert ["0/1"] == [str(one.sample) for one in fold.lineages()]


def test_what_the_log_no_longer_has_is_named() -> None:
    """Removed by retention, or not recorded: the scores alone still tell most of it."""
    kept = [e for e in told_run.events() if isinstance(e, ScoredTrajectory | StepCompleted)]
    (found,) = told_run.bus_log(kept).samples("0/0")
    assert "trained" == found.outcome
    expected = (
        *("its prompt", "its trajectory", "load logprob-0/0", "load rollout-0/0"),
        *("the announcement of version 0", "the announcement of version 1"),
    )
    assert expected == found.missing
    assert () == lineage_of("0/0").missing


def test_hops_are_in_the_order_of_time() -> None:
    """Each names who, what and where; weights are told apart from the sample's own way."""
    told = stages(lineage_of("0/0"))
    own = [(stage.role, stage.what) for stage in told if stage.is_own]
    expected = [
        ("prompts", "issued"),
        ("rollout", "sampled"),
        ("logprob", "scored"),
        ("trainer", "step 1"),
    ]
    assert expected == own
    assert sorted(stage.at_ms for stage in told) == [stage.at_ms for stage in told]
    sampled = next(stage for stage in told if stage.what == "sampled")
    assert 250 == sampled.until_ms - sampled.at_ms
    assert "3 tokens, version 0; stop; reward 1" in sampled.detail
    assert str(sampled.position).startswith("trajectories[")


@pytest.mark.parametrize("text", ["12", "12/", "/3", "e1/2", "-1/0", "12/3/0", ""])
def test_a_sample_that_is_written_wrongly_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="GROUP/SAMPLE, as 12/3"):
        SampleId.parse(text)


def test_names_of_groups() -> None:
    """Numbers, and evaluations by version and row."""
    assert [True, True, False, False] == [is_group(t) for t in ("7", "e0-3", "7/1", "runs/demo")]
