"""A name that there is not is answered with the one that was probably meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.start.doctor.model import read_model
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.load import load
from rlstreams.workers.config.nearest import meant, meant_path
from rlstreams.workers.rollout.verifiers import make_verifier

EXAMPLES = Path(__file__).parents[3] / "infra/examples"


def test_the_nearest_name() -> None:
    """Or nothing, if none is like it."""
    assert "; did you mean 'numeric'?" == meant("numerc", ["exact", "numeric"])
    assert "" == meant("zebra", ["exact", "numeric"])


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


@pytest.mark.parametrize(
    ("verifier", "told"),
    [
        ("{0}/rewards.py:Helper2", r"no function 'Helper2' \(it has: my_reward\)"),
        ("{0}/reward.py:my_reward", r"there is no file .*/reward.py; did you mean '.*/rewards.py"),
        ("{0}/rewards.py", r"got '.*/rewards.py'; name its function too"),
        ("no_such_module:f", r"reward.verifier: there is no module 'no_such_module' in .* nor amo"),
        ("json.nope:f", r"reward.verifier: there is no module 'json.nope' in"),
        ("numerc", "got 'numerc'; did you mean 'numeric'"),
    ],
)
def test_a_verifier_that_is_not_there(tmp_path: Path, verifier: str, told: str) -> None:
    """What was looked for, where, and the nearest name."""
    (tmp_path / "rewards.py").write_text(
        "def my_reward(prompt, completion, answer, metadata): return 1.0\nclass Helper: pass\n"
    )
    config = load([EXAMPLES / "demo.toml"], [f"--reward.verifier={verifier.format(tmp_path)}"])
    with pytest.raises(ConfigError, match=told):
        make_verifier(config.reward)
