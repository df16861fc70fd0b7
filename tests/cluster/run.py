"""A real run, all its roles as processes, on a cluster that is being broken."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from rlstreams.streams.audit.auditor import AuditReport, audit
from rlstreams.streams.kafka.bus import KafkaBus
from tests.containers import Steps
from tests.e2e.command import UP_S, Started, Workspace

FOREVER = 100_000  # steps: the test ends the run
STEPS_PER_LOOK = 2
# A client may hang in a commit whose node died (librdkafka issue 5511): its worker ends after this
# and is started again.
COMMIT_S = 8
PROGRESS_S = 120.0


class ClusterRun:
    """`rlstreams up` of the demo in a folder of its own, its log on the cluster."""

    def __init__(self, bootstrap: str, folder: Path, run_id: str) -> None:
        self._workspace = Workspace(folder)
        self._started: Started = self._workspace.start_up(
            "--no-live", f"--run.id={run_id}", f"--broker.bootstrap={bootstrap}",
            "--broker.replication=3", f"--trainer.steps={FOREVER}", "--demo.kills=[]",
            "--prompts.evaluate_rows=16", f"--deadlines.commit_s={COMMIT_S}",
        )  # fmt: skip
        self._bus = KafkaBus(bootstrap, run_id)
        self._steps = Steps(self._bus)

    @property
    def step(self) -> int:
        """The newest that was seen."""
        return self._steps.newest

    def goes_on(self) -> float:
        """Wait for new steps in the log; how long that took, seconds.

        Raises:
            AssertionError: none came, or `up` ended; with what it printed.
        """
        begun = time.monotonic()
        target = self._newest_step() + STEPS_PER_LOOK
        while self._newest_step() < target:
            assert self._started.process.poll() is None, f"up ended:\n{self.output}"
            if time.monotonic() - begun > PROGRESS_S:
                raise AssertionError(f"no step {target} in {PROGRESS_S:g} s:\n{self.output}")
            time.sleep(0.05)
        return time.monotonic() - begun

    def _newest_step(self) -> int:
        return self._steps.look() if "step " in self.output else 0  # the topics are made by `up`

    def end(self) -> AuditReport:
        """Drain, and account for every sample."""
        self._started.signal(signal.SIGTERM)
        self._started.ended_within(UP_S)
        return audit(self._bus)

    @property
    def num_restarts(self) -> int:
        """How often a worker ended and was started again."""
        return self.output.count("starting it again")

    @property
    def output(self) -> str:
        """What `up` has printed."""
        return self._started.output

    def close(self) -> None:
        """Kill what is left of it."""
        self._steps.close()
        self._workspace.close()
