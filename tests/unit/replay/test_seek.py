"""Going to other moments of a recording while it is played."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlstreams.debug.replay.filters import chosen
from rlstreams.debug.replay.keys import Keys, press
from rlstreams.debug.replay.player import REPLAY_HEADER, Pace, Player
from rlstreams.debug.replay.seek import Seeker
from rlstreams.schemas.events import StepCompleted, TrainerStarted
from rlstreams.streams.log.record import RawRecord
from rlstreams.streams.log.topics import TOPICS
from rlstreams.streams.memory.bus import MemoryBus
from rlstreams.streams.memory.log import MemoryLog
from rlstreams.streams.recording import NotRecordedError, Recording
from rlstreams.streams.recording.selection import Range, Selection
from tests import factories
from tests.unit.recording.recordings import raw_of, record

SECOND_MS = 1000


def a_run() -> Iterator[RawRecord]:
    """A claim, then six steps, one a second; step 1 ends at +1.0 s, step 6 at +6.0 s."""
    yield raw_of(factories.trainer_started(), 0, timestamp_ms=factories.NOW_MS)
    for step in range(1, 7):
        event = factories.step_completed(step, policy_version=step)
        yield raw_of(event, step, timestamp_ms=factories.NOW_MS + SECOND_MS * step)


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[Recording]:
    record(tmp_path / "r", a_run())
    with Recording(tmp_path / "r") as found:
        yield found


def seconds(at_ms: int) -> float:
    return (at_ms - factories.NOW_MS) / SECOND_MS


def test_moments_are_found_from_where_it_is(recording: Recording) -> None:
    """Seconds on and back from here stop at the ends; steps, versions and times are places."""
    seeker = Seeker(recording, Selection())
    here_ms = factories.NOW_MS + 3500
    words = ["+1", "-1.5", "-100", "+100", "step:2", "version:5", "1795000002000"]
    assert [4.5, 2.0, 0.0, 6.0, 1.0, 5.0, 2.0] == [seconds(seeker.to(w, here_ms)) for w in words]
    assert [2.0, 3.0, 4.0] == [seconds(seeker.step(change, here_ms)) for change in (-1, 0, 1)]


def test_a_moment_outside_names_what_is_there(recording: Recording) -> None:
    """Of steps their numbers, of times from when to when; also of the part that is played."""
    seeker = Seeker(recording, Selection())
    with pytest.raises(NotRecordedError, match=r"step:9 is outside .* steps 1 to 6"):
        seeker.to("step:9", 0)
    with pytest.raises(NotRecordedError, match=r"steps 1 to 6"):
        seeker.step(1, factories.NOW_MS + 6000)
    with pytest.raises(NotRecordedError, match=r"2026-11-18T.* to 2026-11-18T.* \(\+6\.0\)"):
        seeker.to("2026-01-01", 0)
    some = Range(first=factories.NOW_MS + 2000, last=factories.NOW_MS + 4000)
    part = Seeker(recording, Selection(time_ms=some))
    with pytest.raises(NotRecordedError, match=r"step:6 \(.*\) is outside of what is played, "):
        part.to("step:6", 0)


def steps_played(recording: Recording, keys: dict[int, str]) -> list[int]:
    """The steps in the fresh run, where keys were pressed after so many records."""
    log = MemoryLog()
    for topic in TOPICS:
        log.create(f"fresh.{topic.name}", 2)
    bus = MemoryBus(log, "fresh")
    pace = Pace(is_paused=True)
    seeker = Seeker(recording, Selection())
    hands = Keys(pace, seeker, lambda: player.played.at_ms)

    def pressed(_: float) -> None:
        for key in keys.pop(player.played.num_records, "n"):
            hands.press(key)

    player = Player(bus, "r", pace, seek=seeker.records, sleep=pressed)
    player.play(chosen(recording, Selection()))
    with bus.reader(bus.beginnings("steps")) as reader:
        raws = reader.poll(100, 0.0)
    assert all(REPLAY_HEADER in raw.headers for raw in raws)
    events = [recording.event(raw) for raw in raws]
    return [e.step if isinstance(e, StepCompleted) else 0 for e in events]


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({3: "gstep:5\r"}, [0, 1, 2, 4, 5, 6]),  # step 4's end is where step 5 begins
        ({2: "]]"}, [0, 1, 3, 4, 5, 6]),  # asked twice before it moved: two steps on
        ({5: "gstep:2\r"}, [0, 1, 2, 3, 4, 1, 2, 3, 4, 5, 6]),
        ({4: "g-2\r"}, [0, 1, 2, 3, 1, 2, 3, 4, 5, 6]),
        ({4: "gstep:77\r"}, [0, 1, 2, 3, 4, 5, 6]),
        ({4: "gstep:2\x1b"}, [0, 1, 2, 3, 4, 5, 6]),
        ({4: "gstep:33\x7f\x7f2\r"}, [0, 1, 2, 3, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_seeking_writes_what_follows_the_moment(
    recording: Recording, keys: dict[int, str], steps: list[int]
) -> None:
    """Forward leaves out, backward writes once more; what cannot be goes on where it was."""
    assert steps == steps_played(recording, dict(keys))


def test_claims_that_are_leapt_over_are_written(recording: Recording) -> None:
    """Nothing behind them could be understood."""
    seeker = Seeker(recording, Selection())
    raws = list(seeker.records(0, factories.NOW_MS + 5000))
    events = [recording.event(raw) for raw in raws]
    assert [TrainerStarted, StepCompleted, StepCompleted] == [type(event) for event in events]


def test_the_screen_says_what_is_typed_and_why_not(recording: Recording) -> None:
    """The typed moment, then the range that is there; the next key clears it."""
    keys = Keys(Pace(), Seeker(recording, Selection()), lambda: factories.NOW_MS)
    for key in "gstep:8":
        keys.press(key)
    assert "go to: step:8" == keys.said
    keys.press("\n")
    assert "step:8 is outside the recording: it holds steps 1 to 6" == keys.said
    keys.press(" ")
    assert "" == keys.said


def test_other_keys_keep_their_meaning() -> None:
    """Faster from as fast as possible stays so; slower comes back to the recorded speed."""
    pace = Pace(speed=float("inf"))
    press(pace, "-")
    assert 1.0 == pace.speed
