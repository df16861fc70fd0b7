"""The decode loop's arithmetic: a KV cache over slots, sequences joining and leaving a batch.

Running sequences are the first rows of one cache and end in the same column: row r of length n
holds columns [end - n, end), so one step writes one column for all. A sequence joins by a prefill
right-aligned below `end`; when one leaves, the last row moves into its place.
Axes: `B` row, `T` column, `V` vocabulary, `H` key-value head, `D` head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from rlstreams.workers.engines.base import Experts, SampleRequest
from rlstreams.workers.engines.sampling import Draw, sample, uniforms
from rlstreams.workers.model.attention import Mask, attention_of
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.model import load_weights
from rlstreams.workers.model.offload import OffLoad
from rlstreams.workers.model.routing import RouterCapture

_FIRST_COLUMNS = 64  # of the cache; it grows by doubling


class SlotCache:
    """Keys and values of all rows, (B, H, T, D) per layer; the model's `past_key_values`.

    The model's attention calls `update` once per layer and forward.
    """

    is_compileable = False  # the library reads it from a cache

    def __init__(self, slots: int) -> None:
        self.num_columns = _FIRST_COLUMNS
        self._slots = slots
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows = slice(0, 0)  # to write in the current forward ...
        self._write = slice(0, 0)
        self._read = slice(0, 0)  # ... and to attend to

    def aim(self, rows: slice, write: slice, read: slice) -> None:
        """Set the rows and columns that the next forward writes and reads."""
        self._rows, self._write, self._read = rows, write, read

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_args: object,
        **_kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new columns; all columns to attend to, as views."""
        if layer_idx not in self._layers:
            self._layers[layer_idx] = (self._empty(key_states), self._empty(value_states))
        keys, values = self._layers[layer_idx]
        keys[self._rows, :, self._write] = key_states
        values[self._rows, :, self._write] = value_states
        return keys[self._rows, :, self._read], values[self._rows, :, self._read]

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros: masked padding must be finite all the same.
        return like.new_zeros(self._slots, like.shape[1], self.num_columns, like.shape[3])

    def get_seq_length(self, _layer_idx: int = 0) -> int:
        """Columns before those that the forward writes."""
        return self._write.start - self._read.start

    def reserve(self, columns: int) -> None:
        """Grow to at least so many columns."""
        if columns <= self.num_columns:
            return
        more = max(columns - self.num_columns, self.num_columns)
        self.num_columns += more
        pad = torch.nn.functional.pad
        self._layers = {
            i: (pad(k, (0, 0, 0, more)), pad(v, (0, 0, 0, more)))
            for i, (k, v) in self._layers.items()
        }

    def shift(self, source: slice, by: int) -> None:
        """Move columns to the right, or to the left for a negative `by`."""
        target = slice(source.start + by, source.stop + by)
        for pair in self._layers.values():
            for tensor in pair:
                tensor[:, :, target] = tensor[:, :, source].clone()

    def move_row(self, source: int, target: int, columns: slice) -> None:
        """Copy one row over another."""
        for pair in self._layers.values():
            for tensor in pair:
                tensor[target, :, columns] = tensor[source, :, columns]


@dataclass(slots=True, eq=False)
class Generation:
    """One request on its way. The last token of `token_ids` is not forwarded yet."""

    request: SampleRequest
    token_ids: list[int]
    limit: int  # tokens at which it must end
    draws: np.ndarray[tuple[int], np.dtype[np.float64]]  # [limit]
    logprobs: list[float] = field(default_factory=list)  # of the segment under way
    begun: int = 0  # position of that segment's first token
    experts: list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = field(default_factory=list)
    experts_start: int = 0  # position of the first row in `experts` ...
    experts_stop: int = 0  # ... and behind the last one

    @classmethod
    def of(cls, request: SampleRequest, max_tokens: int) -> Generation:
        """The generation of a request that has not started."""
        num_tokens = len(request.token_ids)
        limit = min(max_tokens, request.prompt_tokens + request.sampling.max_new_tokens)
        resumed = num_tokens > request.prompt_tokens
        return cls(
            request=request,
            token_ids=request.token_ids.tolist(),
            limit=limit,
            draws=uniforms(request.seed, request.sample_id, limit),
            begun=num_tokens,
            # Rows of tokens that an earlier segment forwarded are that segment's.
            experts_start=num_tokens - 1 if resumed else 0,
            experts_stop=num_tokens - 1 if resumed else 0,
        )

    def take_segment(self) -> tuple[list[int], list[float], Experts | None, int]:
        """Tokens, log-probs, expert rows, the first row's position; begin a new segment."""
        rows = np.concatenate(self.experts) if self.experts else None
        taken = (self.token_ids[self.begun :], self.logprobs, rows, self.experts_start)
        self.begun = len(self.token_ids)
        self.logprobs = []
        self.experts = []
        self.experts_start = self.experts_stop
        return taken


