"""Scorer of several ranks: each holds its rows of every version (FSDP2), and computes its bins.

It lies beside the trainer's ranks because both are started, watched and sharded alike. Which rank
computes a bin follows from the cut alone, and a bin is computed as one rank would, so N ranks give
the bits of one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.compute import group
from rlstreams.workers.compute.link import Meeting
from rlstreams.workers.compute.score import (
    TOKEN_BUDGET,
    Forward,
    Part,
    check_all,
    cut_of,
    in_order,
    parts_of,
)
from rlstreams.workers.compute.shards import Shards, plan_of
from rlstreams.workers.compute.team import Team
from rlstreams.workers.engines.base import Scores, TokenSequence, pulled_of
from rlstreams.workers.engines.selfcheck import load_scorer
from rlstreams.workers.model.base import EngineError, RankLostError
from rlstreams.workers.model.bins import use_bins
from rlstreams.workers.model.folder import read_config, token_limit, vocab_size_of
from rlstreams.workers.model.model import FLOAT32, configure_torch
from rlstreams.workers.model.offload import OffLoad
from rlstreams.workers.model.token_scores import Score
from rlstreams.workers.trainer.learn.trainable import AllWeights
from rlstreams.workers.weights.channel import Pulled, WeightChannel, WeightError
from rlstreams.workers.weights.layout import layout_difference, layout_of, size_bytes

BUCKET_BYTES = 256_000_000  # of weights that are scattered between two windows
_NOTHING: Part = ([TokenSequence(token_ids=np.zeros(2, np.int32))], 0)
Found = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]  # log-probs, entropies of a forward


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSpec:
    """What makes a rank; the same on all, but for its number."""

    folder: Path
    device: str
    dtype: str
    threads: int
    host: str
    size: int
    replay_routes: bool
    token_budget: int
    rank: int = 0

    def begin(self, meeting: Meeting) -> RankScorer:
        """This process as a rank."""
        configure_torch(self.threads, self.device, fused=True)
        return RankScorer(self, meeting)


class RankScorer:
    """One rank. Whatever gathers or scatters is called by all of them in the same order."""

    def __init__(self, spec: ScorerSpec, meeting: Meeting) -> None:
        """Meets the other ranks there.

        Raises:
            ConfigError, EngineError: a model that cannot be scored so.
        """
        self._spec = spec
        mesh = group.join(meeting, spec.rank, spec.size, spec.device, spec.host)
        scorer, self.routers = load_scorer(
            spec.folder, spec.dtype, replay_routes=spec.replay_routes
        )
        self.plan = plan_of(scorer.model, AllWeights(scorer.model))
        self._shards = Shards(scorer, mesh, "logprob.ranks")
        root = cast(Score, self._shards.root)
        self.why_padded, self.why_eager = use_bins(
            scorer, spec.device, spec.token_budget, learns=False, root=root
        )
        self._shards.reshard()
        self._forward = Forward(self._shards.root, torch.device(spec.device), self.routers)
        self._held: dict[int, dict[str, Tensor]] = {}  # by version, this rank's rows by path
        self._coming: dict[str, Tensor] = {}
        self._off_load = OffLoad(spec.device)
        self._loaded: int | None = None  # the version that the model computes with

    def take(
        self,
        held: Collection[int],
        names: Sequence[str],
        is_first: bool,
        whole: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take this rank's rows of parameters of a version that comes.

        Args:
            held: versions that are held still; the others are dropped.
            whole: by name, on rank 0.
        """
        self._drop_others(held)
        if is_first:
            self._coming = {}
        for name in names:
            path = self.plan.published[name]
            rows = torch.empty_like(self._shards.rows[path], requires_grad=False)
            given = None if whole is None else whole[name]
            self._shards.scatter(path, given, rows)
            self._coming[path] = rows

    def adopt(self, held: Collection[int], version: int) -> None:
        """Hold what came as this version."""
        self._drop_others(held)
        self._held[version], self._coming = self._coming, {}

    @torch.no_grad()
    def local_scores(
        self, held: Collection[int], version: int, temperature: float, hand: Sequence[Part | None]
    ) -> list[Found]:
        """This rank's forwards; None: it passes two tokens, for the others wait in each layer.

        Args:
            held: versions that are held still; the others are dropped.
        """
        self._drop_others(held)
        if version != self._loaded:
            for path, rows in self._held[version].items():
                self._shards.rows[path].copy_(rows)
            self._shards.reshard()
            self._loaded = version
        scores = [self._forward(part or _NOTHING, temperature) for part in hand]
        return [
            (logprobs_N.cpu().numpy(), entropy_N.cpu().numpy())
            for (logprobs_N, entropy_N), part in zip(scores, hand, strict=True)
            if part is not None
        ]

    def off_load(self, held: Collection[int]) -> None:
        """Move this rank's rows of all versions to the host."""
        self._drop_others(held)
        self._shards.reshard()
        versions = [rows for of in (*self._held.values(), self._coming) for rows in of.values()]
        buffers = self._shards.root.buffers()
        self._off_load.give_up((*versions, *self._shards.rows.values(), *buffers))

    def load_back(self, held: Collection[int]) -> None:
        """In place, bit for bit."""
        self._off_load.take_back()
        self._drop_others(held)

    def _drop_others(self, held: Collection[int]) -> None:
        self._held = {number: rows for number, rows in self._held.items() if number in held}

    def leave(self) -> None:
        """Free the others from a pass that this rank could not finish."""
        group.leave()


