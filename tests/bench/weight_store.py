"""The weight store: bytes and seconds of versions, encodings compared, and old scores again.

    rlstreams up infra/examples/demo.toml --run.id=kept --weights.versions_served=100
    python -m tests.bench.weight_store runs/kept/weights [--json FILE]

Of two runs of versions: the demo's, in float32, and one of 57 million weights in bfloat16 that
AdamW moves at a learning rate of 1e-6, its masters in float32, by gradients of a fixed direction
and as much noise. The files lie in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from safetensors import safe_open

from rlstreams.workers.bootstrap.parts import make_scorers
from rlstreams.workers.config.load import load
from rlstreams.workers.engines.base import TokenSequence
from rlstreams.workers.engines.folder_channel import HeldWeights
from rlstreams.workers.loop.log import get
from rlstreams.workers.weights.layout import manifest_of, size_bytes
from rlstreams.workers.weights.store.at_hand import AtHand
from rlstreams.workers.weights.store.delta import pieces_of
from rlstreams.workers.weights.store.history import HeldVersion, WeightHistory
from rlstreams.workers.weights.store.place import place_of
from rlstreams.workers.weights.store.version_file import Stamp
from rlstreams.workers.weights.store.writer import StoreWriter
from tests.bench.hardware import hardware

Weights = dict[str, torch.Tensor]
WANTED = 17  # the version that a scorer is asked for at the run's end
LR, NUM_STEPS = 1e-6, 5
SHAPES = {
    f"layers.{layer}.{name}": shape
    for layer in range(4)
    for name, shape in {
        "q": (1024, 1024), "k": (256, 1024), "v": (256, 1024), "o": (1024, 1024),
        "gate": (2816, 1024), "up": (2816, 1024), "down": (1024, 2816), "norm": (1024,),
    }.items()
} | {"embed": (12_000, 1024)}  # fmt: skip
CODEC_BYTES = 40_000_000  # of a version, to compare encodings on


def moved_by_adamw() -> Iterator[Weights]:
    """Version 0 and those that steps make, in bfloat16."""
    torch.manual_seed(0)
    start = {n: torch.randn(s) * 0.02 if len(s) > 1 else torch.ones(s) for n, s in SHAPES.items()}
    masters = {n: t.bfloat16().float().requires_grad_() for n, t in start.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    direction = {n: 0.3 * torch.randn(t.shape) for n, t in masters.items()}
    yield {n: t.detach().bfloat16() for n, t in masters.items()}
    for _ in range(NUM_STEPS):
        for name, master in masters.items():
            master.grad = 1e-3 * (direction[name] + torch.randn(master.shape))
        optimizer.step()
        yield {n: t.detach().bfloat16() for n, t in masters.items()}


def seconds_of(work: Callable[[], object], rounds: int = 3) -> float:
    """By the clock, the best."""
    found = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - started_s)
    return round(min(found), 4)


def stored(
    versions: Sequence[Weights],
    rounds: int = 3,
    hashes: Sequence[str] | None = None,
    found: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write them, one anchor alone, and read them: cold, and one behind; the best of `rounds`.

    Args:
        hashes: the versions' own; None: computed here.
        found: gets the figures as they are measured, and is returned.
    """
    found = {} if found is None else found
    known: Sequence[str | None] = hashes or [None] * len(versions)
    with tempfile.TemporaryDirectory() as name:
        place, log = place_of(name), get("bench", "bench", "bench")
        writer = StoreWriter(place, "bench", log, anchor_every=1000, keep=0, deadline_s=600)
        writer.open(1)
        manifests = [
            manifest_of(number, *one)
            for number, one in enumerate(zip(versions, known, strict=True))
        ]
        copied_s = []
        for manifest, tensors in zip(manifests, versions, strict=True):
            copied_s.append(seconds_of(partial(writer.take, manifest, tensors), 1))
            writer.finish(600)
        anchor, *deltas = writer.news()
        writer.close()
        whole = size_bytes(versions[0])
        sizes = [one.files[0].num_bytes for one in deltas]
        found |= {
            "whole_bytes": whole,
            "anchor_bytes": anchor.files[0].num_bytes,
            "delta_bytes_mean": round(statistics.mean(sizes)),
            "delta_bytes_max": max(sizes),
            "times_smaller_mean": round(whole / statistics.mean(sizes), 2),
            "num_deltas": len(deltas),
            "copy_s": min(copied_s[1:]),
            "write_anchor_s": round(anchor.seconds, 4),
            "write_delta_s": round(statistics.median(one.seconds for one in deltas), 4),
        }
        history = WeightHistory(place, "bench")
        last, before = manifests[-1], manifests[-2]
        stamp = Stamp.of(before.policy_version, before.weight_hash)
        follower = history.weights_at(before.policy_version, before.weight_hash, 600)
        reads = {
            "read_one_behind_s": (last, follower),
            "read_one_behind_all_hashed_s": (last, HeldVersion(stamp, versions[-2])),
            "read_anchor_s": (manifests[0], None),
            "read_anchor_and_all_deltas_s": (last, None),
        }
        for figure, (of, base) in reads.items():
            version, text = of.policy_version, of.weight_hash
            read = partial(history.weights_at, version, text, 600, base)
            found[figure] = seconds_of(read, rounds)
    mean = statistics.mean(map(changed, versions, versions[1:]))
    found["words_changed_mean"] = round(mean, 4)
    return found


