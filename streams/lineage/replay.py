"""A run in Python: typed records of a live run, of one that has ended, or of a recording.

    from rlstreams.schemas import ScoredTrajectory
    from rlstreams.streams.lineage.replay import open_log

    with open_log("runs/demo") as log:
        for record in log.read(ScoredTrajectory):
            print(record.position, record.event.trajectory.reward)

Reading changes nothing: it commits no offset and joins no group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlstreams.streams.lineage.fold import Lineage, Outcome, SampleId
from rlstreams.streams.lineage.hops import Hop, hops, staleness
from rlstreams.streams.lineage.read import read_lineages
from rlstreams.streams.lineage.tokens import TokenTable, token_table
from rlstreams.streams.run.recorded_log import RecordedLog, is_recording
from rlstreams.streams.run.run_folder import RunFolder
from rlstreams.streams.run.run_log import BusLog, RunLog


@contextmanager
def open_log(where: Path | str) -> Iterator[RunLog]:
    """The log that lies in a folder: of a run, whose broker is started if it has stopped, or a
    recording.

    A run without a folder here: `BusLog(KafkaBus("host:9092", "run"), "run")`.

    Raises:
        ConfigError: neither a run's folder nor a recording.
        RecordingError: a recording that cannot be read.
        BrokerError: the run's broker cannot be reached or started.
    """
    if is_recording(where):
        with RecordedLog(where) as recorded:
            yield recorded
        return
    folder = RunFolder.load(where)
    with folder.bus() as bus, BusLog(bus, folder.run) as log:
        yield log


def lineage(log: RunLog, sample: SampleId | str) -> Lineage:
    """The whole lineage of one sample, `12/3` for example: from its prompt to the version it helped
    make.

    Raises:
        ValueError: a text that is no sample's id.
        DeadlineError: a partition did not deliver up to its end.
    """
    wanted = SampleId.parse(sample) if isinstance(sample, str) else sample
    (found,) = read_lineages(log, [wanted])
    return found


__all__ = [
    "BusLog",
    "Hop",
    "Lineage",
    "Outcome",
    "RecordedLog",
    "RunFolder",
    "RunLog",
    "SampleId",
    "TokenTable",
    "hops",
    "lineage",
    "open_log",
    "read_lineages",
    "staleness",
    "token_table",
]