class RanksScorer:
    """A `Scorer` whose rank 0 is this process. Pulls and scores take turns, a bucket at a time."""

    def __init__(
        self,
        team: Team,
        folder: Path,
        *,
        token_budget: int = TOKEN_BUDGET,
        threads: int = 1,
        pull_deadline_s: float = 300.0,
        device: str = "cpu",
        dtype: str = FLOAT32,
        replay_routes: bool = False,
    ) -> None:
        """As `BuiltinScorer`; whatever is raised, the team is closed.

        Raises:
            ConfigError, EngineError: a model that cannot be scored so.
            RankLostError: a rank is gone, silent or failed.
        """
        config = read_config(folder)
        self.vocab_size, self.max_tokens = vocab_size_of(config), token_limit(config)
        self._team, self._token_budget = team, token_budget
        self._pull_deadline_s = pull_deadline_s
        self._turn = threading.RLock()  # of the ranks
        self._versions: set[int] = set()
        spec = ScorerSpec(
            folder=folder, device=device, dtype=dtype, threads=threads, host=team.host,
            size=team.size, replay_routes=replay_routes, token_budget=token_budget,
        )  # fmt: skip
        self._own = team.begin(spec, spec.begin)
        self.why_padded = self._own.why_padded
        self.why_eager = self._own.why_eager
        self._layout = layout_of(self._own.plan.facts)

    @property
    def versions(self) -> Sequence[int]:
        """Versions held, lowest first.

        Raises:
            RankLostError: a rank is gone or silent: asked for in each turn, so it is noticed then.
        """
        self._team.check()
        return sorted(self._versions)

    def pull(self, published: PolicyPublished, channel: WeightChannel) -> Pulled:
        """Receive a version on rank 0, and give each rank its rows.

        Raises:
            WeightError: not received, or it does not fit; what was held before is held still.
        """
        started_s, plan = time.monotonic(), self._own.plan
        if found := layout_difference(expected=self._layout, found=published.layout):
            raise WeightError(f"weights do not fit the model: {found}")
        bucket: dict[str, Tensor] = {}
        is_first = True
        for name, tensor in channel.pull(published, self._pull_deadline_s):
            if name in plan.constant:
                if not torch.equal(plan.constant[name], tensor.cpu()):
                    raise WeightError(f"{name} is no parameter, and is another than the model's")
                continue
            bucket[name] = tensor
            if size_bytes(bucket) >= BUCKET_BYTES:
                self._scatter(bucket, is_first)
                bucket, is_first = {}, False
        self._scatter(bucket, is_first)
        with self._turn:  # a score that drops what it does not know comes before, or behind both
            self._together("adopt", published.policy_version)
            self._versions.add(published.policy_version)
        return pulled_of(published, size_bytes(plan.facts), started_s)

    def _scatter(self, bucket: Mapping[str, Tensor], is_first: bool) -> None:
        given = [bucket, *[None] * (self._team.size - 1)]
        self._together("take", sorted(bucket), is_first, by_rank=given)

    def drop(self, policy_version: int) -> None:
        """Hold this version no longer: ranks let go of it with what they do next."""
        self._versions.discard(policy_version)

    def off_load(self) -> None:
        """See `Scorer.off_load`; every rank its rows."""
        self._together("off_load")

    def load_back(self) -> None:
        """See `Scorer.load_back`."""
        self._together("load_back")

    def score(
        self, sequences: Sequence[TokenSequence], policy_version: int, temperature: float
    ) -> Sequence[Scores]:
        """See `Scorer.score`.

        Raises:
            RankLostError: a rank is gone, silent or failed, of which no sequence is to blame.
        """
        if policy_version not in self._versions:
            raise EngineError(
                f"policy version {policy_version} is not held, only {list(self.versions)}"
            )
        check_all(sequences, self.vocab_size, self.max_tokens, self._own.routers)
        if not sequences:
            return []
        cut = cut_of(sequences, self._token_budget, in_bins=not self.why_padded)
        parts: list[Part | None] = [*parts_of(cut, sequences)]
        size = self._team.size
        parts += [None] * (-len(parts) % size)
        hands = [parts[rank::size] for rank in range(size)]
        given = (policy_version, temperature)
        own, others = self._together("local_scores", *given, by_rank=hands)
        of_rank = [own, *others]
        found = [of_rank[n % size][n // size] for n in range(len(cut.sizes))]
        columns = [np.concatenate(column) for column in zip(*found, strict=True)]
        return in_order(cut, sequences, *columns)

    def _together(
        self, method: str, *args: object, by_rank: Sequence[object] = ()
    ) -> tuple[Any, list[Any]]:
        """Every rank calls this method of `RankScorer`: rank 0's result, and the others'."""
        try:
            with self._turn:
                given = (frozenset(self._versions), *args)
                return self._team.together(
                    lambda: getattr(self._own, method)(*given, *by_rank[:1]),
                    method,
                    *given,
                    by_rank=[(one,) for one in by_rank[1:]],
                )
        except RankLostError:
            raise
        except Exception as err:
            raise RankLostError(
                f"rank 0 of the scorer failed: {type(err).__name__}: {err}"
            ) from err

    def close(self) -> None:
        """End the other ranks, and let the group go: a process has one at a time."""
        self._team.close()
        group.leave()
