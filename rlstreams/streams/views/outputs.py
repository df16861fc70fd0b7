"""A group's position computed from its outputs, to replace an impossible committed position.

Anybody who has the password may commit for a group, and a topic that lost its end leaves positions
behind that. The outputs in the log are the proof: a score names its trajectory and a trajectory its
prompt, by partition and offset, and a dead letter the record that it is about.
"""

from __future__ import annotations

from rlstreams.schemas import DecodeError
from rlstreams.schemas.events import DeadLetter, ScoredTrajectory, Trajectory
from rlstreams.schemas.projection import Projection
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.done_set import encode_done
from rlstreams.streams.log.read_to import read_to
from rlstreams.streams.log.record import Committed, Partition
from rlstreams.streams.log.topics import DEAD_LETTERS, PROMPTS, SCORED, TRAJECTORIES

_ORIGIN = Projection(DeadLetter, "origin_topic", "origin_partition", "origin_offset")
# By input topic: the topic of the outputs, and the fields in which they name their input record.
_OUTPUTS = {
    PROMPTS.name: (TRAJECTORIES, Projection(Trajectory, "prompt_partition", "prompt_offset")),
    TRAJECTORIES.name: (
        SCORED,
        Projection(ScoredTrajectory, "trajectory_partition", "trajectory_offset"),
    ),
}


def committed_by_outputs(bus: Bus, partition: Partition) -> Committed:
    """Return the low watermark and the done set of the group that reads a topic of samples.

    A record that an output or a dead letter names is done. A record that neither names is done
    again, even if it needed no output: the first record of a sample counts.

    Raises:
        DeadlineError: a topic stops delivering.
    """
    topic, origin = _OUTPUTS[partition.topic]
    done: set[int] = set()
    for name, wanted in ((topic.name, origin), (DEAD_LETTERS.name, _ORIGIN)):
        with bus.reader(bus.beginnings(name)) as reader:
            for raws in read_to(reader, bus.ends(name)):
                for raw in raws:
                    try:
                        *of, number, offset = wanted.read(raw.value, bus.schemas())
                    except DecodeError:
                        continue  # an unreadable record names no input
                    if number == partition.number and of in ([], [partition.topic]):
                        done.add(offset)
    begin, end = bus.beginnings(partition.topic)[partition], bus.ends(partition.topic)[partition]
    with bus.reader({partition: begin}) as reader:
        there = [
            raw.position.offset
            for raws in read_to(reader, {partition: end})
            for raw in raws
            if raw.position.offset < end
        ]
    low = min((offset for offset in there if offset not in done), default=end)
    return Committed(
        offset=low, metadata=encode_done(low, {o for o in there if o in done and o > low})
    )
