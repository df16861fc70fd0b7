"""One of 100,000 recorded samples by id: opening the recording, its group, decoded; and memory.

    python tests/bench/recording.py [--samples 100000] [--json FILE]

The recording is made without a broker; nothing is held from one search to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlstreams.schemas.events import Tensor
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.parts import whole
from rlstreams.streams.log.record import Outgoing, Partition, Position, RawRecord
from rlstreams.streams.log.topics import SCORED
from rlstreams.streams.recording import Recording, RecordingManifest, RecordingWriter
from tests import factories

TOKENS = 64


def samples(count: int) -> Iterator[Outgoing]:
    """Scored trajectories whose log-probs do not compress."""
    draw = np.random.default_rng(0)
    for number in range(count):
        policy = factories.policy_segment(
            TOKENS, behavior_logprobs=Tensor.of(-draw.random(TOKENS, np.float32))
        )
        trajectory = factories.trajectory(
            group_id=str(number // 8),
            sample=number % 8,
            group_size=8,
            segments=(factories.prompt_segment(16), policy),
        )
        score = factories.score(
            TOKENS, proximal_logprobs=Tensor.of(-draw.random(TOKENS, np.float32))
        )
        event = replace(factories.scored(trajectory), scores=(score,))
        yield outgoing(SCORED, event, partition=number // 8 % 2)


def by_id(folder: Path, count: int) -> list[float]:
    """Seconds from nothing open to the decoded event."""
    taken = []
    for number in np.random.default_rng(1).integers(0, count, 20).tolist():
        started_s = time.monotonic()
        with Recording(folder) as recording:
            group = recording.keyed(SCORED.name, [str(number // 8).encode()])
            events = [recording.decoded(raw).event for raw in group]
            assert number % 8 in [e.trajectory.sample for e in events]  # type: ignore[union-attr]
        taken.append(time.monotonic() - started_s)
    return taken


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def record_alone(folder: Path, count: int) -> None:
    """A large recording, without a broker."""
    manifest = RecordingManifest(run="bench", started_at_ms=0)
    at = [0, 0]
    with RecordingWriter(folder, manifest) as writer:
        for number, record_ in enumerate(samples(count)):
            partition = record_.partition or 0
            raw = RawRecord(
                position=Position(SCORED.name, partition, at[partition]),
                offsets=(at[partition],),
                key=record_.key,
                value=whole(record_.value),
                headers=record_.headers,
                timestamp_ms=factories.NOW_MS + number,
            )
            at[partition] += 1
            writer.append(raw)
            if writer.is_due:
                writer.commit({Partition(SCORED.name, p): at[p] for p in (0, 1)}, {})
        writer.commit({Partition(SCORED.name, p): at[p] for p in (0, 1)}, {})
        writer.seal()


def measure_large(count: int, folder: Path) -> dict[str, object]:
    record_alone(folder, count)
    ids = by_id(folder, count)
    before_mb = peak_mb()
    with Recording(folder) as recording:
        assert count == sum(1 for _ in recording.records())
    return {
        "samples": count,
        "by_id_median_ms": round(1000 * sorted(ids)[len(ids) // 2], 1),
        "by_id_worst_ms": round(1000 * max(ids), 1),
        "peak_mb_before_reading_all": round(before_mb, 1),
        "peak_mb_after_reading_all": round(peak_mb(), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="rlstreams-bench-"))
    try:
        found = measure_large(args.samples, scratch / "large")
    finally:
        shutil.rmtree(scratch)
    found |= {"cores": os.cpu_count(), "machine": platform.machine()}
    found |= {"python": platform.python_version(), "load": os.getloadavg()[0]}
    text = json.dumps(found, indent=1)
    sys.stdout.write(text + "\n")
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
