"""Routes that a real server records, against the library's: aligned, and worth replaying.

    python -m tests.gpu.routing_replay vllm --python PYTHON --model FOLDER --device cuda
    python -m tests.gpu.routing_replay sglang --python PYTHON --model FOLDER --device cuda
    python -m tests.gpu.routing_replay builtin --model FOLDER

Samples from a server that is filled with the folder's weights, passes the same tokens through the
Hugging Face model, and compares by (token, layer): the server's row t must be what the library's
router chooses at position t, and not at t - 1 or t + 1. Then the log-probs of sampled tokens, with
and without replay. `builtin` samples in this process: what a laptop can try. Fails if rows are
missing or not aligned, or if replay does not bring the two closer where routes differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstreams.workers.engines.base import TokenSequence
from rlstreams.workers.engines.builtin import BuiltinEngine
from rlstreams.workers.engines.routing_check import check_replay
from rlstreams.workers.engines.selfcheck import check_scoring
from rlstreams.workers.model.model import configure_torch, load_model, right_padded, weights_of
from rlstreams.workers.model.routes import padded_routes
from rlstreams.workers.model.routing import RouterCapture, Routes
from rlstreams.workers.model.token_scores import TokenScorer
from rlstreams.workers.model.tokenizer import Tokenizer
from rlstreams.workers.rollout.trajectory import stitch_experts
from rlstreams.workers.weights.file import FileWeightChannel, FileWeightServer
from tests.contract.engine_rigs import announced, collect, request, tokens
from tests.gpu.engine_contract import Bench

BUILTIN = "builtin"
ALIGNED = 0.5  # share of equal sets at the right position; at another one it is near chance


class Passed:
    """What the library says of sampled sequences."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        configure_torch(4, device, fused=True)
        model: Any = load_model(folder, dtype)
        vocab_size = model.config.get_text_config().vocab_size
        mask = check_scoring(model, vocab_size)
        self.shape = check_replay(model, vocab_size)
        self.device = torch.device(device)
        self.scorer = TokenScorer(model.to(self.device), mask)

    @torch.inference_mode()
    def score(self, sequences: Sequence[TokenSequence], *, replayed: bool) -> tuple[Any, Any, int]:
        """Log-probs (B, T), 0 where nothing is predicted; free routes (B, T, L, K); flips."""
        padded = right_padded([s.token_ids for s in sequences], pad_id=0)
        ids_BT, real_BT = (tensor.to(self.device) for tensor in padded)
        chosen_BT = real_BT.clone()
        chosen_BT[:, :1] = False
        rows = [(s.routed_experts, s.routed_experts_mask) for s in sequences]
        arrays = padded_routes(rows, ids_BT.shape[1])
        assert arrays is not None, "the sampler recorded no routes"
        routes = Routes(*(torch.from_numpy(array).to(self.device) for array in arrays))
        ones_N = torch.ones(int(chosen_BT.sum()), device=self.device)
        capture = RouterCapture(self.scorer.model)
        with self.scorer.routing.replaying(routes if replayed else None) as counted:
            scores = self.scorer(ids_BT, real_BT, chosen_BT, ones_N)
        taken_BTLK = capture.take(len(sequences)).cpu().numpy()
        capture.close()
        logprobs_BT = torch.zeros(ids_BT.shape, device=self.device)
        logprobs_BT[chosen_BT] = scores.logprobs_N
        return logprobs_BT.cpu().numpy(), taken_BTLK, counted.num_flips


async def sampled(engine: Any, published: Any, prompts: Sequence[Any], args: Any) -> list[Any]:
    """Whole sequences with their rows, and the sampler's log-probs of the answers."""
    await engine.start()
    await engine.pull(published, FileWeightChannel())
    wanted = [
        request(f"{n}/0/0", token_ids=ids, max_new_tokens=args.tokens)
        for n, ids in enumerate(prompts)
    ]
    answers = await asyncio.gather(*(collect(engine, one) for one in wanted))
    await engine.close()
    found = []
    for ids, segments in zip(prompts, answers, strict=True):
        experts, mask = stitch_experts(segments, len(ids))
        whole = np.concatenate([ids, np.array(tokens(segments), np.int32)])
        sequence = TokenSequence(token_ids=whole, routed_experts=experts, routed_experts_mask=mask)
        found.append((sequence, np.concatenate([s.logprobs for s in segments])))
    return found


def share_equal(recorded: Sequence[Any], free_BTLK: Any, shift: int) -> float:
    """Of (token, layer) rows whose sets are equal to the library's `shift` positions later."""
    equal = []
    for rows, free_TLK in zip(recorded, free_BTLK, strict=True):
        at = np.arange(max(0, -shift), len(rows) - max(0, shift))
        equal.append((np.sort(rows[at], -1) == np.sort(free_TLK[at + shift], -1)).all(-1))
    return float(np.concatenate([part.ravel() for part in equal]).mean())


