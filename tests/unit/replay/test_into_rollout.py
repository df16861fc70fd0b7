"""Which samples of a recording are fed to the rollout role, and why the others are not."""

from __future__ import annotations

from pathlib import Path

from rlstreams.debug.replay.into_role import RoleReplay, fed_by_version
from rlstreams.streams.recording import Recording
from rlstreams.streams.recording.selection import Selection
from tests import factories
from tests.unit.recording.recordings import raw_of, record


def test_what_cannot_be_sampled_again_is_skipped_and_counted(tmp_path: Path) -> None:
    """A later attempt draws other numbers; the first record of a sample decides, whatever it is."""
    prompt, of_two, of_three = (
        factories.prompt_segment(),
        factories.policy_segment(version=2),
        factories.policy_segment(version=3),
    )
    told = [
        factories.trajectory(group_id="0"),
        factories.trajectory(group_id="1", attempt=1),
        factories.trajectory(group_id="1", attempt=0),  # not the first of its sample
        factories.trajectory(group_id="2", attempt=2, segments=(prompt, of_three)),
        factories.trajectory(group_id="3", segments=(prompt, of_two, of_three)),
        factories.trajectory(group_id="4", segments=(prompt, of_three)),
    ]
    record(tmp_path / "r", (raw_of(event, number) for number, event in enumerate(told)))
    made = RoleReplay(role="rollout")
    with Recording(tmp_path / "r") as recording:
        fed = fed_by_version(recording, Selection(), {2}, made)
        assert {2: ["0"]} == {v: [f.sample[0] for f in found] for v, found in fed.items()}
    assert {
        "sampled in a later attempt": 2,
        "sampled while the weights changed": 1,
        "sampled by a version whose weights are not at hand": 1,
    } == made.skipped
