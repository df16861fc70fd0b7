"""The audit's speed and memory: samples a second of payload S, resident bytes at a million.

    python tests/bench/audit.py [--samples N] [--broker-samples N] [--cores N] [--save]

A sample is three records: prompt, trajectory (1,024 tokens with log-probs) and score. *In memory*
the records lie in memory as the bus hands them out, and what is timed is all that the audit does
with them: skimming, decoding of `steps`, the fold, the report; in CPU seconds, in one process, and
with a second one that skims and sends its rows: then the busier of the two counts.
*From the broker* a run of fewer samples lies in the embedded broker on the same machine, and what
is timed is a round as users run it, client and broker included, alone and with two helping
processes. The broker shares the two cores, so beside it stands what a bare confluent-kafka consumer
takes to read the same topics up to the same offsets, in the same run: that is the ceiling, and the
ratio to it is what counts. Rounds are taken in turns once a broker that has just started is warm.
With `--cores N` the audit and its helping processes have N cores to
themselves and the broker has the machine's other ones, as on a cluster (Linux). Goals: 50,000
samples/s on two cores, 500 MB at a million samples.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from confluent_kafka import Consumer, TopicPartition
from rlstreams.streams.audit.rows import Sieve
from rlstreams.streams.audit.sources import LARGE, spare_memory

from rlstreams.schemas import decode
from rlstreams.streams.audit.auditor import Auditor, Helpers
from rlstreams.streams.audit.classes import Classes, Coverage, Reached
from rlstreams.streams.audit.fold import AuditFold
from rlstreams.streams.audit.tail import BATCH
from rlstreams.streams.broker.embedded import EmbeddedBroker
from rlstreams.streams.kafka.admin import apply
from rlstreams.streams.kafka.bus import _CONSUMER, _READER, KafkaBus
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import Batch, Committed, Outgoing, Partition, Position
from rlstreams.streams.log.topic import Topic
from rlstreams.streams.log.topic_plan import TopicPlan
from rlstreams.streams.log.topics import PROMPTS, SCORED, STEPS, TRAJECTORIES
from tests.bench.audit_run import GROUP_SIZE, SyntheticRun
from tests.bench.hardware import hardware

GOAL_PER_S, GOAL_MB = 50_000, 500
HELPERS_START_S = 6.0
BARE_S = 60.0  # longest that the bare consumer may take for a topic
ROUNDS = 5
WARM_UP = 2  # rounds of the bare consumer that do not count: a fresh broker compiles what it runs
LARGE_NAMES = tuple(topic.name for topic in LARGE)
PARTS = (
    "steps",
    *(f"{what} {name}" for what in ("skim", "fold") for name in LARGE_NAMES),
    *("send", "receive", "report"),
)
RUN = "audit"


def resident_mb() -> float:
    """The most that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Memory:
    """Feeds a fold with records in memory, and times only what the audit does with them."""

    def __init__(self, run: SyntheticRun) -> None:
        self.run = run
        self.fold = AuditFold()
        self.sieves = {topic: Sieve(topic.name) for topic in (PROMPTS, TRAJECTORIES, SCORED)}
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """CPU seconds of this process."""
        start_s = time.process_time()
        yield
        self.seconds[part] += time.process_time() - start_s

    def measure(self) -> dict[str, Any]:
        """All of the run; seconds by part."""
        self.small()
        for first in range(0, self.run.num_samples, BATCH):
            numbers = range(first, min(first + BATCH, self.run.num_samples))
            for topic in LARGE:
                values = [self.run.value(topic, number) for number in numbers]
                batch = Batch(Partition(topic.name, 0), [*numbers], [*values], [{}] * len(values))
                with self.timed(f"skim {topic.name}"):
                    rows = self.sieves[topic].rows([batch])
                del batch, values
                with self.timed("send"):
                    sent = pickle.dumps(rows, pickle.HIGHEST_PROTOCOL)
                with self.timed("receive"):
                    pickle.loads(sent)
                with self.timed(f"fold {topic.name}"):
                    self.fold.add(rows)
        with self.timed("report"):
            report = Classes(self.fold, everything_done(self.run.num_samples)).report()
        assert report.ok, report.text()
        assert report.trained == self.run.num_samples
        used_us = {p: 1e6 * s / self.run.num_samples for p, s in self.seconds.items()}
        skim_us = sum(us for part, us in used_us.items() if part.startswith("skim"))
        alone_us = sum(used_us.values()) - used_us["send"] - used_us["receive"]
        reader_us = skim_us + used_us["send"]
        folder_us = alone_us - skim_us + used_us["receive"]
        return {
            "samples": self.run.num_samples,
            "record_bytes": {t.name: len(self.run.value(t, 0)) for t in self.sieves},
            "samples_per_s": round(1e6 / max(reader_us, folder_us)),  # two cores, a process each
            "samples_per_s_of_one_process": round(1e6 / alone_us),
            "microseconds_per_sample": {p: round(us, 2) for p, us in used_us.items()},
            "resident_mb": round(resident_mb()),
        }

    def small(self) -> None:
        """Weights first, then `steps`."""
        for topic, event in self.run.weights():
            self.fold.apply(event, Position(topic.name, 0, 0))
        for number, value in enumerate(self.run.steps()):
            with self.timed("steps"):
                event = decode(value)
                self.fold.foresee(event)
                self.fold.apply(event, Position(STEPS.name, 0, number))


