"""The Markov chain of `FakeEngine` as a model server: state and sampling, without HTTP.

It promises what the real ones do: paused requests freeze, aborted ones are answered with what they
have, each token is labelled by the version that the server was told it holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from rlstreams.workers.engines.sampling import Draw, sample
from tests.fake_engine import EOS, MAX_TOKENS, NUM_EXPERTS, VOCAB_SIZE, fake_weights

_STILL_S = 0.001  # between two looks of a job that stands still
START_LABEL = "default"  # until it is told another


@dataclass
class Job:
    """One request in the server."""

    request_id: str
    given: list[int]
    limit: int
    sampling: dict[str, Any]
    seed: int
    eos_ids: set[int]
    experts_start: int | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)  # how often weights had been loaded, per token
    finish_reason: str | None = None
    aborted: bool = False

    def spans(self) -> list[dict[str, object]]:
        """Runs of equal labels."""
        spans: list[dict[str, object]] = []
        for position, label in enumerate(self.labels):
            if spans and spans[-1]["version"] == label:
                spans[-1]["end"] = position + 1
            else:
                spans.append({"version": label, "start": position, "end": position + 1})
        return spans

    def experts(self) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
        """As `FakeEngine`: token t goes to experts t mod 4 and (t + 1) mod 4 of one layer."""
        forwarded = np.array([*self.given, *self.token_ids][self.experts_start : -1], np.int64)
        rows = np.stack([forwarded, forwarded + 1], -1)[:, None, :] % NUM_EXPERTS
        return rows.astype(np.uint8)


class MarkovServer:
    """Holds a table; samples one token of each job per step."""

    def __init__(self, *, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self.holds = False  # whoever has `holds_at` tokens stands still, until the next pause
        self.holds_at = 1
        self.more = 0  # behind a pause, whoever has so many tokens more stands still again; 0: no
        self.table = fake_weights(999)["table"]  # as loaded with `dummy`: answers nonsense
        self.num_loads = 0
        self.label = START_LABEL
        self.paused = False
        self.is_asleep = False
        self.num_waiting = self.num_preemptions = 0  # what its gauges say
        self.cache_share = 0.0
        self.jobs: dict[str, Job] = {}

    def load(self, folder: str) -> None:
        """A folder that holds `model.safetensors`."""
        self.table = load_file(Path(folder) / "model.safetensors")["table"]
        self.num_loads += 1

    def sleep(self) -> None:
        """Weights are lost."""
        assert not self.jobs, "a real server dies of this, or refuses"
        self.table, self.label, self.is_asleep = fake_weights(999)["table"], START_LABEL, True

    def pause(self, *, aborts: bool) -> None:
        """Freeze all jobs, or end them; whom `holds` held stands still until the resumption."""
        longest = max((len(job.token_ids) for job in self.jobs.values()), default=0)
        self.paused, self.holds, self.holds_at = True, self.more > 0, max(1, longest + self.more)
        for request_id in list(self.jobs) if aborts else ():
            self.abort(request_id)

    def _holds(self, job: Job) -> bool:
        return self.holds and len(job.token_ids) >= self.holds_at

    def abort(self, request_id: str) -> None:
        """End one job; unknown ids are ignored."""
        if request_id in self.jobs:
            self.jobs[request_id].aborted = True

    async def run(self, job: Job) -> AsyncIterator[None]:
        """Sample to the end; yields after every token, and once at the end."""
        assert all(0 <= t < VOCAB_SIZE for t in job.given), "a real server dies of this"
        self.jobs[job.request_id] = job
        generator = np.random.default_rng(job.seed)
        draw = Draw(
            uniform_N=torch.zeros(1, dtype=torch.float64),
            temperature_N=torch.tensor([job.sampling["temperature"]]),
            top_p_N=torch.tensor([job.sampling["top_p"]]),
            top_k_N=torch.tensor([max(0, int(job.sampling["top_k"]))]),
        )
        try:
            while job.finish_reason is None:
                is_still = self.paused or self._holds(job)
                await asyncio.sleep(_STILL_S if is_still else self.step_s)
                if job.aborted:
                    job.finish_reason = "abort"
                elif self.paused or self._holds(job):
                    continue
                else:
                    draw.uniform_N[0] = generator.random()
                    self._append(job, draw)
                yield
        finally:
            self.jobs.pop(job.request_id, None)

    def _append(self, job: Job, draw: Draw) -> None:
        assert not self.is_asleep, "it samples without memory"
        last = (job.token_ids or job.given)[-1]
        ids_N, logprobs_N = sample(self.table[last][None], draw)
        job.token_ids.append(int(ids_N))
        job.logprobs.append(float(logprobs_N))
        job.labels.append(self.label)
        job.loads.append(self.num_loads)
        length = len(job.given) + len(job.token_ids)
        if job.token_ids[-1] in job.eos_ids:
            job.finish_reason = "stop"
        elif len(job.token_ids) >= job.limit or length >= MAX_TOKENS:
            job.finish_reason = "length"


CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_TOKENS,
    "num_hidden_layers": 1,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "eos_token_id": EOS,
}