class CacheDecoder:
    """Decoder of a Hugging Face model: a forward advances up to `slots` sequences by one token."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        slots: int,
        num_experts: int,
        capture_experts: bool,
    ) -> None:
        self.running: list[Generation] = []
        self.num_sampled = 0
        self._model = model
        self._device = next(model.parameters()).device
        self._attention = attention_of(model)
        self._slots = slots
        self._cache = SlotCache(slots)
        self._off_load = OffLoad(self._device)
        self._end = 0  # all running sequences' next column
        capture = RouterCapture(model) if capture_experts and num_experts else None
        self._capture = capture if capture is not None and capture.num_layers else None
        self._expert_dtype = torch.uint8 if num_experts <= 256 else torch.uint16

    @torch.inference_mode()
    def admit(self, joining: list[Generation]) -> None:
        """Prefill `joining` together and sample the first token of each."""
        lengths = torch.tensor([len(s.token_ids) for s in joining])
        width = int(lengths.max())
        self._make_room(width)
        rows = slice(len(self.running), len(self.running) + len(joining))
        columns = slice(self._end - width, self._end)
        self._cache.aim(rows, columns, columns)
        real_BT = torch.arange(width) >= width - lengths[:, None]
        ids_BT = torch.zeros(real_BT.shape, dtype=torch.int64)  # masked out: any id will do
        ids_BT[real_BT] = torch.tensor([t for s in joining for t in s.token_ids])
        positions_BT = (real_BT.long().cumsum(1) - 1).clamp(min=0)
        self.running += joining
        mask = self._attention.causal(real_BT.to(self._device))
        self._forward(joining, ids_BT, mask, positions_BT)

    @torch.inference_mode()
    def step(self) -> None:
        """Forward each sequence's last token and sample the next."""
        lengths = torch.tensor([len(s.token_ids) for s in self.running])
        longest = int(lengths.max())
        # The last token has no column yet: it takes column `end`, and `end` moves behind it.
        self._make_room(longest - 1)
        first = self._end + 1 - longest
        rows = slice(0, len(self.running))
        self._cache.aim(rows, slice(self._end, self._end + 1), slice(first, self._end + 1))
        self._end += 1
        real_BT = torch.arange(longest) >= longest - lengths[:, None]
        ids_BT = torch.tensor([s.token_ids[-1:] for s in self.running])
        mask = self._attention.newest(real_BT.to(self._device))
        self._forward(self.running, ids_BT, mask, lengths[:, None] - 1)

    @torch.inference_mode()
    def remove(self, sequence: Generation) -> None:
        """Take a running sequence out; the last row moves into its place."""
        row, last = self.running.index(sequence), len(self.running) - 1
        if row != last:
            length = len(self.running[last].token_ids) - 1
            self._cache.move_row(last, row, slice(self._end - length, self._end))
            self.running[row] = self.running[last]
        self.running.pop()

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy `weights` into the model; raises WeightError if they do not fit."""
        load_weights(self._model, weights)

    def off_load(self) -> None:
        """Move the weights to the host; the cache is empty by now."""
        self._cache, self._end = SlotCache(self._slots), 0
        self._off_load.give_up((*self._model.parameters(), *self._model.buffers()))

    def load_back(self) -> None:
        """Move the weights back in place."""
        self._off_load.take_back()

    def close(self) -> None:
        """Detach from the model."""
        if self._capture is not None:
            self._capture.close()

    def _make_room(self, width: int) -> None:
        """Have `width` columns before `end` and one behind it, for all rows."""
        held = max((len(s.token_ids) - 1 for s in self.running), default=0)
        source, width = slice(self._end - held, self._end), max(width, held)
        if width <= self._end < self._cache.num_columns:
            return
        # Double the used columns, so that as many steps pay for moving them.
        self._cache.reserve(2 * width + 1)
        self._cache.shift(source, width - self._end)
        self._end = width

    def _forward(
        self,
        rows: list[Generation],
        ids_BT: torch.Tensor,
        mask: Mask,
        positions_BT: torch.Tensor,
    ) -> None:
        output = self._model(
            input_ids=ids_BT.to(self._device),
            attention_mask=mask,
            position_ids=positions_BT.to(self._device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if self._capture is not None:
            self._keep_experts(rows, self._capture.take(len(rows)))
        draw_next(rows, output.logits[:, -1])
        self.num_sampled += len(rows)

    def _keep_experts(self, rows: list[Generation], experts_BTLK: torch.Tensor) -> None:
        """Each sequence keeps the rows of its own tokens that no earlier segment has."""
        captured = experts_BTLK.cpu().to(self._expert_dtype).numpy()
        for sequence, own in zip(rows, captured, strict=True):
            missing = len(sequence.token_ids) - sequence.experts_stop
            sequence.experts.append(own[len(own) - missing :])
            sequence.experts_stop += missing


def draw_next(rows: list[Generation], logits_BV: torch.Tensor) -> None:
    """Sample the next token of each sequence, by its request's settings.

    Raises:
        EngineError: log-probs are not finite.
    """
    samplings, device = [s.request.sampling for s in rows], logits_BV.device
    uniforms = [s.draws[len(s.token_ids)] for s in rows]
    draw = Draw(
        uniform_N=torch.tensor(uniforms, dtype=torch.float64, device=device),
        temperature_N=torch.tensor([s.temperature for s in samplings], device=device),
        top_p_N=torch.tensor([s.top_p for s in samplings], device=device),
        top_k_N=torch.tensor([s.top_k for s in samplings], device=device),
    )
    ids_B, logprobs_B = sample(logits_BV, draw)
    if not bool(torch.isfinite(logprobs_B).all()):
        raise EngineError("the model's log-probs are not finite: its weights are broken")
    for sequence, token_id, logprob in zip(rows, ids_B.tolist(), logprobs_B.tolist(), strict=True):
        sequence.token_ids.append(token_id)
        sequence.logprobs.append(logprob)
