"""`rlstreams up` and `doctor` against a real broker that is not as they need it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from rlstreams.__main__ import main
from rlstreams.schemas.events import TrainerStarted
from rlstreams.streams.kafka.admin import apply
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import STEPS
from tests import factories
from tests.e2e.command import CONFIG, ROOT, UP_S, Workspace

DEMO = str(ROOT / CONFIG)
PLAN = TopicPlan(rollout_workers=1, logprob_workers=1)


def words(command: str, broker: str, run_id: str, folder: Path, *more: str) -> list[str]:
    where = [f"--broker.bootstrap={broker}", f"--run.id={run_id}", f"--run.dir={folder}"]
    return [command, DEMO, *where, *more]


def test_topics_with_other_partition_counts(
    broker: str, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both commands name topic and both counts; `up` starts no role."""
    apply(broker, run_id, PLAN)
    told = f"{run_id}.prompts has 2 partitions and rollout.workers is 3: 1 of them would get no"

    assert 78 == main(words("up", broker, run_id, tmp_path, "--no-live", "--rollout.workers=3"))
    assert told in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()
    assert 1 == main(words("doctor", broker, run_id, tmp_path, "--rollout.workers=3"))
    assert told in capsys.readouterr().out


def test_a_run_id_that_has_steps(
    broker: str, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused with both ways out: to continue, or another id."""
    apply(broker, run_id, PLAN)
    claim: TrainerStarted = factories.trainer_started(run=run_id)
    with KafkaBus(broker, run_id) as bus, bus.producer("test") as producer:
        producer.commit([outgoing(STEPS, claim)])

    assert 78 == main(words("up", broker, run_id, tmp_path, "--no-live"))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "run.id" in line]
    assert f"run.id {run_id!r} has steps already" in line
    assert "--resume" in line
    assert "--run.id NAME" in line


def test_the_doctor_finds_the_embedded_broker_good(
    broker: str, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Version, protocol, topics and their settings, before and after the topics are made."""
    for state in ("has none yet", "with partitions for every worker"):
        assert 0 == main(words("doctor", broker, run_id, tmp_path, "--json"))
        checks = {c["name"]: c for c in json.loads(capsys.readouterr().out)}
        assert state in checks["topics"]["found"]
        assert "Apache Kafka 4.2" in checks["broker"]["found"]
        apply(broker, run_id, PLAN)
    assert "ok" == checks["topic settings"]["level"]


@pytest.mark.slow
def test_a_broker_that_dies_in_the_middle(tmp_path: Path) -> None:
    """It is started again on its port, the roles go on, and the audit finds nothing lost.

    A client may hang in the commit that the death interrupted (librdkafka issue 5456): the worker
    then ends at `commit_s` and is started again.
    """
    workspace = Workspace(tmp_path)
    started = workspace.start_up(
        "--steps", "8", "--no-live", "--demo.kills=[]", "--prompts.evaluate_rows=16",
        "--deadlines.commit_s=8",
    )  # fmt: skip
    started.wait_for_step(2)
    state = json.loads((tmp_path / "runs/demo/broker/broker.json").read_text())
    os.kill(state["pid"], signal.SIGKILL)

    assert 0 == started.ended_within(UP_S), started.output
    assert f"started again, it serves 127.0.0.1:{state['port']} as before" in started.output
    assert "lost 0, trained twice 0" in started.output
    workspace.close()
