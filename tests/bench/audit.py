"""The audit's speed and memory: samples a second of payload S, resident bytes at a million.

    python tests/bench/audit.py [--samples N] [--broker-samples N] [--save]

A sample is three records: prompt, trajectory (1,024 tokens with log-probs) and score. *In memory*
the records lie in memory as the bus hands them out, and what is timed is all that the audit does
with them: decoding, the fold, the report; in CPU seconds of one process. *From the broker* a run of
fewer samples lies in the embedded broker on the same cores, and what is timed is a round as users
run it, client and broker included; the median of some rounds. Goals: 20,000 and 15,000 samples/s,
600 MB at a million samples.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlstreams.streams.audit.auditor import Auditor
from rlstreams.streams.audit.classes import Classes, Reached
from rlstreams.streams.audit.fold import AuditFold
from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.kafka.admin import apply
from rlstreams.streams.kafka.bus import KafkaBus
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import Committed, Outgoing, Partition, Position, RawRecord
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import PROMPTS, SCORED, STEPS, TRAJECTORIES, Topic
from tests.bench.audit_run import GROUP_SIZE, SyntheticRun
from tests.bench.hardware import hardware

GOALS_PER_S, GOAL_MB = {"in_memory": 20_000, "from_broker": 15_000}, 600
LARGE = (PROMPTS, TRAJECTORIES, SCORED)
BATCH = 1_000
ROUNDS = 5  # and one that does not count: a fresh broker compiles what it runs
RUN = "audit"


def in_memory(run: SyntheticRun) -> dict[str, Any]:
    """Feed a fold with all of the run; seconds by topic."""
    fold = AuditFold()
    seconds = dict.fromkeys((STEPS.name, *(topic.name for topic in LARGE), "report"), 0.0)
    for number, value in enumerate(run.steps()):
        raw = raw_record(STEPS, number, value)
        start_s = time.process_time()
        if (step := fold.foresee(raw)) is not None:
            fold.train(step, raw.position)
        seconds[STEPS.name] += time.process_time() - start_s
    for topic, event in run.weights():
        fold.take(raw_record(topic, 0, b"".join(outgoing(topic, event).value)))
    for topic in LARGE:
        for first in range(0, run.num_samples, BATCH):
            numbers = range(first, min(first + BATCH, run.num_samples))
            raws = [raw_record(topic, n, run.value(topic, n, (0, n))) for n in numbers]
            start_s = time.process_time()
            for raw in raws:
                fold.take(raw)
            seconds[topic.name] += time.process_time() - start_s
    done = {Partition(topic.name, 0): Committed(offset=run.num_samples) for topic in LARGE}
    start_s = time.process_time()
    report = Classes(fold, Reached(rollout=done, logprob=done)).report()
    seconds["report"] = time.process_time() - start_s
    assert report.ok, report.text()
    assert report.trained == run.num_samples
    used_us = {part: 1e6 * used_s / run.num_samples for part, used_s in seconds.items()}
    return {
        "samples": run.num_samples,
        "record_bytes": {topic.name: len(run.value(topic, 0)) for topic in LARGE},
        "samples_per_s": round(1e6 / sum(used_us.values())),
        "microseconds_per_sample": {part: round(us, 2) for part, us in used_us.items()},
        "resident_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def raw_record(topic: Topic, offset: int, value: bytes) -> RawRecord:
    """A record of partition 0, as a bus hands it out."""
    return RawRecord(Position(topic.name, 0, offset), (offset,), b"", value)


def from_broker(num_samples: int) -> dict[str, Any]:
    """Fill the embedded broker, then audit it as users do."""
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder))
        state = broker.start()
        try:
            plan = TopicPlan(rollout_workers=2, logprob_workers=2, partitions_per_worker=2)
            apply(state.bootstrap, RUN, plan)
            with KafkaBus(state.bootstrap, RUN) as bus:
                fill(bus, num_samples)
                rounds = [audited(bus, num_samples) for _ in range(1 + ROUNDS)][1:]
        finally:
            broker.stop()
    return {
        "samples": num_samples,
        "samples_per_s": round(statistics.median(rate for rate, _ in rounds)),
        "samples_per_s_of_rounds": [round(rate) for rate, _ in rounds],
        "own_cpu_microseconds_per_sample": round(statistics.median(us for _, us in rounds), 1),
    }


def audited(bus: KafkaBus, num_samples: int) -> tuple[float, float]:
    """Samples a second of one round, and CPU microseconds of this process for each."""
    with Auditor(bus) as auditor:
        start_s, cpu_s = time.perf_counter(), time.process_time()
        report = auditor.round(0)
        rate = num_samples / (time.perf_counter() - start_s)
        cpu_us = 1e6 * (time.process_time() - cpu_s) / num_samples
    assert report.ok, report.text()
    assert report.trained == num_samples
    return rate, cpu_us


def fill(bus: KafkaBus, num_samples: int) -> None:
    """A finished run of so many samples."""
    run = SyntheticRun(num_samples)
    with bus.producer("pen") as pen:
        for topic, event in run.weights():
            pen.commit([outgoing(topic, event)])
        scored_at: list[Position] = []
        for first in range(0, num_samples, BATCH):
            numbers = range(first, min(first + BATCH, num_samples))
            at = [Position("", -1, -1) for _ in numbers]
            for topic in LARGE:
                records = [record(run, topic, n, of) for n, of in zip(numbers, at, strict=True)]
                at = list(pen.commit(records))
            scored_at += at
        for event in run.step_events([(at.partition, at.offset) for at in scored_at]):
            pen.commit([outgoing(STEPS, event)])
        for group, topic in (("rollout", PROMPTS), ("logprob", TRAJECTORIES)):
            commit_ends(bus, pen, group, topic)


def record(run: SyntheticRun, topic: Topic, number: int, of: Position) -> Outgoing:
    """With the headers that records have; `of` is where the record lies that it answers."""
    group, sample = divmod(number, GROUP_SIZE)
    headers = {"rlstreams-id": f"{group}/{sample}/0".encode(), "rlstreams-purpose": b"train"}
    value = [run.value(topic, number, (of.partition, of.offset))]
    return Outgoing(topic=topic.name, key=str(group).encode(), value=value, headers=headers)


def commit_ends(bus: KafkaBus, pen: Any, group: str, topic: Topic) -> None:
    """The group is done with all of it."""
    with bus.consumer(group, [topic.name]) as consumer:
        ends = bus.ends(topic.name)
        assigned: set[Partition] = set()
        while len(assigned) < len(ends):
            assigned.update(consumer.poll(0, 0.2).assigned)
        pen.commit([], {p: Committed(offset=end) for p, end in ends.items()}, consumer)


def main() -> None:
    """Run it, print the numbers; exit 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--broker-samples", type=int, default=40_000, help="0: leave it out")
    parser.add_argument("--save", action="store_true", help="write results/audit-<date>.json")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {"in_memory": in_memory(SyntheticRun(options.samples))}
    if options.broker_samples:
        results["from_broker"] = from_broker(options.broker_samples)
    text = json.dumps({"hardware": hardware(), **results}, indent=2) + "\n"
    sys.stdout.write(text)
    if options.save:
        path = Path(__file__).parent / f"results/audit-{time.strftime('%Y-%m-%d')}.json"
        path.write_text(text, encoding="utf-8")
    missed = [
        name
        for name, goal in GOALS_PER_S.items()
        if name in results and results[name]["samples_per_s"] < goal
    ]
    missed += ["memory"] if results["in_memory"]["resident_mb"] > GOAL_MB else []
    sys.exit(f"goal missed: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
