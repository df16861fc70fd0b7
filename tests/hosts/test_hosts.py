"""The demo with its roles on several hosts that share the log and weight links, nothing else."""

from __future__ import annotations

import pytest

from tests.containers import UnavailableError, kafka_image, wait_until
from tests.hosts.run import PROGRESS_S, configuration, running


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


@pytest.mark.slow
def test_a_host_with_another_configuration_is_refused_and_the_run_goes_on(image: str) -> None:
    """Its worker ends for good, naming the field and both hosts; the other one does its work."""
    ours = configuration(steps=100_000)
    cooler = ours.replace(b"workers = 2", b"workers = 2\ntemperature = 0.7")
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
