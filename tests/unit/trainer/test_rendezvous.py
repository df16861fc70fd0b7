"""Folders in which ranks meet: none outlives its trainer for longer than to the next start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rlstreams.workers.trainer.parallel.rendezvous import RendezvousFolder

TRAINER = """
import signal, sys
from pathlib import Path
from rlstreams.workers.trainer.parallel.rendezvous import RendezvousFolder
rendezvous = RendezvousFolder(Path(sys.argv[1]))
print(rendezvous.folder, flush=True)
signal.pause()
"""


def killed_trainer(place: Path) -> Path:
    """A folder whose process was killed before it could remove it."""
    command = [sys.executable, "-c", TRAINER, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        process.kill()
    return folder


def test_what_a_killed_trainer_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    """What a living one holds stays, and so does what is not known to be dead."""
    (tmp_path / "rlstreams-ranks-unlocked").mkdir()
    (tmp_path / "other").mkdir()
    left, living = killed_trainer(tmp_path), RendezvousFolder(tmp_path)
    assert left.parent == tmp_path
    assert not left.exists(), "the living one began after it"
    left = killed_trainer(tmp_path)
    assert left.is_dir()
    mine = RendezvousFolder(tmp_path)
    assert not left.exists()
    assert living.folder.is_dir()
    for one in (living, mine):
        one.close()
        one.close()
    assert ["other", "rlstreams-ranks-unlocked"] == sorted(path.name for path in tmp_path.iterdir())


def test_no_two_meetings_have_a_file_in_common(tmp_path: Path) -> None:
    """Ranks that meet again must not find the file of the last time."""
    one, other = RendezvousFolder(tmp_path), RendezvousFolder(tmp_path)
    assert 4 == len({m.new_file() for m in (one, other) for _ in range(2)})
    assert 0o700 == one.folder.stat().st_mode & 0o777
    one.close()
    other.close()
