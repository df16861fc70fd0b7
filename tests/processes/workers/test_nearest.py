"""A name that there is not is answered with the one that was probably meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.__main__ import main
from rlstreams.check.doctor.model import read_model
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.nearest import meant_path

EXAMPLES = Path(__file__).parents[3] / "infra/examples"


def test_the_nearest_path(tmp_path: Path) -> None:
    """Beside the file, or beside the first folder on the way that there is not."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").touch()
    right = f"; did you mean '{tmp_path / 'data/train.jsonl'}'?"
    assert right == meant_path(tmp_path / "data/trian.jsonl")
    assert "" == meant_path(tmp_path / "data/other.txt")
    assert f"; did you mean '{tmp_path / 'data'}'?" == meant_path(tmp_path / "dta/train.jsonl")
    missing = tmp_path / "elsewhere"
    assert f"; there is no '{missing}' either" == meant_path(missing / "below" / "x.jsonl")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("demo/modle", "there is no folder '.*demo/modle'; did you mean '.*demo/model'"),
        ("demo", "no config.json; did you mean '.*demo/model'"),
        ("demo/model/config.json", "config.json' is a file; name the folder that it is in"),
    ],
)
def test_a_model_folder_that_is_not_there(path: str, told: str) -> None:
    """What was probably meant is beside it, below it, or above it."""
    with pytest.raises(ConfigError, match=f"model.path: .*{told}"):
        read_model(str(EXAMPLES / path))


def test_a_model_in_the_home_of_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 78 == main(["init", str(tmp_path / "new"), "--model", "~no-such-user/model"])
    assert "--model: there is no folder" in capsys.readouterr().err
