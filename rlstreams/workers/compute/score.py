"""The scorer: one module on a mesh of ranks, and the weights of each version that is held.

Sequences are packed into bins and layers compiled as the trainer's are (decision 0045); where a
family or a device cannot, rows are padded. Each rank holds its rows of every version and computes
its share of the bins. The cut alone decides which rank computes a bin, and a rank computes it as
one rank alone would, so N ranks of FSDP2 give the bits of one. In float32 they are the log-probs
that sampling gave, up to rounding (below 1e-4).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.compute.forward import (
    Forward,
    ForwardPart,
    check_all,
    cut_of,
    in_order,
    parts_of,
    prefixes_of,
)
from rlstreams.workers.compute.layers import layers_of
from rlstreams.workers.compute.mesh import ByRank, Mesh, by_all, on_all
from rlstreams.workers.compute.shards import Version
from rlstreams.workers.compute.spec import ModelSpec
from rlstreams.workers.compute.team import Team
from rlstreams.workers.config.trainer import LayoutSection
from rlstreams.workers.engines.base import Scores, TokenSequence, pulled_of
from rlstreams.workers.model.base import CPU, EngineError, RankLostError
from rlstreams.workers.model.device import BinRunner, at_once
from rlstreams.workers.model.folder import read_config, token_limit, vocab_size_of
from rlstreams.workers.model.model import FLOAT32, configure_torch
from rlstreams.workers.model.offload import OffLoad
from rlstreams.workers.weights.channel import Pulled, WeightError, WeightSource
from rlstreams.workers.weights.layout import layout_difference, layout_of, size_bytes

TOKEN_BUDGET = 16384
BUCKET_BYTES = 256_000_000  # of weights that are scattered to the ranks at once
_NOTHING = ForwardPart([TokenSequence(token_ids=np.zeros(2, np.int32))])
T = TypeVar("T")
Found = tuple[np.ndarray[Any, Any], ...]  # results of a forward, column by column


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSpec:
    """Settings of a scorer; the same on all ranks.

    Attributes:
        top_k: likeliest tokens of each distribution to score as well; 0: none.
        pull_deadline_s: limit for the pull of one version.
    """

    folder: Path
    device: str = CPU
    dtype: str = FLOAT32
    threads: int = 1
    host: str = ""
    backend: str = "builtin"  # or megatron
    layout: LayoutSection = field(default_factory=LayoutSection)
    token_budget: int = TOKEN_BUDGET
    shared_prefixes: bool = True
    replay_routes: bool = False
    top_k: int = 0
    pull_deadline_s: float = 300.0

    def begin(self, mesh: Mesh) -> MeshScorer:
        """Make this process one rank of the scorer."""
        configure_torch(self.threads, self.device, fused=True)  # a forward alone has one order
        return MeshScorer(self, mesh)


def scorer_of(
    folder: Path | str,
    *,
    team: Team | None = None,
    run: BinRunner | None = None,
    **asked: Any,  # noqa: ANN401
) -> MeshScorer:
    """A scorer whose rank 0 is this process; on any exception the team is closed.

    Args:
        team: the other ranks, which may have a scorer already; None: there are no others.
        run: see `MeshScorer.run`; None: each forward runs at once.
        asked: fields of `ScorerSpec`.

    Raises:
        ConfigError, EngineError: the folder cannot be loaded, or its family cannot be scored on
            this layout, or along given routes.
        RankLostError: a rank has ended, is silent or failed.
    """
    spec = ScorerSpec(folder=Path(folder), **asked)
    if team is None:
        made = spec.begin(Mesh(device=spec.device))
    else:
        made = team.begin(replace(spec, host=team.host), spec.begin)
    made.run = run or at_once
    return made


class MeshScorer:
    """See the module, and `Scorer`. On one rank `pull` may run in one thread while `score` runs in
    another; on several ranks the two alternate, a bucket of weights at a time."""

    def __init__(self, spec: ScorerSpec, mesh: Mesh) -> None:
        """Load and compile the model; it scores under pulled weights only."""
        self.mesh, self.number = mesh, 0
        config = read_config(spec.folder)
        self.vocab_size = vocab_size_of(config)
        self.max_tokens = token_limit(config)
        self._spec = spec
        model = ModelSpec(
            folder=spec.folder,
            dtype=spec.dtype,
            backend=spec.backend,
            layout=spec.layout,
            bin_tokens=spec.token_budget,
            asked_by="logprob",
            learns=False,
            shares=spec.shared_prefixes,
            replay_routes=spec.replay_routes,
        )
        layers = layers_of(model, mesh)
        self.why_padded, self.why_eager = layers.why_padded, layers.why_eager
        self.why_unshared = layers.why_unshared
        self._plan, self._shards, self._routers = layers.plan, layers.shards, layers.routers
        self._layout = layout_of(self._plan.facts)
        self._device = self._shards.device
        self._shards.release()  # the folder's weights are never scored
        self._forward = Forward(self._shards.root, self._device, self._routers, spec.top_k)
        self._off_load = OffLoad(self._device)
        self.run: BinRunner = at_once  # runs each forward
        # Threads change it, each in one operation: a copy that replaced it would undo another's
        # change.
        self._held: dict[int, Version] = {}
        self._coming = Version()
        self._computing: int | None = None  # the version that was copied into the module
        self._dropped: set[int] = set()  # by rank 0; the other ranks learn it with the next command
        is_beside = mesh.size == 1 and self._device.type != CPU
        self._side = torch.cuda.Stream() if is_beside else None  # type: ignore[no-untyped-call]
        self._one_at_a_time = threading.RLock() if mesh.size > 1 else nullcontext()  # commands

    @property
    def versions(self) -> Sequence[int]:
        """Versions held, lowest first.

        Raises:
            RankLostError: a rank has ended or is silent: noticed here, as each loop asks for
                versions.
        """
        if self.mesh.team is not None:
            self.mesh.team.check()
        return sorted(self._held)

    def pull(self, published: PolicyPublished, channel: WeightSource) -> Pulled:
        """Hold one more version, received beside those that are held, on a stream of its own.

        Raises:
            WeightError: not received, or it does not fit; the versions held before are still held.
        """
        started_s = time.monotonic()
        if found := layout_difference(expected=self._layout, found=published.layout):
            raise WeightError(f"weights do not fit the model: {found}")
        with nullcontext() if self._side is None else torch.cuda.stream(self._side):
            facts = self._received(channel.pull(published, self._spec.pull_deadline_s))
        if self._side is not None:
            self._side.synchronize()
        if found := layout_difference(expected=self._layout, found=layout_of(facts)):
            raise WeightError(f"weights do not fit the model: {found}")
        self._all(lambda dropped: self._adopt(dropped, published.policy_version))
        return pulled_of(published, size_bytes(facts), started_s)

    def _received(self, pulled: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Dtypes and shapes of the tensors pulled; each rank has its rows of those that fit."""
        self._all(self._expect)
        expected, facts = self._plan.facts, dict[str, Tensor]()
        bucket: dict[str, Tensor] = {}
        for name, tensor in pulled:
            facts[name] = tensor.to("meta")
            if name in self._plan.constant:
                if not torch.equal(self._plan.constant[name].cpu(), tensor.cpu()):
                    raise WeightError(f"{name} is no parameter, and is another than the model's")
            elif name in expected and expected[name].shape == tensor.shape:
                bucket[name] = tensor
            if self.mesh.size == 1 or size_bytes(bucket) >= BUCKET_BYTES:
                self._give(bucket)
                bucket = {}
        self._give(bucket)
        return facts

    def _give(self, bucket: Mapping[str, Tensor]) -> None:
        whole = ByRank([bucket, *[None] * (self.mesh.size - 1)])
        if bucket:
            self._all(lambda dropped: self._take(dropped, sorted(bucket), whole))

    @on_all
    def _expect(self, dropped: Sequence[int]) -> None:
        """Prepare to receive a version; tensors of one that did not arrive whole are discarded."""
        self._forget(dropped)
        self._coming = self._shards.version()

    @on_all
    def _take(self, dropped: Sequence[int], names: Sequence[str], whole: Any) -> None:  # noqa: ANN401
        """Take this rank's rows of these tensors, which rank 0 has."""
        self._forget(dropped)
        for name in names:
            given = None if whole is None else whole[name]
            self._shards.receive(self._coming, self._plan.published[name], given)

    @on_all
    def _adopt(self, dropped: Sequence[int], version: int) -> None:
        """Hold the received tensors as this version."""
        self._forget(dropped)
        self._held[version], self._coming = self._coming, Version()
        self._computing = None if self._computing == version else self._computing

    def drop(self, policy_version: int) -> None:
        """Stop holding this version; a `score` under it that has begun ends as if it were held.
        Other ranks drop it with their next command."""
        if self._held.pop(policy_version, None) is not None and self.mesh.size > 1:
            self._dropped.add(policy_version)

    def _forget(self, dropped: Sequence[int]) -> None:
        """Drop the versions that rank 0 has dropped; on rank 0 itself nothing is left to do."""
        for version in dropped if self.mesh.rank else ():
            self._held.pop(version, None)

    def off_load(self) -> None:
        """Move all versions that are held to the host's memory."""
        self._all(self._give_up)

    @by_all
    def _give_up(self, dropped: Sequence[int]) -> int:
        self._forget(dropped)
        self._shards.reshard()
        versions = (*self._held.values(), self._coming)  # a copy: another thread may drop a version
        held = [t for one in versions for t in (*one.rows.values(), *one.tensors.values())]
        return self._off_load.give_up((*held, *self._shards.rows.values(), *self._shards.buffers()))

    def load_back(self) -> None:
        """Move all versions back to the device, bit for bit."""
        self._all(self._take_back)

    @on_all
    def _take_back(self, dropped: Sequence[int]) -> None:
        self._off_load.take_back()
        self._forget(dropped)

    def score(
        self, sequences: Sequence[TokenSequence], policy_version: int, temperature: float
    ) -> Sequence[Scores]:
        """Score under `policy_version`; see `Scorer.score`.

        A temperature of 0 counts as 1, as in the engine's log-probs.

        Raises:
            RankLostError: a rank has ended, is silent or failed, and no sequence is to blame.
        """
        held = self._held.get(policy_version)
        if held is None:
            raise EngineError(
                f"policy version {policy_version} is not held, only {list(self.versions)}"
            )
        check_all(sequences, self.vocab_size, self.max_tokens, self._routers)
        if not sequences:
            return []
        in_bins, budget = not self.why_padded, self._spec.token_budget
        shares = self._spec.shared_prefixes and not self.why_unshared
        prefixes = prefixes_of(sequences) if shares else None
        cut = cut_of(sequences, budget, in_bins=in_bins, prefixes=prefixes)
        parts: list[ForwardPart | None] = [*parts_of(cut, sequences, prefixes)]
        of_rank, num = self._shards.hands, max(self._shards.hands) + 1
        parts += [None] * (-len(parts) % num)
        hands = ByRank([parts[hand::num] for hand in of_rank])
        version = ByRank([held, *[None] * (self.mesh.size - 1)])  # rank 0 may drop it meanwhile
        given = policy_version, version, temperature, hands
        found = self._all(lambda dropped: self._scores(dropped, *given), but=policy_version)
        by_hand = [found[of_rank.index(hand)] for hand in range(num)]
        each = [by_hand[place % num][place // num] for place in range(len(cut.sizes))]
        columns = [np.concatenate(column) for column in zip(*each, strict=True)]
        return in_order(cut, sequences, *columns)

    @by_all
    def _scores(
        self,
        dropped: Sequence[int],
        number: int,
        version: Any,  # noqa: ANN401
        temperature: float,
        hand: Any,  # noqa: ANN401
    ) -> list[Found]:
        """This rank's forwards under a version. For a part None it passes two stand-in tokens,
        because the others wait for it in each layer."""
        self._forget(dropped)
        with self._holding(number, version or self._held[number]), self._shards.no_gradient():
            # A rank with its own GPU does not wait: the next bin is laid out while one is computed.
            found = [
                self.run(partial(self._forward, part or _NOTHING, temperature)) for part in hand
            ]
            return [
                tuple(column.cpu().numpy() for column in columns)
                for columns, part in zip(found, hand, strict=True)
                if part is not None
            ]

    @contextmanager
    def _holding(self, number: int, version: Version) -> Iterator[None]:
        """Have the module hold these weights; afterwards none, unless they were copied into it."""
        if self._computing != number:
            self._shards.hold(version)
        self._computing = number if self._shards.copies else None
        try:
            yield
        finally:
            self._shards.release()

    def _all(self, work: Callable[[list[int]], T], *, but: int | None = None) -> T:
        """Run `work` on all ranks with versions dropped since the last command, except `but`."""
        with self._one_at_a_time:
            dropped = [version for version in list(self._dropped) if version != but]
            self._dropped.difference_update(dropped)
            try:
                return work(dropped)
            except Exception as err:
                if self.mesh.size == 1 or isinstance(err, RankLostError):
                    raise
                raise RankLostError(
                    f"rank 0 of the scorer failed: {type(err).__name__}: {err}"
                ) from err

    def leave(self) -> None:
        """Leave the group, which frees the others from a pass that this rank could not finish."""
        self.mesh.leave()

    def close(self) -> None:
        """End the other ranks, and destroy the group: a process has one at a time."""
        if self.mesh.team is not None:
            self.mesh.team.close()
        self._shards.close()
        self.mesh.leave()
