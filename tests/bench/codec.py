"""Codec alone: encode, join and decode a trajectory, as multiples of a plain copy of its arrays.

    python tests/bench/codec.py [--save]

Goals: M at most 3 times the copy, L at most 1.3 times. The best of many short rounds is reported;
copy and codec take turns, so that both see the same machine. The copied bytes fit into the
processor's cache, as a copy's always do in such loops; see `fixed_us` for what a record costs
whatever its size: that, and not the bytes, is what keeps M above its goal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlstreams.schemas import Segment, Tensor, Trajectory, decode, encode
from tests.bench.hardware import hardware

Work = Callable[[], object]

ROUNDS = 100


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

    def arrays(record: bytes) -> None:
        for segment in decode(record).segments:
            segment.token_ids.numpy()
            if segment.behavior_logprobs is not None:
                segment.behavior_logprobs.numpy()

    copy, parts, joined, decoded, viewed = best_us(
        [
            lambda: [np.copyto(target, source) for source in sources],
            lambda: [encode(event) for event in events],
            lambda: [len(b"".join(encode(event))) for event in events],
            lambda: [decode(record) and None for record in records],
            lambda: [arrays(record) for record in records],
        ],
        num_records,
    )
    return {
        "bytes": num_bytes,
        "wire_bytes": len(records[0]),
        "copy_us": round(copy, 2),
        "encode_to_buffers_us": round(parts, 2),
        "encode_and_join_us": round(joined, 2),
        "decode_us": round(decoded, 2),
        "decode_to_arrays_us": round(viewed, 2),
        "codec_over_copy": round((joined + decoded) / copy, 2),
        "codec_to_arrays_over_copy": round((joined + viewed) / copy, 2),
        "fixed_us": round(parts + decoded, 2),
    }


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
