"""The built-in scorer: one Hugging Face module per held version, one forward per call.

Loaded and masked like the engine's model, so that in float32 it gives the log-probs that sampling
gave, up to rounding (below 1e-4). Axes: `B` sequence, `T` token, `N` token that is scored.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.engines.base import Scores, TokenSequence
from rlstreams.workers.engines.selfcheck import check_scoring
from rlstreams.workers.engines.validation import check_ids
from rlstreams.workers.model.base import CPU, EngineError
from rlstreams.workers.model.folder import token_limit, vocab_size_of
from rlstreams.workers.model.model import (
    FLOAT32,
    configure_torch,
    load_model,
    load_weights,
    read_config,
    right_padded,
)
from rlstreams.workers.model.routes import check_routes, padded_routes
from rlstreams.workers.model.routing import Routes
from rlstreams.workers.model.routing_check import check_replay
from rlstreams.workers.model.token_scores import TokenScorer
from rlstreams.workers.weights.channel import Pulled, WeightChannel
from rlstreams.workers.weights.layout import size_bytes


class BuiltinScorer:
    """Scores under up to `versions_held` versions, on one device."""

    def __init__(
        self,
        folder: Path | str,
        *,
        versions_held: int = 2,
        threads: int = 1,
        pull_deadline_s: float = 300.0,
        device: str = CPU,
        dtype: str = FLOAT32,
        replay_routes: bool = False,
    ) -> None:
        """Load the model; its weights are used only after a first `pull`.

        Args:
            replay_routes: sequences bring experts that their tokens are to take.

        Raises:
            EngineError: the folder cannot be loaded, or its family not be scored here, or not along
                given routes.
        """
        configure_torch(threads, device, fused=True)  # a forward alone has one order
        config = read_config(Path(folder))
        self._vocab_size = vocab_size_of(config)
        self._max_tokens = token_limit(config)
        self._pull_deadline_s = pull_deadline_s
        model = load_model(folder, dtype)
        mask = check_scoring(model, self._vocab_size)
        self._routers = check_replay(model, self._vocab_size) if replay_routes else None
        self._device = torch.device(device)
        model = model.to(self._device)
        copies = [copy.deepcopy(model) for _ in range(versions_held - 1)]
        self._free = [TokenScorer(one, mask) for one in (model, *copies)]
        self._held: dict[int, TokenScorer] = {}

    @property
    def versions(self) -> Sequence[int]:
        """Versions held, oldest first."""
        return sorted(self._held)

    @property
    def max_tokens(self) -> int:
        """Longest sequence."""
        return self._max_tokens

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._vocab_size

    def pull(self, published: PolicyPublished, channel: WeightChannel) -> Pulled:
        """Hold one more version; the one pulled longest ago goes when there is no room.

        Raises:
            WeightError: not received, or it does not fit; what was held before is held still.
        """
        started_s = time.monotonic()
        weights = dict(channel.pull(published, self._pull_deadline_s))
        version = published.policy_version
        model = self._room_for(version)
        load_weights(model.model, weights)
        self._free = [free for free in self._free if free is not model]
        self._held = {v: m for v, m in self._held.items() if m is not model} | {version: model}
        return Pulled(
            policy_version=version,
            weight_hash=published.weight_hash,
            num_bytes=size_bytes(weights),
            seconds=time.monotonic() - started_s,
            paused_s=0.0,
        )

    @torch.inference_mode()
    def score(
        self, sequences: Sequence[TokenSequence], policy_version: int, temperature: float
    ) -> Sequence[Scores]:
        """Score under `policy_version`; see `Scorer.score`.

        A temperature of 0 counts as 1, as in the engine's log-probs.
        """
        model = self._model(policy_version)
        for index, sequence in enumerate(sequences):
            check_ids(sequence.token_ids, self._vocab_size, f"sequence {index}")
            if len(sequence.token_ids) > self._max_tokens:
                raise EngineError(
                    f"sequence {index} has {len(sequence.token_ids)} tokens, "
                    f"the limit is {self._max_tokens}"
                )
        if not sequences:
            return []
        padded = right_padded([s.token_ids for s in sequences], pad_id=0)
        ids_BT, real_BT = (tensor.to(self._device) for tensor in padded)
        chosen_BT = real_BT.clone()
        chosen_BT[:, :1] = False
        num_chosen = int(chosen_BT.sum())
        temperature_N = torch.full((num_chosen,), temperature or 1.0, device=self._device)
        with model.routing.replaying(self._routes(sequences, ids_BT.shape[1])):
            scores = model(ids_BT, real_BT, chosen_BT, temperature_N)
        lengths = [max(len(s.token_ids) - 1, 0) for s in sequences]
        both = (torch.split(values_N.cpu(), lengths) for values_N in scores)
        return [
            Scores(logprobs=_from_second(logprobs), entropy=_from_second(entropy))
            for logprobs, entropy in zip(*both, strict=True)
        ]

    def _routes(self, sequences: Sequence[TokenSequence], width: int) -> Routes | None:
        if self._routers is None:
            return None
        rows = [(s.routed_experts, s.routed_experts_mask) for s in sequences]
        for index, (experts, mask) in enumerate(rows):
            try:
                if experts is not None:
                    check_routes(experts, mask, self._routers)
            except ValueError as err:
                raise EngineError(f"sequence {index}: {err}") from err
        padded = padded_routes(rows, width)
        if padded is None:
            return None
        return Routes(*(torch.from_numpy(array).to(self._device) for array in padded))

    def _room_for(self, version: int) -> TokenScorer:
        """The module to overwrite: the same version's, a free one, or that of the first pulled."""
        if version in self._held:
            return self._held[version]
        return self._free[-1] if self._free else self._held[next(iter(self._held))]

    def _model(self, policy_version: int) -> TokenScorer:
        if policy_version not in self._held:
            raise EngineError(
                f"policy version {policy_version} is not held, only {list(self.versions)}"
            )
        return self._held[policy_version]


def _from_second(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """The values of a sequence's tokens but the first, which has 0."""
    return np.concatenate([np.zeros(1, np.float32), values.numpy()])
