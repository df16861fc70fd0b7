"""A rollout worker on a real broker is killed again and again: no sample is lost or doubled."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from rlstreams.schemas.events import ScoredTrajectory, Trajectory
from rlstreams.streams.audit.auditor import audit
from rlstreams.streams.kafka.admin import apply
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import POLICY_VERSIONS, PROMPTS, STEPS, TRAJECTORIES
from rlstreams.workers.bootstrap.parts import open_bus
from rlstreams.workers.config.load import load, resolved_json
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.runtime import Exit
from rlstreams.workers.weights.file import FileWeightServer
from tests import factories
from tests.fake_engine import fake_weights
from tests.integration.worker_process import work
from tests.unit.roles.stand import EXAMPLE, make_prompt

GROUP_SIZE = 4
NUM_KILLS = 5
SEED = 7
STEP_S = 0.005
SLOW_S = 0.02  # 100 samples a second: who is interrupted still has something to do
DEADLINE_S = 240.0  # for one thing that is waited for

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([work.__module__])


class Site:
    """A run on the broker without any process yet: topics, weights, prompts."""

    def __init__(self, broker: str, run_id: str, folder: Path, num_groups: int) -> None:
        self.config: RunConfig = load(
            [EXAMPLE],
            [
                f"run.id={run_id}", f"run.dir={folder}", f"broker.bootstrap={broker}",
                "rollout.slots=16", "rollout.max_new_tokens=8", "rollout.commit_interval_s=0.03",
            ],
        )  # fmt: skip
        self._file = folder / "config.json"
        self._file.write_text(resolved_json(self.config), "utf-8")
        apply(broker, run_id, TopicPlan(rollout_workers=1, logprob_workers=1))
        self.bus: Bus = open_bus(self.config)
        self.samples = {(str(g), s) for g in range(num_groups) for s in range(GROUP_SIZE)}
        self._publish(folder)
        self._issue()
        self.follow(TRAJECTORIES.name)

    def _publish(self, folder: Path) -> None:
        server = FileWeightServer(folder / "weights", keep=1)
        manifest = server.publish(0, fake_weights(0))
        event = factories.policy_published(
            0,
            weight_hash=manifest.weight_hash,
            layout=manifest.layout,
            endpoints=tuple(server.endpoints()),
            versions_served=tuple(server.versions()),
        )
        claim = factories.trainer_started(
            run=self.config.run.id, weight_hash=manifest.weight_hash, epoch=event.epoch
        )
        with self.bus.producer("publisher") as producer:
            producer.commit([outgoing(STEPS, claim), outgoing(POLICY_VERSIONS, event)])

    def _issue(self) -> None:
        records = [
            outgoing(
                PROMPTS, make_prompt(group_id, sample, GROUP_SIZE), partition=int(group_id) % 2
            )
            for group_id, sample in sorted(self.samples)
        ]
        with self.bus.producer("issuer") as producer:
            producer.commit(records)

    @contextmanager
    def worker(self, *settings: object, step_s: float = STEP_S) -> Iterator[BaseProcess]:
        """A worker with ordinal 0; killed at the end if it still lives."""
        process = _PROCESSES.Process(target=work, args=(self._file, step_s, *settings))
        process.start()
        yield process
        process.kill()
        process.join(DEADLINE_S)

    def follow(self, topic: str) -> None:
        """Count samples in this topic from now on, from its beginning."""
        self._found: Counter[tuple[str, int]] = Counter()
        self._reader = self.bus.reader(self.bus.beginnings(topic))

    def found(self) -> Counter[tuple[str, int]]:
        """How often each sample lies in the topic, by now."""
        while raws := self._reader.poll(1000, 0.05):
            for raw in raws:
                event = decoded(raw).event
                sample = event.trajectory if isinstance(event, ScoredTrajectory) else event
                assert isinstance(sample, Trajectory)
                self._found[sample.group_id, sample.sample] += 1
        return self._found

    def wait_for(self, num_samples: int) -> None:
        """Until that many samples are done."""
        deadline_s = time.monotonic() + DEADLINE_S
        while len(self.found()) < num_samples:
            assert time.monotonic() < deadline_s, f"{len(self._found)} of {num_samples} samples"

    def check(self) -> None:
        """Each sample once, by count and by the audit."""
        assert dict.fromkeys(self.samples, 1) == self.found()
        report = audit(self.bus)
        assert report.ok, report.text()
        assert (len(self.samples), 0) == (report.issued, report.duplicates)
        assert {"logprob": len(self.samples)} == {k: n for k, n in report.in_flight.items() if n}

    def close(self) -> None:
        self._reader.close()


def end(process: BaseProcess) -> int | None:
    """Ask it to drain; its exit status."""
    process.terminate()
    process.join(DEADLINE_S)
    return process.exitcode


def test_kills_lose_and_double_nothing(broker: str, run_id: str, tmp_path: Path) -> None:
    """SIGKILL in mid-work, five times: each successor does what was left, and only that."""
    site = Site(broker, run_id, tmp_path, num_groups=150)
    rng = random.Random(SEED)
    # The kills are ours: no sample may be set aside for them, be it under way in three of them.
    settings = ("rollout", "", 30.0, NUM_KILLS + 1)
    for _ in range(NUM_KILLS):
        with site.worker(*settings, step_s=SLOW_S):
            site.wait_for(len(site.found()) + rng.randrange(20, 60))
            time.sleep(rng.random() * 0.05)  # anywhere in a commit interval
    at_last_kill = len(site.found())
    with site.worker(*settings) as process:
        site.wait_for(len(site.samples))
        assert Exit.DONE == end(process)
    assert at_last_kill < len(site.samples), "the last kill came too late to mean anything"
    site.check()
    site.close()


def test_the_first_of_two_workers_with_one_ordinal_is_fenced(
    broker: str, run_id: str, tmp_path: Path
) -> None:
    """The first exits with 75 and has changed nothing since; the second does all that is left."""
    site = Site(broker, run_id, tmp_path, num_groups=60)
    with site.worker(step_s=SLOW_S) as first:
        site.wait_for(20)
        with site.worker() as second:
            first.join(DEADLINE_S)
            assert Exit.FENCED == first.exitcode
            site.wait_for(len(site.samples))
            assert Exit.DONE == end(second)
    site.check()
    site.close()