def everything_done(num_samples: int) -> Reached:
    """Both groups have committed past all of it."""

    def coverage(topic: Topic) -> Coverage:
        return Coverage({Partition(topic.name, 0): Committed(offset=num_samples)})

    return Reached(coverage(PROMPTS), coverage(TRAJECTORIES))


def from_broker(num_samples: int, num_cores: int) -> dict[str, Any]:
    """Fill the embedded broker, then audit it as users do.

    Args:
        num_cores: of the audit; the broker has the others. 0: they share all.
    """
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker(Path(folder))
        with apart(num_cores):
            state = broker.start()
        try:
            plan = TopicPlan(rollout_workers=2, logprob_workers=2, partitions_per_worker=2)
            apply(state.bootstrap, RUN, plan)
            again = partial(KafkaBus, state.bootstrap, RUN)
            with again() as bus:
                fill(bus, num_samples)
                ends = {p: end for topic in LARGE for p, end in bus.ends(topic.name).items()}
                ways: dict[str, Callable[[], Rate]] = {
                    "bare_consumer": partial(bare, state.bootstrap, ends, num_samples),
                    "from_broker": partial(audited, bus, num_samples, None),
                    "from_broker_2_processes": partial(
                        audited, bus, num_samples, Helpers(num_processes=2, open_bus=again)
                    ),
                }
                return summary(num_samples, ways)
        finally:
            broker.stop()


@contextmanager
def apart(num_cores: int) -> Iterator[None]:
    """What starts inside has all but `num_cores` cores; this process has those from then on."""
    if not num_cores:
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    assert num_cores < len(cores), f"--cores {num_cores} leaves the broker none of {len(cores)}"
    os.sched_setaffinity(0, cores[num_cores:])
    yield
    os.sched_setaffinity(0, cores[:num_cores])


