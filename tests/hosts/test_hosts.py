"""The demo with its roles on several hosts that share the log and weight links, nothing else."""

from __future__ import annotations

import pytest

from tests.containers import UnavailableError, kafka_image
from tests.hosts.run import running


@pytest.fixture(scope="module")
def image() -> str:
    """Of Kafka."""
    try:
        return kafka_image()
    except UnavailableError as err:
        pytest.skip(f"no Kafka in containers: {err}")


def test_a_run_on_four_hosts_outlives_one_killed_and_one_cut_off(image: str) -> None:
    """One is killed, one is cut off: redone hashes equal, nothing is lost or trained twice."""
    with running(image, steps=12) as run:
        run.goes_on()
        run.hosts["learner"].kill()
        run.hosts["learner"].start()
        run.cut_off("mixed")
        run.goes_on()
        run.completes()
        status, said = run.ask("audit")

    assert status == 0, said
    assert "trained              1,536  in 12 steps" in said
    assert "lost                     0\ntrained twice              0" in said
    (redone,) = [line for line in said.splitlines() if "were done again" in line]
    equal, of_all = redone.rpartition(": ")[2].split(" weight")[0].split(" of ")
    assert int(equal) == int(of_all) > 0, redone
