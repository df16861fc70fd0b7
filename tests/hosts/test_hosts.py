"""The demo with its roles on several hosts that share the log and weight links, nothing else."""

from __future__ import annotations

import re

import pytest

from tests.containers import UnavailableError, kafka_image, wait_until
from tests.hosts.run import FEW, PROGRESS_S, configuration, running

pytestmark = pytest.mark.slow  # containers, each with a role
STEPS = 8


@pytest.fixture(scope="module")
def image() -> str:
    """Of Kafka."""
    try:
        return kafka_image()
    except UnavailableError as err:
        pytest.skip(f"no Kafka in containers: {err}")


def test_a_run_outlives_a_host_that_is_killed_and_one_that_is_cut_off(image: str) -> None:
    """Steps done again have equal hashes, no sample is lost or trained twice."""
    with running(image, STEPS, placed=FEW) as run:
        run.goes_on(1)
        run.hosts["learner"].kill()
        run.hosts["learner"].start()
        run.cut_off("scorer")
        run.completes()
        status, said = run.ask("audit")

    assert status == 0, said
    assert f"trained {128 * STEPS:>18,}  in {STEPS} steps" in said
    assert "lost                     0\ntrained twice              0" in said
    redone = re.findall(r"(\d+) of (\d+) weight hashes equal", said)
    assert redone, said
    assert all(equal == of_all for equal, of_all in redone), said


def test_a_host_with_another_configuration_is_refused_and_the_run_goes_on(image: str) -> None:
    """Its worker ends for good, naming the field and both hosts; the other one does its work."""
    ours = configuration(steps=100_000)
    cooler = ours.replace(b"[trainer]\n", b"[rollout]\ntemperature = 0.7\n[trainer]\n")
    assert cooler != ours
    with running(image, 100_000, extra={"sampler": {"hosts.toml": cooler}}) as run:
        sampler = run.hosts["sampler"]
        wait_until(lambda: not sampler.is_running, PROGRESS_S, "the worker of `sampler` ends")
        run.goes_on()
        said = sampler.log()

    assert (
        "rollout-0 on host sampler and the trainer on host learner (epoch 1) do not run the same: "
        "rollout.temperature is 0.7 here and 1.0 there"
    ) in said
    assert "rollout ended with 78 and is not started again" in said
