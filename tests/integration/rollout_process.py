"""One rollout worker with the fake engine, as a process to be killed: `test_roles_on_broker.py`."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

from tests.unit.roles.stand import LengthVerifier
from workers import runtime
from workers.bootstrap import open_bus
from workers.config import RunConfig
from workers.config_load import from_json
from workers.context import Context
from workers.engines.base import Sampling
from workers.engines.fake import FakeEngine
from workers.rollout.sampling import Sampler
from workers.rollout.worker import make_worker
from workers.tokenizer import Tokenizer
from workers.weights.file import FileWeightChannel


def work(config_file: Path, step_s: float) -> None:
    """What `rlstreams worker rollout` does, with other parts; ends the process.

    Args:
        config_file: resolved configuration, JSON.
        step_s: time of the engine for one token.
    """
    stop = runtime.Stop()
    stop.on_signals()
    try:
        _run(from_json(config_file.read_text("utf-8")), step_s, stop)
    except Exception as err:  # noqa: BLE001  (the process border, as in workers/cli/worker.py)
        runtime.explain(err)
        sys.exit(runtime.exit_status(err))
    sys.exit(runtime.Exit.DONE)


def _run(config: RunConfig, step_s: float, stop: runtime.Stop) -> None:
    engine = FakeEngine(slots=config.rollout.slots, step_s=step_s)
    sampler = Sampler(
        engine=engine,
        verifier=LengthVerifier(),
        tokenizer=Tokenizer.load(config.model.path),
        sampling=Sampling(max_new_tokens=config.rollout.max_new_tokens),
        max_attempts=config.rollout.max_attempts,
        deadline_s=config.rollout.sample_deadline_s,
    )
    with open_bus(config) as bus:
        context = Context(
            config=config, bus=bus, role="rollout", ordinal=0, instance=uuid.uuid4().hex
        )
        runtime.run(make_worker(context, bus, engine, FileWeightChannel(), sampler), stop)
