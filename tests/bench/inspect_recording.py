"""`rlstreams inspect` in recordings of 1,000, 10,000 and 100,000 trajectories: seconds and memory.

    python tests/bench/inspect_recording.py --json tests/bench/results/inspect-DATE.json

Each recording holds prompts, trajectories, scores, steps of 128 samples, versions and their loads.
Every number is of a fresh process, start of Python included; by sample id the goal is below 1 s at
100,000, and memory must not grow with the recording.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlstreams.schemas import Tensor, encode
from rlstreams.schemas.events import Event
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.partitioner import partition_of
from rlstreams.streams.log.record import Partition, Position, RawRecord
from rlstreams.streams.log.topics import TOPICS
from rlstreams.streams.recording import Manifest, RecordedTopic, RecordingWriter
from rlstreams.streams.run.run_log import topic_of
from tests import factories

SIZES = (1_000, 10_000, 100_000)
GROUP, STEP, PARTITIONS = 8, 128, 4
PROMPT_TOKENS, SAMPLED_TOKENS = 32, 64
ROUNDS = 9


def events_of(num_samples: int) -> Iterator[Event]:
    """A run in which everything was trained, in an order that its log could have."""
    rng = np.random.default_rng(0)
    yield factories.trainer_started(step_target=num_samples // STEP)
    yield from weights(0)
    for number in range(num_samples):
        group, sample, version = number // GROUP, number % GROUP, number // STEP
        same = {"group_id": str(group), "sample": sample, "group_size": GROUP}
        at_ms = factories.NOW_MS + 10 * number
        behavior = -rng.random(SAMPLED_TOKENS, np.float32)
        noise = rng.normal(0, 1e-3, SAMPLED_TOKENS).astype(np.float32)
        rollout = factories.trajectory(
            **same,
            segments=(
                factories.prompt_segment(PROMPT_TOKENS),
                factories.policy_segment(
                    SAMPLED_TOKENS, version, behavior_logprobs=Tensor.of(behavior)
                ),
            ),
            reward=float(number % 3 == 0),
            started_at_ms=at_ms,
            finished_at_ms=at_ms + 400,
        )
        score = factories.score(
            SAMPLED_TOKENS, version, proximal_logprobs=Tensor.of(behavior + noise)
        )
        yield factories.prompt(**same, token_ids=factories.int32s(PROMPT_TOKENS))
        yield rollout
        yield factories.scored(rollout, scores=(score,), scored_at_ms=at_ms + 700)
        if (number + 1) % STEP == 0:
            yield from step(version + 1, number + 1 - STEP)


def step(number: int, first: int) -> Iterator[Event]:
    """A step over the samples from `first` on, and the version that it made."""
    refs = tuple(
        factories.sample_ref(str(n // GROUP), n % GROUP, oldest_policy_version=number - 1)
        for n in range(first, first + STEP)
    )
    yield factories.heartbeat()
    yield factories.step_completed(
        number, samples=refs, micro_batches=(STEP // 2, STEP // 2), masked=(), absent=()
    )
    yield from weights(number)


def weights(version: int) -> Iterator[Event]:
    """Published, and loaded by two workers."""
    yield factories.policy_published(version)
    for worker, role in (("rollout-0", "rollout"), ("logprob-0", "logprob")):
        yield factories.policy_loaded(
            version, worker=worker, role=role, load_id=f"{worker}/{version}"
        )


def write_recording(folder: Path, num_samples: int) -> None:
    """The run as a sealed recording."""
    topics = {
        topic.name: RecordedTopic(
            id=topic.name, partitions=1 if topic.single_partition else PARTITIONS
        )
        for topic in TOPICS
    }
    ends: Counter[Partition] = Counter()
    manifest = Manifest(run="bench", started_at_ms=factories.NOW_MS, topics=topics)
    with RecordingWriter(folder, manifest) as writer:
        for number, event in enumerate(events_of(num_samples)):
            writer.append(_raw(event, topics, ends, factories.NOW_MS + number))
            if writer.is_due:
                writer.commit(ends, dict.fromkeys(ends, 0))
        writer.commit(ends, dict.fromkeys(ends, 0))
        writer.seal()


def _raw(
    event: Event, topics: dict[str, RecordedTopic], ends: Counter[Partition], at_ms: int
) -> RawRecord:
    topic = topic_of(type(event))
    sent = outgoing(topic, event)
    partition = Partition(topic.name, partition_of(sent.key, topics[topic.name].partitions))
    offset = ends[partition]
    ends[partition] += 1
    return RawRecord(
        position=Position(*partition, offset),
        offsets=(offset,),
        key=sent.key,
        value=b"".join(encode(event)),
        headers=sent.headers,
        timestamp_ms=at_ms,
    )


# The peak that `wait4` tells begins with what the parent had; this one is of the process alone.
_AND_TELL = """
import re, sys, time
from rlstreams.__main__ import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
print(time.process_time(), peak, file=sys.stderr)
sys.exit(status)
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one process."""

    wall_s: float
    cpu_s: float
    resident_mb: float


def cost(words: list[str], cwd: Path) -> Cost:
    """Run `rlstreams` with `words` and see what it took.

    Raises:
        RuntimeError: it failed.
    """
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _AND_TELL, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wall_s = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"rlstreams {' '.join(words)} failed: {done.stderr}")
    cpu_s, peak_kb = done.stderr.split()[-2:]
    return Cost(wall_s, float(cpu_s), float(peak_kb) / 1024)


def measure(folder: Path, num_samples: int) -> dict[str, object]:
    """Write a recording, if it is not there, and ask it; medians of several processes each."""
    if not folder.exists():
        write_recording(folder, num_samples)
    middle = num_samples // 2 // GROUP
    questions = {
        "--help": ["--help"],
        "by id": ["inspect", f"{middle}/3", str(folder)],
        "a group": ["inspect", f"{middle}", str(folder)],
        "worst mismatch": ["inspect", str(folder)],
        "worst staleness": ["inspect", str(folder), "--worst", "staleness"],
        "of a step": ["inspect", str(folder), "--step", str(max(1, num_samples // STEP // 2))],
    }
    answers = {}
    for name, words in questions.items():
        costs = [cost(words, folder) for _ in range(ROUNDS)]
        answers[name] = {
            "wall_s": round(statistics.median(c.wall_s for c in costs), 3),
            "best_wall_s": round(min(c.wall_s for c in costs), 3),
            "cpu_s": round(statistics.median(c.cpu_s for c in costs), 3),
            "resident_mb": round(statistics.median(c.resident_mb for c in costs), 1),
        }
    size_mb = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / 1e6
    return {
        "trajectories": num_samples,
        "recording_mb": round(size_mb, 1),
        "answers": answers,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--folder", default="", help="keeps recordings, and finds them again")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.folder or scratch)
        found = [measure(folder / str(size), size) for size in args.sizes]
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    text = json.dumps({"machine": machine, "recordings": found}, indent=2) + "\n"
    sys.stdout.write(text)
    if args.json:
        Path(args.json).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