def changed(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Share of weights that differ."""
    return sum(int((one[n] != other[n]).sum()) for n in one) / sum(t.numel() for t in one.values())


def encodings(one: Weights, other: Weights) -> dict[str, dict[str, float]]:
    """Bytes of a version, by bytes of its difference, and megabytes of it in a second: one core."""

    def planes(words: np.ndarray) -> bytes:
        return words.view(np.uint8).reshape(-1, words.itemsize).T.tobytes()

    def bits(words: np.ndarray) -> bytes:
        rows = words.view(np.uint8).reshape(-1, words.itemsize).T
        return b"".join(np.packbits((rows >> k) & 1, axis=1).tobytes() for k in range(8))

    def folded(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        difference = new - old
        return (difference << 1) ^ (difference >> (8 * difference.itemsize - 1))

    def sparse(words: np.ndarray) -> bytes:
        places = np.flatnonzero(words)
        return planes(np.diff(places, prepend=-1).astype("<u4")) + planes(words[places])

    forms: dict[str, Callable[[np.ndarray, np.ndarray], bytes]] = {
        "xor": lambda old, new: (old ^ new).tobytes(),
        "xor, byte planes": lambda old, new: planes(old ^ new),
        "xor, bit planes": lambda old, new: bits(old ^ new),
        "xor, gaps and byte planes": lambda old, new: sparse(old ^ new),
        "difference, byte planes": lambda old, new: planes(folded(old, new)),
        "difference, gaps and byte planes": lambda old, new: sparse(folded(old, new)),
    }
    libraries: dict[str, Callable[[bytes], bytes]] = {
        "zstd 1": lambda data: zstandard.ZstdCompressor(level=1).compress(data),
        "zstd 3": lambda data: zstandard.ZstdCompressor(level=3).compress(data),
        "zstd 9": lambda data: zstandard.ZstdCompressor(level=9).compress(data),
        "zlib 1": lambda data: zlib.compress(data, 1),
        "zlib 6": lambda data: zlib.compress(data, 6),
    }
    pairs, size = [], 0
    for name in one:
        pairs += list(zip(pieces_of(one[name]), pieces_of(other[name]), strict=True))
        size = sum(words.nbytes for words, _ in pairs)
        if size > CODEC_BYTES:
            break
    found: dict[str, dict[str, float]] = {}
    for form, make in forms.items():
        started_s = time.process_time()
        raw = [make(old, new) for old, new in pairs]
        made_s = time.process_time() - started_s
        for library, compress in libraries.items():
            started_s = time.process_time()
            num_bytes = sum(len(compress(data)) for data in raw)
            took_s = made_s + time.process_time() - started_s
            row = {"times_smaller": round(size / num_bytes, 2), "mb_s": round(size / 1e6 / took_s)}
            found[f"{form}; {library}"] = row
    return found


def kept(folder: Path) -> list[Weights]:
    """All versions of a run, as its whole files have them."""
    hashes = {}
    for path in folder.glob("v*-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            facts = file.metadata()
        hashes[int(facts["policy_version"])] = facts["weight_hash"]
    at_hand = AtHand("", hashes, [folder])
    return [at_hand.weights_at(version) for version in sorted(hashes)]


def scored_again(versions: Sequence[Weights]) -> dict[str, Any]:
    """A scorer that holds `WANTED` as it was made, and a fresh one that reads it from a store whose
    newest version is the run's last: log-probs and entropies of the same rows, byte by byte."""
    config = load([Path(__file__).parents[2] / "infra/examples/demo.toml"], [])
    with tempfile.TemporaryDirectory() as name:
        place, log = place_of(name), get("bench", "bench", "bench")
        section = config.store
        writer = StoreWriter(
            place, "bench", log, anchor_every=section.anchor_every, keep=0, deadline_s=600
        )
        writer.open(1)
        hashes = {}
        for number, tensors in enumerate(versions):
            manifest = manifest_of(number, tensors, None)
            hashes[number] = manifest.weight_hash
            writer.take(manifest, tensors)
            writer.finish(600)
        writer.close()
        held = HeldWeights(dict(sorted(versions[WANTED].items())), "bench", WANTED)
        assert held.published.weight_hash == hashes[WANTED]
        found = []
        for source in (held, AtHand("bench", hashes, [name])):
            scorer, _ = make_scorers(config)
            scorer.pull(held.published, source)
            draw = np.random.default_rng(0)
            rows = [
                TokenSequence(token_ids=draw.integers(4, scorer.vocab_size, 24).astype(np.int32))
                for _ in range(256)
            ]
            scores = scorer.score(rows, WANTED, 1.0)
            found.append([(one.logprobs.tobytes(), one.entropy.tobytes()) for one in scores])
        return {
            "version": WANTED,
            "newest_version": len(versions) - 1,
            "rows": len(found[0]),
            "rows_equal_to_the_bit": sum(map(eq, *found)),
            "store_bytes": sum(path.stat().st_size for path in Path(name).iterdir()),
            "whole_bytes": sum(map(size_bytes, versions)),
        }


def main() -> int:
    """Print the results as JSON, and keep them if asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("weights", type=Path, help="a folder of all versions of the demo")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    demo = kept(options.weights)
    scores, large = scored_again(demo), list(moved_by_adamw())
    results = {
        "scored_at_the_end": scores,
        "demo_float32": stored(demo) | {"num_weights": sum(t.numel() for t in demo[0].values())},
        "adamw_1e-6_bfloat16": stored(large)
        | {"num_weights": sum(tensor.numel() for tensor in large[0].values())},
        "encodings": {
            "demo_float32": encodings(demo[len(demo) // 2], demo[len(demo) // 2 + 1]),
            "adamw_1e-6_bfloat16": encodings(large[2], large[3]),
        },
    }
    text = json.dumps({"hardware": hardware(), "results": results}, indent=2) + "\n"
    sys.stdout.write(text)
    if options.json:
        options.json.write_text(text, encoding="utf-8")
    return 0 if scores["rows_equal_to_the_bit"] == scores["rows"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
