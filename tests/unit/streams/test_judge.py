"""A judge written from the README of the schemas alone says of random runs what the audit says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rlstreams.streams.log.done_set import encode_done
from tests.integration import judge
from tests.integration.judge import Judge
from tests.integration.stranger import schemas_from_folder
from tests.unit.streams.audit_log import Log
from tests.unit.streams.broken_log import LARGE, broken_log

SCHEMAS = schemas_from_folder(Path(__file__).parents[3] / "rlstreams/schemas")
# Where a log breaks one of these rules, the page does not say what counts.
UNDECIDED = {"step missing", "step twice", "closed twice", "trained and dropped", "bad id"}


class Message(NamedTuple):
    """As kafka-python gives one."""

    partition: int
    offset: int
    value: bytes
    headers: tuple[()] = ()


def judged(log: Log) -> Judge:
    topics = {
        topic: [Message(0, raw.position.offset, bytes(raw.value)) for raw in log.records(topic)]
        for topic in judge.TOPICS
    }
    done = {"prompts": log.rollout_done, "trajectories": log.logprob_done}
    commits = {(topic, 0): (0, encode_done(0, offsets)) for topic, offsets in done.items()}
    return Judge(topics, commits, SCHEMAS)


def test_it_agrees_with_the_audit() -> None:
    """On sound logs and on broken ones; samples that are lost or trained twice included."""
    num_lost = num_compared = 0
    for seed in range(400):
        log = broken_log(seed)
        log.damaged.clear()
        log.expired.clear()
        report = log.report()
        # Whichever topic is read first.
        assert report == replace(log.report(steps_last=True), breaches=report.breaches), seed
        if UNDECIDED & report.breach_counts.keys():
            continue
        found = judged(log)
        num_compared += 1
        num_lost += report.lost
        told = {
            "trained": report.trained,
            "dead": report.dead_lettered,
            "dropped": sum(report.dropped.values()),
            "evaluated": report.evaluated,
            "in flight": sum(report.in_flight.values()),
            "lost": report.lost,
        }
        assert {kind: num for kind, num in told.items() if num} == dict(found.classes), seed
        assert report.trained_twice == found.twice, seed
        assert report.staleness == dict(found.staleness), seed
    assert num_compared > 50
    assert num_lost > 20


def test_it_imports_nothing_of_ours() -> None:
    text = Path(judge.__file__).read_text()
    imported = re.findall(r"^\s*(?:import|from) ((?:rlstreams|tests)\b.*)", text, re.MULTILINE)
    assert ["tests.integration import stranger"] == imported
    assert len(text.splitlines()) <= 250
    assert set(LARGE) < set(judge.TOPICS)
