"""Codec alone, in microseconds a trajectory: ours, fastavro's, and a plain copy of the arrays.

    python tests/bench/codec.py [--save]

The best of many short rounds is reported; the works take turns, so that all see the same machine.
fastavro gets dicts that are already there, and leaves dicts and bytes.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from fastavro import schemaless_reader, schemaless_writer

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlstreams.schemas import Segment, Tensor, Trajectory, decode, encode, schema_text
from rlstreams.schemas.avro import parsing_form
from rlstreams.schemas.binary import HEADER_BYTES
from rlstreams.schemas.projection import Projection
from tests.bench.hardware import hardware
from tests.plain_events import to_plain

Work = Callable[[], object]

ROUNDS = 100
FIELDS = (
    *("group_id", "sample", "group_size"),
    *("segments.author", "segments.policy_version", "segments.token_ids.shape"),
)


def payload(
    number: int, num_tokens: int, num_layers: int = 0, top_k: int = 0
) -> tuple[Trajectory, int]:
    """A trajectory of one prompt and one policy segment, and the bytes of the latter's arrays.

    `number` changes what differs between samples: ids, worker, version, prompt, position, times.
    """
    rng = np.random.default_rng(number)
    ids = rng.integers(0, 150_000, num_tokens).astype(np.int32)
    logprobs = -rng.random(num_tokens, np.float32)
    experts = rng.integers(0, 128, (num_tokens, num_layers, top_k)).astype(np.uint8)
    policy = Segment(
        author="policy",
        token_ids=Tensor.of(ids),
        behavior_logprobs=Tensor.of(logprobs),
        policy_version=number % 3,
        weight_hash=f"{number % 3:02d}" * 32,
        load_id=f"rollout-{number % 16}/{number % 3}",
        finish_reason="stop",
    )
    event = Trajectory(
        group_id=str(number // 8),
        sample=number % 8,
        attempt=0,
        group_size=8,
        purpose="train",
        row=number // 8,
        dataset_epoch=0,
        replacement=0,
        segments=(Segment(author="prompt", token_ids=Tensor.of(ids[: 20 + number % 9])), policy),
        reward=1.0,
        routed_experts=Tensor.of(experts) if experts.size else None,
        engine="builtin 1",
        worker=f"rollout-{number % 16}",
        instance=f"5f0c2b{number % 16}",
        prompt_partition=1,
        prompt_offset=1000 + number,
        started_at_ms=1_795_000_000_000 + 37 * number,
        finished_at_ms=1_795_000_000_100 + 41 * number,
    )
    return event, ids.nbytes + logprobs.nbytes + experts.nbytes


def best_us(works: list[Work], calls: int) -> list[float]:
    """Microseconds of one of the `calls` that each work makes; the best round, taken in turns."""
    best = [float("inf")] * len(works)
    for _ in range(ROUNDS):
        for number, work in enumerate(works):
            start = time.perf_counter()
            work()
            best[number] = min(best[number], (time.perf_counter() - start) / calls * 1e6)
    return best


def measure(shape: tuple[int, ...], num_records: int) -> dict[str, float]:
    """One payload, as `num_records` different samples."""
    samples = [payload(number, *shape) for number in range(num_records)]
    events = [event for event, _ in samples]
    num_bytes = samples[0][1]
    records = [b"".join(encode(event)) for event in events]
    sources = [np.full(num_bytes, number % 256, np.uint8) for number in range(num_records)]
    target = np.empty(num_bytes, np.uint8)
    plain = [to_plain(event) for event in events]
    bodies = [record[HEADER_BYTES:] for record in records]
    schema = parsing_form(schema_text("Trajectory"))
    projection = Projection(Trajectory, *FIELDS)

    works: dict[str, Work] = {
        "copy_us": lambda: [np.copyto(target, source) for source in sources],
        "encode_us": lambda: [encode(event) and None for event in events],
        "encode_and_join_us": lambda: [len(b"".join(encode(event))) for event in events],
        "decode_us": lambda: [decode(record) and None for record in records],
        "project_6_fields_us": lambda: [projection.read(record) and None for record in records],
        "fastavro_encode_us": lambda: [
            schemaless_writer(io.BytesIO(), schema, event) for event in plain
        ],
        "fastavro_decode_us": lambda: [
            schemaless_reader(io.BytesIO(body), schema, None) and None for body in bodies
        ],
    }
    best = best_us(list(works.values()), num_records)
    sizes = {"bytes": num_bytes, "wire_bytes": len(records[0])}
    return sizes | {name: round(us, 2) for name, us in zip(works, best, strict=True)}


def main() -> None:
    """Print the results as JSON, and keep them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", action="store_true", help="write results/codec-<date>.json")
    options = parser.parse_args()
    shapes = {"S": (1024,), "M": (16384,), "L": (8192, 48, 8)}
    results = {
        name: measure(shape, num_records=8 if name == "L" else 48) for name, shape in shapes.items()
    }
    text = json.dumps({"hardware": hardware(), "results": results}, indent=2) + "\n"
    sys.stdout.write(text)
    if options.save:
        path = Path(__file__).parent / f"results/codec-{time.strftime('%Y-%m-%d')}.json"
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