def summary(num_samples: int, ways: Mapping[str, Callable[[], Rate]]) -> dict[str, Any]:
    """Rounds of all ways in turns; a ratio is that of the medians."""
    for _ in range(WARM_UP):
        ways["bare_consumer"]()
    rounds: dict[str, list[Rate]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            rounds[name].append(way())
    found: dict[str, Any] = {}
    for name, rates in rounds.items():
        per_s = [rate.per_s for rate in rates]
        ceiling = [rate.per_s for rate in rounds["bare_consumer"]]
        found[name] = {
            "samples": num_samples,
            "samples_per_s": round(statistics.median(per_s)),
            "samples_per_s_of_rounds": [round(rate) for rate in per_s],
            "over_bare": round(statistics.median(per_s) / statistics.median(ceiling), 2),
            "own_cpu_microseconds_per_sample": round(min(rate.cpu_us for rate in rates), 1),
        }
    return found


@dataclass(frozen=True, slots=True)
class Rate:
    """One round."""

    per_s: float  # samples
    cpu_us: float  # of this process, for one sample


def audited(bus: KafkaBus, num_samples: int, helpers: Helpers | None) -> Rate:
    """One round, without the start of helping processes."""
    with Auditor(bus, helpers=helpers) as auditor:
        if helpers is not None:
            time.sleep(HELPERS_START_S)
        start_s, cpu_s = time.perf_counter(), time.process_time()
        report = auditor.round(0)
        rate = rate_of(num_samples, start_s, cpu_s)
    assert report.ok, report.text()
    assert report.trained == num_samples
    return rate


def bare(bootstrap: str, ends: Mapping[Partition, int], num_samples: int) -> Rate:
    """The client alone reads the values of the same records and drops them."""
    start_s, cpu_s = time.perf_counter(), time.process_time()
    num_bytes = 0
    for topic in LARGE:  # a client each: the fetch that still waits for one would delay the next
        consumer = Consumer(
            _CONSUMER | _READER | {"bootstrap.servers": bootstrap, "group.id": "bare"}
        )
        named = f"{RUN}.{topic.name}"
        starts = [TopicPartition(named, p.number, 0) for p in ends if p.topic == topic.name]
        consumer.assign(starts)
        left, deadline = num_samples, time.monotonic() + BARE_S
        while left > 0:
            first = consumer.poll(0.2)
            messages = [] if first is None else [first, *consumer.consume(2_000, 0)]
            num_bytes += sum(len(message.value()) for message in messages)
            left -= len(messages)
            assert time.monotonic() < deadline, f"the bare consumer still lacks {left} of {named}"
        consumer.close()
    rate = rate_of(num_samples, start_s, cpu_s)
    assert left == 0, f"{-left} records too many, {num_bytes} bytes in all"
    return rate


def rate_of(num_samples: int, start_s: float, cpu_s: float) -> Rate:
    """Since then."""
    per_s = num_samples / (time.perf_counter() - start_s)
    return Rate(per_s, 1e6 * (time.process_time() - cpu_s) / num_samples)


def fill(bus: KafkaBus, num_samples: int) -> None:
    """A finished run of so many samples."""
    run = SyntheticRun(num_samples)
    with bus.producer("pen") as pen:
        for topic, event in run.weights():
            pen.commit([outgoing(topic, event)])
        scored_at: list[Position] = []
        for first in range(0, num_samples, 1_000):
            numbers = range(first, min(first + 1_000, num_samples))
            for topic in (PROMPTS, TRAJECTORIES, SCORED):
                positions = pen.commit([record(run, topic, number) for number in numbers])
            scored_at += positions
        for event in run.step_events([(at.partition, at.offset) for at in scored_at]):
            pen.commit([outgoing(STEPS, event)])
        for group, topic in (("rollout", PROMPTS), ("logprob", TRAJECTORIES)):
            commit_ends(bus, pen, group, topic)


def record(run: SyntheticRun, topic: Topic, number: int) -> Outgoing:
    """With the headers that records have."""
    group, sample = divmod(number, GROUP_SIZE)
    headers = {"rlstreams-id": f"{group}/{sample}/0".encode(), "rlstreams-purpose": b"train"}
    value = [run.value(topic, number)]
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
    parser.add_argument("--cores", type=int, default=0, help="of the audit; the broker's: others")
    parser.add_argument("--save", action="store_true", help="write results/audit-<date>.json")
    options = parser.parse_args()
    spare_memory()  # as the command does
    results: dict[str, dict[str, Any]] = {
        "in_memory": Memory(SyntheticRun(options.samples)).measure()
    }
    if options.broker_samples:
        results |= from_broker(options.broker_samples, options.cores)
    about = {"hardware": hardware(), "cores_of_the_audit": options.cores or "all, shared"}
    text = json.dumps({**about, **results}, indent=2) + "\n"
    sys.stdout.write(text)
    if options.save:
        path = Path(__file__).parent / f"results/audit-{time.strftime('%Y-%m-%d')}.json"
        path.write_text(text, encoding="utf-8")
    by_broker = [found for name, found in results.items() if name.startswith("from_broker")]
    best = max((found["samples_per_s"] for found in by_broker), default=GOAL_PER_S)
    missed = ["in memory"] if results["in_memory"]["samples_per_s"] < GOAL_PER_S else []
    missed += ["from the broker"] if best < GOAL_PER_S else []
    missed += ["memory"] if results["in_memory"]["resident_mb"] > GOAL_MB else []
    sys.exit(f"goal missed: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