def gaps(found: Sequence[Any], free_BTLK: Any, scored: Sequence[Any]) -> dict[str, Any]:
    """Distance of log-probs from the sampler's, free and replayed: of all sampled tokens, and of
    those whose own position routes otherwise in some layer."""
    of_all: list[list[Any]] = [[], []]
    of_flipped: list[list[Any]] = [[], []]
    for row, (sequence, logprobs) in enumerate(found):
        start, end = len(sequence.token_ids) - len(logprobs), len(sequence.token_ids)
        at = slice(start - 1, end - 1)  # what predicts them
        rows, free = sequence.routed_experts[at], free_BTLK[row][at]
        flipped = (np.sort(rows, -1) != np.sort(free, -1)).any((1, 2))
        for place, logprobs_BT in enumerate(scored):
            gap = np.abs(logprobs_BT[row, start:end] - logprobs)
            of_all[place].append(gap)
            of_flipped[place].append(gap[flipped])
    told = {}
    for name, parts in (("all", of_all), ("flipped", of_flipped)):
        free, replayed = (np.concatenate(part) for part in parts)
        told[name] = {"tokens": len(free)}
        for kind, values in (("free", free), ("replayed", replayed)):
            if len(values):
                told[name] |= {f"{kind}_mean": float(values.mean()),
                               f"{kind}_max": float(values.max())}  # fmt: skip
    return told


def compared(found: Sequence[Any], folder: Path, dtype: str, device: str) -> dict[str, Any]:
    """Alignment and distances, against the library in `dtype`."""
    passed = Passed(folder, dtype, device)
    sequences = [sequence for sequence, _ in found]
    free_BT, free_BTLK, _ = passed.score(sequences, replayed=False)
    replayed_BT, taken_BTLK, flips = passed.score(sequences, replayed=True)
    recorded = [sequence.routed_experts for sequence in sequences]
    rows = sum(len(one) for one in recorded) * passed.shape.num_layers
    for row, one in enumerate(recorded):
        assert (taken_BTLK[row, : len(one)] == one).all(), "the forward took other routes than told"
    shares = {shift: share_equal(recorded, free_BTLK, shift) for shift in (-1, 0, 1)}
    told = {
        "dtype": dtype,
        "device": device,
        "rows": rows,
        "routing_flips": flips / rows,
        "equal_sets_by_shift": {str(shift): share for shift, share in shares.items()},
        "logprob_gap": gaps(found, free_BTLK, (free_BT, replayed_BT)),
    }
    told["aligned"] = shares[0] > ALIGNED and shares[0] > 1.2 * max(shares[-1], shares[1])
    flipped = told["logprob_gap"]["flipped"]
    told["closer"] = not flipped["tokens"] or flipped["replayed_mean"] < flipped["free_mean"]
    return told


def make(args: argparse.Namespace, folder: Path) -> tuple[Any, Any, Bench | None]:
    """The sampler, the version that it is to hold, and what to close."""
    if args.kind != BUILTIN:
        bench = Bench(args, folder)
        return bench.engine(args, bench.url), bench.publish(0), bench
    server = FileWeightServer(folder / "weights", keep=2)
    version = server.publish(0, weights_of(load_model(args.model, args.sampler_dtype)))
    engine = BuiltinEngine(args.model, slots=args.prompts, dtype=args.sampler_dtype)
    return engine, announced(server, version), None


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, and fail if something is off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["vllm", "sglang", BUILTIN])
    parser.add_argument("--model", required=True, help="Hugging Face folder of a small MoE")
    parser.add_argument("--python", default="", help="of the server's environment")
    parser.add_argument("--url", default="", help="of a running server, instead")
    parser.add_argument("--arg", action="append", default=[], help="NAME=VALUE for the server")
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE for the server")
    parser.add_argument("--device", default="cpu", help="of the Hugging Face model")
    parser.add_argument("--sampler-dtype", default="float32", help="of the built-in sampler")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="per answer, at most")
    parser.add_argument("--log", default="engine.log", help="of the server")
    parser.add_argument("--json", default="")
    args = parser.parse_args(argv)
    args.experts, args.record, args.model = True, "", Path(args.model).resolve()
    tokenizer = Tokenizer.load(args.model)
    rng = np.random.default_rng(0)
    texts = ["+".join(map(str, rng.integers(1, 10, 4))) + "=" for _ in range(args.prompts)]
    prompts = [np.array(tokenizer.encode(text), np.int32) for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        engine, published, bench = make(args, Path(folder))
        try:
            found = asyncio.run(sampled(engine, published, prompts, args))
            name = engine.name
        finally:
            if bench is not None:
                bench.listener.close()
                if bench.process is not None:
                    bench.process.end()
    told: dict[str, Any] = {"sampler": name, "model": args.model.name, "prompts": args.prompts}
    told["tokens"] = sum(len(logprobs) for _, logprobs in found)
    # vLLM 0.25.1 loses the routes of a stream whose last two events it merges (RequestOutput.add).
    with_rows = [one for one in found if one[0].routed_experts is not None]
    told["samples_without_rows"] = len(found) - len(with_rows)
    found = with_rows
    told["rows_missing"] = sum(
        int((s.routed_experts_mask == 0).sum())
        for s, _ in found
        if s.routed_experts_mask is not None
    )
    told["against"] = [
        compared(found, args.model, dtype, args.device) for dtype in ("float32", "bfloat16")
    ]
    print(json.dumps(told, indent=2))  # noqa: T201
    if args.json:
        Path(args.json).write_text(json.dumps(told, indent=2) + "\n", "utf-8")
    is_missing = told["rows_missing"] or told["samples_without_rows"]
    if is_missing or not all(one["aligned"] and one["closer"] for one in told["against"]):
        raise SystemExit("rows are missing, are not aligned, or replay does not help: see above")


if __name__ == "__main__":
    main()
