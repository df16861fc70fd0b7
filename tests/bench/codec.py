"""Codec alone: encode, join and decode a trajectory, as multiples of a plain copy of its arrays.

    python tests/bench/codec.py

Goals: M at most 3 times the copy, L at most 1.3 times. The best of many short rounds is reported;
copy and codec take turns, so that both see the same machine.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from schemas import Segment, Tensor, Trajectory, decode, encode

Work = Callable[[], object]


def payload(num_tokens: int, num_layers: int = 0, top_k: int = 0) -> tuple[Trajectory, int]:
    """A trajectory of one prompt and one policy segment, and the bytes of the latter's arrays."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 150_000, num_tokens).astype(np.int32)
    logprobs = -rng.random(num_tokens, np.float32)
    experts = rng.integers(0, 128, (num_tokens, num_layers, top_k)).astype(np.uint8)
    policy = Segment(
        author="policy",
        token_ids=Tensor.of(ids),
        behavior_logprobs=Tensor.of(logprobs),
        policy_version=3,
        weight_hash="ab" * 32,
        load_id="rollout-0/3",
        finish_reason="stop",
    )
    event = Trajectory(
        group_id="17",
        sample=3,
        attempt=0,
        group_size=8,
        purpose="train",
        row=17,
        dataset_epoch=0,
        replacement=0,
        segments=(Segment(author="prompt", token_ids=Tensor.of(ids[:20])), policy),
        reward=1.0,
        routed_experts=Tensor.of(experts) if experts.size else None,
        engine="builtin 1",
        worker="rollout-0",
        instance="5f0c2b",
        prompt_partition=1,
        prompt_offset=100,
        started_at_ms=1_795_000_000_000,
        finished_at_ms=1_795_000_000_100,
    )
    return event, ids.nbytes + logprobs.nbytes + experts.nbytes


def best_us(works: list[Work], rounds: int, repeats: int) -> list[float]:
    """Microseconds of each, the best of `rounds` of `repeats` calls, taken in turns."""
    best = [float("inf")] * len(works)
    for _ in range(rounds):
        for number, work in enumerate(works):
            start = time.perf_counter()
            for _ in range(repeats):
                work()
            best[number] = min(best[number], (time.perf_counter() - start) / repeats * 1e6)
    return best


def measure(event: Trajectory, num_bytes: int, repeats: int) -> dict[str, float]:
    """One payload."""
    source, target = np.ones(num_bytes, np.uint8), np.empty(num_bytes, np.uint8)
    record = b"".join(encode(event))

    def arrays() -> None:
        for segment in decode(record).segments:
            segment.token_ids.numpy()
            if segment.behavior_logprobs is not None:
                segment.behavior_logprobs.numpy()

    copy, parts, joined, decoded, viewed = best_us(
        [
            lambda: np.copyto(target, source),
            lambda: encode(event),
            lambda: b"".join(encode(event)),
            lambda: decode(record),
            arrays,
        ],
        rounds=60,
        repeats=repeats,
    )
    return {
        "bytes": num_bytes,
        "wire_bytes": len(record),
        "copy_us": round(copy, 2),
        "encode_to_buffers_us": round(parts, 2),
        "encode_and_join_us": round(joined, 2),
        "decode_us": round(decoded, 2),
        "decode_to_arrays_us": round(viewed, 2),
        "codec_over_copy": round((joined + decoded) / copy, 2),
        "codec_to_arrays_over_copy": round((joined + viewed) / copy, 2),
    }


def main() -> None:
    """Print the results as JSON."""
    shapes = {"S": (1024,), "M": (16384,), "L": (8192, 48, 8)}
    results = {
        name: measure(*payload(*shape), repeats=20 if name == "L" else 200)
        for name, shape in shapes.items()
    }
    sys.stdout.write(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
