"""The trainer as a process of its own on a real broker: stopped, stalled, and moved elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rlstreams.schemas.events import Event, PolicyPublished, RedoDrifted, StepCompleted, StepsRedone
from rlstreams.streams.kafka.admin import apply
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import POLICY_VERSIONS, SCORED, STEPS
from rlstreams.workers.config.load import load, resolved_json
from rlstreams.workers.loop.runtime import Exit
from rlstreams.workers.weights.file import FileWeightChannel
from tests.heavy.trainer.trainer_stand import EXAMPLE, scored

NUM_STEPS = 4
DEADLINE_S = 240.0  # for one process to do one thing
TRANSACTION_S = 1.0
CLEAN_UP_S = 1.0  # how often the broker looks for transactions that took too long


class Site:
    """A run on the broker: topics, and the samples of all its steps."""

    def __init__(self, broker: str, run_id: str, folder: Path) -> None:
        self._folder = folder
        self._words = [
            f"run.id={run_id}", f"run.dir={folder}", f"broker.bootstrap={broker}",
            f"trainer.steps={NUM_STEPS}", "trainer.groups_per_step=1", "trainer.max_staleness=9",
            "trainer.checkpoint_every=100", "prompts.group_size=2",
        ]  # fmt: skip
        apply(broker, run_id, TopicPlan(rollout_workers=1, logprob_workers=1))
        self.bus = KafkaBus(broker, run_id)
        samples = [scored(group, sample, 0) for group in range(NUM_STEPS) for sample in (0, 1)]
        with self.bus.producer("logprob.0") as producer:
            producer.commit([outgoing(SCORED, sample) for sample in samples])

    @contextmanager
    def trainer(
        self, *words: str, crash_at: str = "", cpu: str = ""
    ) -> Iterator[subprocess.Popen[str]]:
        """`rlstreams worker trainer`, its predecessor taken for dead; killed at the end."""
        file = self._folder / "config.json"
        file.write_text(resolved_json(load([EXAMPLE], [*self._words, *words])), "utf-8")
        command = [sys.executable, "-m", "rlstreams", "worker", "trainer", str(file)]
        if crash_at:
            command += ["--crash-at", crash_at]
        environ = os.environ | ({"ATEN_CPU_CAPABILITY": cpu} if cpu else {})
        process = subprocess.Popen(
            [*command, "--takeover"], stderr=subprocess.PIPE, text=True, env=environ
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def events(self, topic: str) -> list[Event]:
        """All of a small topic, by now."""
        with self.bus.reader(dict.fromkeys(self.bus.ends(topic), 0)) as reader:
            events: list[Event] = []
            while any(reader.positions()[p] < end for p, end in self.bus.ends(topic).items()):
                events += [decoded(raw).event for raw in reader.poll(1000, 0.2)]
        return events

    def steps(self) -> list[StepCompleted]:
        return [event for event in self.events(STEPS.name) if isinstance(event, StepCompleted)]

    def told(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events(STEPS.name) if isinstance(event, kind)]


def wait_until(reached: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline_s, "not reached in time"
        time.sleep(0.05)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its status and what it said."""
    _, text = process.communicate(timeout=DEADLINE_S)
    return process.returncode, text


def other_hardware() -> str:
    """An instruction set that this machine has, and that torch would not choose."""
    return "avx2" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "default"


@pytest.mark.parametrize("tries_exact", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_elsewhere_exact_stops_and_tolerate_goes_on_while_the_old_one_sleeps(
    broker: str, run_id: str, tmp_path: Path, tries_exact: bool
) -> None:
    """Other instructions give other bits: named with the first step, then a version of their own.

    The trainer of before was only stopped: it wakes up fenced, and adds nothing.
    """
    site, cpu = Site(broker, run_id, tmp_path), other_hardware()
    # It may be stopped in a commit, and sleeps for longer than one may take: 30 s.
    patient = "deadlines.commit_s=600"
    with site.trainer(patient, crash_at="checkpoint.before:1:stop:600") as zombie:
        wait_until(lambda: len(site.steps()) >= 2)
        zombie.send_signal(signal.SIGSTOP)
        if tries_exact:
            refuses(site, cpu)
        with site.trainer("trainer.redo=tolerate", cpu=cpu) as tolerant:
            status, said = ended(tolerant)
        assert Exit.DONE == status, said
        before = site.events(STEPS.name), site.events(POLICY_VERSIONS.name)
        zombie.send_signal(signal.SIGCONT)
        status, said = ended(zombie)
    assert Exit.FENCED == status, said
    assert before == (site.events(STEPS.name), site.events(POLICY_VERSIONS.name))
    check_drift(site, tries_exact=tries_exact)


def refuses(site: Site, cpu: str) -> None:
    """A trainer elsewhere that takes no other bits names the first step that gave some."""
    with site.trainer("trainer.redo=exact", cpu=cpu) as exact:
        status, said = ended(exact)
    assert Exit.CONFIG == status, said
    assert "redo of step 1 gave weights" in said
    first = site.steps()[0]
    assert f"the ledger says {first.weight_hash}: since then cpu_capability was" in said


def check_drift(site: Site, *, tries_exact: bool) -> None:
    steps = site.steps()
    assert [1, 2, 3, 4] == [step.step for step in steps]
    *exact, tolerant = site.told(StepsRedone)
    assert isinstance(tolerant, StepsRedone)
    num_before = sum(step.epoch == steps[0].epoch for step in steps)  # of the one that sleeps
    assert [(1, 1, 0)] * tries_exact == [
        (one.first_step, one.last_step, one.num_equal)
        for one in exact
        if isinstance(one, StepsRedone)
    ]
    assert (1, num_before, 0) == (tolerant.first_step, tolerant.last_step, tolerant.num_equal)
    (drift,) = site.told(RedoDrifted)
    assert isinstance(drift, RedoDrifted)
    assert (num_before, num_before + 1) == (drift.step, drift.policy_version)
    if num_before < NUM_STEPS:
        assert drift.actual_hash == steps[num_before].previous_hash
    check_weights(site)


def check_weights(site: Site) -> None:
    """No number with two contents, and the last one can be pulled."""
    published = [e for e in site.events(POLICY_VERSIONS.name) if isinstance(e, PolicyPublished)]
    contents = {(event.policy_version, event.weight_hash) for event in published}
    assert len({version for version, _ in contents}) == len(contents)
    assert dict(FileWeightChannel().pull(published[-1], DEADLINE_S))


@pytest.mark.slow
def test_a_stall_without_a_rival_ends_with_75_and_the_next_start_goes_on(
    broker: str, run_id: str, tmp_path: Path
) -> None:
    """Longer than the transaction timeout, inside a transaction: nothing of it happened."""
    site = Site(broker, run_id, tmp_path)
    stall_s = TRANSACTION_S + 2 * CLEAN_UP_S + 0.5
    options = f'broker.options={{"transaction.timeout.ms" = "{TRANSACTION_S * 1000:.0f}"}}'
    with site.trainer(options, crash_at=f"commit.before:4:stop:{stall_s}") as stalled:
        status, said = ended(stalled)
    assert Exit.FENCED == status, said
    num_before = len(site.steps())
    with site.trainer() as successor:
        status, said = ended(successor)
    assert Exit.DONE == status, said
    steps = site.steps()
    assert [1, 2, 3, 4] == [step.step for step in steps]
    assert [(1, num_before)] * (num_before > 0) == [
        (event.first_step, event.num_equal)
        for event in site.told(StepsRedone)
        if isinstance(event, StepsRedone)
    ]
    check_weights(site)
