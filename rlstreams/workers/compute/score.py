"""The built-in scorer: one Hugging Face module, and the weights of each version that is held.

Sequences are packed into bins and layers compiled as the trainer's are (decision 0045); where a
family or a device cannot, rows are padded. The module's parameters point at the tensors of one held
version while it scores, so all versions share what was compiled. In float32 it gives the log-probs
that sampling gave, up to rounding (below 1e-4).

A cut follows from the order and lengths of the sequences, so the same call gives the same bits.
Axes: `B` sequence, `T` token, `N` token that is scored.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.engines.base import (
    Scores,
    TokenSequence,
    check_sequences,
    pulled_of,
)
from rlstreams.workers.engines.selfcheck import load_scorer
from rlstreams.workers.model.base import CPU, EngineError
from rlstreams.workers.model.bins import use_bins
from rlstreams.workers.model.cut import Cut, cut_bins, cut_rows, one_row
from rlstreams.workers.model.device import Run, at_once, on_device
from rlstreams.workers.model.documents import Documents
from rlstreams.workers.model.folder import read_config, token_limit, vocab_size_of
from rlstreams.workers.model.model import (
    FLOAT32,
    configure_torch,
    right_padded,
    weights_of,
)
from rlstreams.workers.model.offload import OffLoad
from rlstreams.workers.model.routes import RouterShape, check_routes, padded_routes
from rlstreams.workers.model.routing import Routes
from rlstreams.workers.model.token_scores import Score, TopScores
from rlstreams.workers.weights.channel import Pulled, WeightError, WeightSource
from rlstreams.workers.weights.layout import layout_difference, layout_of, size_bytes

TOKEN_BUDGET = 16384


class BuiltinScorer:
    """Scores on one device. `pull` may run in one thread while `score` runs in another.

    `why_padded` says why sequences are not packed into bins, `why_eager` why layers are not
    compiled; "" where they are.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        token_budget: int = TOKEN_BUDGET,
        threads: int = 1,
        pull_deadline_s: float = 300.0,
        device: str = CPU,
        dtype: str = FLOAT32,
        replay_routes: bool = False,
        top_k: int = 0,
    ) -> None:
        """Load and compile the model; it scores under pulled weights only.

        Args:
            token_budget: tokens of a bin, or of a forward pass over padded rows.
            replay_routes: sequences bring experts that their tokens are to take.
            top_k: likeliest tokens of each distribution to score as well; 0: none.

        Raises:
            EngineError: the folder cannot be loaded, or its family not be scored here, or not along
                given routes.
        """
        configure_torch(threads, device, fused=True)  # a forward alone has one order
        config = read_config(Path(folder))
        self.vocab_size = vocab_size_of(config)
        self.max_tokens = token_limit(config)
        self._pull_deadline_s = pull_deadline_s
        self._token_budget = token_budget
        self._device = torch.device(device)
        self._routers: RouterShape | None = None
        self._buffers: tuple[Tensor, ...] = ()
        self._load(Path(folder), dtype, replay_routes)
        self._release()  # of the folder's weights nothing is scored
        self._forward = Forward(self._scorer, self._device, self._routers, top_k)
        self._off_load = OffLoad(self._device)
        self.run: Run = at_once  # each forward
        # Threads change it, each by one operation: a copy that replaced it would undo the other's.
        self._held: dict[int, Mapping[str, Tensor]] = {}
        self._side = torch.cuda.Stream() if device != CPU else None  # type: ignore[no-untyped-call]

    def _load(self, folder: Path, dtype: str, replay_routes: bool) -> None:
        """Set what computes: `_scorer`, its tensors by name, and the layout of a version."""
        scorer, self._routers = load_scorer(
            folder, dtype, str(self._device), replay_routes=replay_routes
        )
        model = scorer.model
        self._scorer: Score = scorer
        self.why_padded, self.why_eager = use_bins(
            scorer, str(self._device), self._token_budget, learns=False
        )
        self._layout = layout_of(weights_of(model))
        self._tensors = _tensors_of(model)
        self._buffers = tuple(model.buffers())

    @property
    def versions(self) -> Sequence[int]:
        """Versions held, lowest first."""
        return sorted(self._held)

    def pull(self, published: PolicyPublished, channel: WeightSource) -> Pulled:
        """Hold one more version, received beside those that are held, on a stream of its own.

        Raises:
            WeightError: not received, or it does not fit; what was held before is held still.
        """
        started_s = time.monotonic()
        version = published.policy_version
        # A file's tensors are the file's memory, and it may be deleted: copied where they stay.
        is_copied = self._side is None
        with nullcontext() if self._side is None else torch.cuda.stream(self._side):
            weights, layout = self._kept(channel.pull(published, self._pull_deadline_s), is_copied)
        if self._side is not None:
            self._side.synchronize()
        if found := layout_difference(expected=self._layout, found=layout):
            raise WeightError(f"weights do not fit the model: {found}")
        self._held[version] = weights
        return pulled_of(published, size_bytes(weights), started_s)

    def _kept(
        self, pulled: Iterable[tuple[str, Tensor]], is_copied: bool
    ) -> tuple[Mapping[str, Tensor], str]:
        """A version as `_tensors` names it, and the layout that it came in."""
        weights = {name: tensor.to(self._device, copy=is_copied) for name, tensor in pulled}
        return weights, layout_of(weights)

    def drop(self, policy_version: int) -> None:
        """Hold this version no longer; a `score` under it that has begun ends as it would."""
        self._held.pop(policy_version, None)

    def off_load(self) -> None:
        """Move all versions that are held to the host."""
        versions = tuple(self._held.values())  # at once: another thread may drop one
        held = (tensor for weights in versions for tensor in weights.values())
        self._off_load.give_up((*held, *self._buffers))

    def load_back(self) -> None:
        """Move them back."""
        self._off_load.take_back()

    def score(
        self, sequences: Sequence[TokenSequence], policy_version: int, temperature: float
    ) -> Sequence[Scores]:
        """Score under `policy_version`; see `Scorer.score`.

        A temperature of 0 counts as 1, as in the engine's log-probs.
        """
        weights = self._held.get(policy_version)
        if weights is None:
            raise EngineError(
                f"policy version {policy_version} is not held, only {list(self.versions)}"
            )
        check_all(sequences, self.vocab_size, self.max_tokens, self._routers)
        if not sequences:
            return []
        cut = cut_of(sequences, self._token_budget, in_bins=not self.why_padded)
        with self._holding(weights), torch.inference_mode():
            # Of a GPU of its own nothing waits: the next bin is laid out while one is computed.
            found = [
                self.run(partial(self._forward, part, temperature))
                for part in parts_of(cut, sequences)
            ]
            columns = [torch.cat(column).cpu().numpy() for column in zip(*found, strict=True)]
        return in_order(cut, sequences, *columns)

    @contextmanager
    def _holding(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """The module has these weights; afterwards none, or it would hold a version too many."""
        for name, own in self._tensors.items():
            for tensor in own:
                tensor.data = weights[name]
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        for own in self._tensors.values():
            for tensor in own:
                tensor.data = tensor.new_empty(0)


Part = tuple[Sequence[TokenSequence], int]  # of one forward; tokens of its bin, or 0: padded rows


class Forward:
    """One pass through a model: log-probs and entropies of all tokens but each sequence's first."""

    def __init__(
        self, score: Score, device: torch.device, routers: RouterShape | None, top_k: int = 0
    ) -> None:
        """
        Args:
            routers: of the model, where recorded routes are replayed.
            top_k: likeliest tokens to score as well.
        """
        self._top = (top_k,) if top_k else ()
        self._score = score
        self._device = device
        self._tensor = partial(on_device, device)
        self._routers = routers

    def __call__(self, part: Part, temperature: float) -> tuple[Tensor, ...]:
        """See the class; behind them log-probs and ids of the likeliest tokens, if asked for. A
        temperature of 0 counts as 1."""
        sequences, bin_tokens = part
        ids_BT, real_BT = (t.numpy() for t in right_padded([s.token_ids for s in sequences], 0))
        chosen_BT = real_BT.copy()
        chosen_BT[:, :1] = False
        arrays = [ids_BT, chosen_BT, *self._routes(sequences, ids_BT.shape[1])]
        documents = None
        if bin_tokens:
            lengths = [len(s.token_ids) for s in sequences]
            documents = Documents.of(lengths, bin_tokens).to(self._device)
            arrays = [one_row(array, real_BT, bin_tokens) for array in arrays]
        ids, chosen, *routes = arrays
        chosen_N = self._tensor(np.flatnonzero(chosen))
        temperature_N = torch.full((len(chosen_N),), temperature or 1.0, device=self._device)
        is_real = None if bin_tokens else self._tensor(real_BT)
        taken = Routes(*map(self._tensor, routes)) if routes else None
        with self._score.routing.replaying(taken):
            scores = self._score(
                self._tensor(ids), is_real, chosen_N, temperature_N, documents, *self._top
            )
        if not isinstance(scores, TopScores):
            return scores
        return *scores, scores.top_NK, scores.top_ids_NK.int()

    def _routes(self, sequences: Sequence[TokenSequence], width: int) -> tuple[Any, ...]:
        if self._routers is None:
            return ()
        return (
            padded_routes([(s.routed_experts, s.routed_experts_mask) for s in sequences], width)
            or ()
        )


def check_all(
    sequences: Sequence[TokenSequence],
    vocab_size: int,
    max_tokens: int,
    routers: RouterShape | None,
) -> None:
    """
    Raises:
        EngineError: ids out of range, a sequence too long, or routes of another model.
    """
    check_sequences(sequences, vocab_size, max_tokens)
    for index, sequence in enumerate(sequences):
        if routers is not None and sequence.routed_experts is not None:
            try:
                check_routes(sequence.routed_experts, sequence.routed_experts_mask, routers)
            except ValueError as err:
                raise EngineError(f"sequence {index}: {err}") from err


def cut_of(sequences: Sequence[TokenSequence], token_budget: int, *, in_bins: bool) -> Cut:
    """Which sequences pass the model together; it follows from their order and lengths."""
    lengths = [len(sequence.token_ids) for sequence in sequences]
    return (cut_bins if in_bins else cut_rows)(lengths, token_budget)


def parts_of(cut: Cut, sequences: Sequence[TokenSequence]) -> list[Part]:
    """The forwards of a cut, in its order."""
    bins = cut.bins or (0,) * len(cut.sizes)
    return [([sequences[i] for i in own], n) for own, n in zip(cut.members, bins, strict=True)]


def in_order(
    cut: Cut,
    sequences: Sequence[TokenSequence],
    *columns: np.ndarray[Any, Any],
) -> list[Scores]:
    """What the forwards of a cut gave, one behind another, by sequence."""
    ends = np.cumsum([len(sequences[index].token_ids) - 1 for index in cut.order])[:-1]
    parts = zip(*(np.split(column, ends) for column in columns), strict=True)
    by_place = dict(zip(cut.order, parts, strict=True))
    names = ("logprobs", "entropy", "top_logprobs", "top_ids")[: len(columns)]
    return [
        Scores(**dict(zip(names, map(_from_second, by_place[i]), strict=True)))
        for i in range(len(sequences))
    ]


def _tensors_of(model: Any) -> dict[str, list[Tensor]]:  # noqa: ANN401  (an untyped library)
    """A model's own tensors, by the names of `weights_of`; tied ones together."""
    by_memory: defaultdict[int, list[Tensor]] = defaultdict(list)
    for _, tensor in sorted(model.state_dict(keep_vars=True).items()):
        by_memory[tensor.data_ptr()].append(tensor)
    return {name: by_memory[tensor.data_ptr()] for name, tensor in weights_of(model).items()}


def _from_second(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The values of a sequence's tokens but the first, which has 0."""
    return np.concatenate([np.zeros((1, *values.shape[1:]), values.dtype), values])
