"""A rollout or log-prob worker with fake parts, as a process to be killed, stopped or fenced."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.crash_points import CrashPoint, Hook, arm, arm_from
from rlstreams.streams.log.tracker import MAX_TRIES
from rlstreams.workers.config.load import from_json
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.engines.base import Sampling, Scores, TokenSequence
from rlstreams.workers.logprob.worker import make_worker as make_logprob
from rlstreams.workers.loop import runtime, stage
from rlstreams.workers.loop.context import Context
from rlstreams.workers.model.tokenizer import Tokenizer
from rlstreams.workers.rollout.sampling import Sampler
from rlstreams.workers.rollout.worker import make_worker as make_rollout
from rlstreams.workers.sandbox.reward import Verifier
from rlstreams.workers.weights.file import FileWeightChannel
from tests.fake_engine import FakeEngine, FakeScorer
from tests.unit.roles.stand import length

FREEZE = "freeze:"


def work(
    config_file: Path,
    step_s: float,
    role: str = "rollout",
    crash_at: str = "",
    transaction_s: float = 30.0,
    max_tries: int = MAX_TRIES,
) -> None:
    """What `rlstreams worker ROLE` does, with other parts; ends the process.

    Args:
        config_file: resolved configuration, JSON.
        step_s: time of the engine for one token, or of the scorer for one forward.
        crash_at: a crash point, as in `streams.log.crash_points`; `freeze:POINT` stops the process
            there for the first time, until somebody continues it.
        transaction_s: after it the broker aborts an open transaction.
        max_tries: of a record, by workers that died; then it is set aside.
    """
    stage.MAX_TRIES = max_tries  # type: ignore[attr-defined]
    stop = runtime.Stop()
    stop.on_signals()
    if crash_at.startswith(FREEZE):
        arm(freeze_at(CrashPoint(crash_at.removeprefix(FREEZE))))
    elif crash_at:
        arm_from(crash_at)
    try:
        config = from_json(config_file.read_text("utf-8"))
        address = config.broker.bootstrap
        with KafkaBus(address, config.run.id, transaction_timeout_s=transaction_s) as bus:
            runtime.run(_make(config, bus, role, step_s), stop)
    except Exception as err:  # noqa: BLE001  (the process border, as in rlstreams/cli/worker.py)
        runtime.explain(err)
        sys.exit(runtime.exit_status(err))
    sys.exit(runtime.Exit.DONE)


def freeze_at(point: CrashPoint) -> Hook:
    """SIGSTOP from within: it stands at exactly that place, however busy the machine is."""
    left = [point]

    def hook(reached: CrashPoint) -> None:
        if left and reached == point:
            left.clear()
            os.kill(os.getpid(), signal.SIGSTOP)

    return hook


def _make(config: RunConfig, bus: Bus, role: str, step_s: float) -> runtime.Role:
    context = Context(config=config, bus=bus, role=role, ordinal=0, instance=uuid.uuid4().hex)
    if role == "logprob":
        return make_logprob(context, bus, SlowScorer(step_s), FileWeightChannel())
    engine = FakeEngine(slots=config.rollout.slots, step_s=step_s)
    sampler = Sampler(
        engine=engine,
        verifier=Verifier(length, require_stop=False),
        tokenizer=Tokenizer.load(config.model.path),
        sampling=Sampling(max_new_tokens=config.rollout.max_new_tokens),
        max_attempts=config.rollout.max_attempts,
        deadline_s=config.rollout.sample_deadline_s,
    )
    return make_rollout(context, bus, engine, FileWeightChannel(), sampler)


class SlowScorer(FakeScorer):
    """Takes its time for each forward."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self._step_s = step_s

    def score(
        self, sequences: Sequence[TokenSequence], policy_version: int, temperature: float
    ) -> Sequence[Scores]:
        time.sleep(self._step_s)
        return super().score(sequences, policy_version, temperature)
