"""`rlstreams inspect` on a recording: no broker, every form of output, refusals in one line."""

from __future__ import annotations

import json
import re

import pytest

from rlstreams.__main__ import main
from tests.unit.inspect import told_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(told_run.recorded(tmp_path_factory.mktemp("told") / "told", told_run.memory_bus()))


def test_the_column_after_adds_up(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """From the start of one stage of the sample to that of the next."""
    assert 0 == main(["inspect", "1/0", folder])
    found = re.findall(r":(\d\d\.\d{3})  (?:\+([\d.]+) s)?.*(?:issued|sampled|scored|step 2) ",
                       capsys.readouterr().out)  # fmt: skip
    assert 4 == len(found)
    gaps = [float(gap) for _, gap in found[1:]]
    assert float(found[-1][0]) - float(found[0][0]) == pytest.approx(sum(gaps))


def test_records_that_cannot_be_read_are_counted(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each time they are met: in the ranking, and with the group of what is shown."""
    assert 0 == main(["inspect", folder, "--worst", "duration"])
    assert f"{folder}: records that could not be decoded: 2\n" == capsys.readouterr().err


def test_a_group_is_a_list(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Or all of each; what a screen says lies in `tests/golden/screens`."""
    assert 0 == main(["inspect", "0", folder, "--full"])
    assert 2 == capsys.readouterr().out.count("lineage")


def test_what_is_not_there_is_named(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1, also where others were found."""
    assert 1 == main(["inspect", "77/0", "1/0", folder])
    assert f" has no 77/0; `rlstreams inspect {folder}` lists some\n" in capsys.readouterr().err
    assert 1 == main(["inspect", "77", folder])
    said = capsys.readouterr().err
    assert f" has no 77; `rlstreams inspect {folder}` lists some\n" in said
    assert "matches" not in said, "it is said once"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["inspect", "1/0"], "no CONFIG is named and there is no run.toml"),
        (["inspect", "nowhere"], "nowhere"),
        (["inspect", "1-0", "FOLDER"], "1-0: a sample is written 1/0"),
        (["inspect", "1/0", "FOLDER", "--worst", "reward"], "name samples, or rank them"),
        (["inspect", "FOLDER", "--run.id", "x"], "a recording has its own configuration"),
        (["inspect", "FOLDER", "--step", "9"], "it has steps 1 to 2"),
        (["inspect", "FOLDER", "--tokenizer", "nowhere"], "--tokenizer: nowhere"),
    ],
)
def test_refusals(
    folder: str, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr, exit 78."""
    assert 78 == main([folder if word == "FOLDER" else word for word in words])
    captured = capsys.readouterr()
    assert "" == captured.out
    assert expected in captured.err
    assert 1 == len(captured.err.splitlines())


def test_the_newest_records_of_a_topic(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By time, a line each, with key, position and event; what is no event says why."""
    assert 0 == main(["broker", "tail", "steps", folder, "--last", "2", "--follow"])
    older, newer = capsys.readouterr().out.splitlines()
    assert "  steps[0]@4  key=run  TrainerStarted  run=run  epoch=2  " in older
    assert "  steps[0]@5  key=run  StepCompleted  " in newer
    assert "samples=[1]" in newer
    assert 0 == main(["broker", "tail", "trajectories", folder, "--last", "50", "--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {0, 1} == {row["partition"] for row in rows}
    assert sorted(row["at_ms"] for row in rows) == [row["at_ms"] for row in rows]
    segments = [row["fields"]["segments"] for row in rows if row["event"] == "Trajectory"]
    assert told_run.TOKENS == len(segments[0][1]["behavior_logprobs"])
    assert {"Trajectory", None} == {row["event"] for row in rows}
    assert 1 == sum("fingerprint" in row.get("problem", "") for row in rows)
    assert 78 == main(["broker", "tail", "stepz", folder])
    assert "there is no topic 'stepz'; did you mean 'steps'?" in capsys.readouterr().err


def test_a_dead_letter_comes_with_its_record(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Decoded as far as it can be."""
    assert 0 == main(["broker", "tail", "dead-letters", folder, "--last", "1", "--json"])
    (row,) = capsys.readouterr().out.splitlines()
    fields = json.loads(row)["fields"]
    assert ("reward", "verifier raised ValueError") == (fields["reason"], fields["detail"])
    assert "record of 2 bytes starts with 'c301'" in fields["value"]["problem"]
