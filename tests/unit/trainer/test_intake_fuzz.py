"""No bytes of a sample end the trainer: intake sets it aside, or a batch is made of it."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.schemas.events import ScoredTrajectory, Segment, Tensor
from rlstreams.schemas.tensor import CODECS, DTYPES
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import Outgoing
from rlstreams.streams.log.topics import SCORED
from rlstreams.workers.config.load import load
from rlstreams.workers.model.routes import RouterShape
from tests import factories
from tests.unit.trainer.intake_site import MAX_TOKENS, Site
from tests.unit.trainer.trainer_builders import packed_within

SHAPE = RouterShape(num_layers=2, top_k=2, num_experts=64)
ON, OFF = (load([], [f"trainer.routing_replay={on}"]) for on in ("true", "false"))
ROWS = 12  # of five tokens of the prompt, three sampled, two of the environment, three sampled


def _sample() -> ScoredTrajectory:
    """Two turns, of which all is recorded but one row of the experts."""
    experts = np.arange(ROWS * 4, dtype=np.uint8).reshape(ROWS, 2, 2)
    mask = np.ones(ROWS, np.uint8)
    mask[0] = 0
    trajectory = factories.trajectory(
        segments=(
            factories.prompt_segment(),
            factories.policy_segment(version=1, weight_hash=""),
            Segment(author="environment", token_ids=factories.int32s(2)),
            factories.policy_segment(),
        ),
        routed_experts=Tensor.of(experts, "zstd"),
        routed_experts_mask=Tensor.of(mask, "zstd"),
    )
    reference = factories.float32s(3)
    first = factories.score(version=1, weight_hash="", reference_logprobs=reference)
    second = factories.score(segment=3, reference_logprobs=reference)
    return factories.scored(trajectory, scores=(first, second))


SAMPLES = {on: replace(_sample(), routing_replayed=on) for on in (True, False)}


Edit = Callable[[Tensor | None], Tensor | None]
_OF_TRAJECTORY = ("routed_experts", "routed_experts_mask")
_OF_SCORE = ("proximal_logprobs", "entropy", "reference_logprobs")
_OPTIONAL = (*_OF_TRAJECTORY, *_OF_SCORE[1:], "behavior_logprobs")
PLACES = [
    *(("segments", index, "token_ids") for index in range(4)),
    *(("segments", index, "behavior_logprobs") for index in range(4)),
    *(("scores", index, name) for index in range(2) for name in _OF_SCORE),
    *(("trajectory", 0, name) for name in _OF_TRAJECTORY),
]


def edited(scored: ScoredTrajectory, place: tuple[str, int, str], edit: Edit) -> ScoredTrajectory:
    """The sample with another tensor at this place."""
    whose, index, name = place
    if whose == "scores":
        return replace(scored, scores=_at(scored.scores, index, name, edit))
    trajectory = scored.trajectory
    if whose == "trajectory":
        (trajectory,) = _at((trajectory,), index, name, edit)
    else:
        segments = _at(trajectory.segments, index, name, edit)
        trajectory = replace(trajectory, segments=segments)
    return replace(scored, trajectory=trajectory)


def _at(owners: tuple[Any, ...], index: int, name: str, edit: Edit) -> tuple[Any, ...]:
    old = getattr(owners[index], name)
    new = edit(old)
    if new is None and name not in _OPTIONAL:
        new = old
    return (*owners[:index], replace(owners[index], **{name: new}), *owners[index + 1 :])


DIMENSIONS = st.integers(-1, 14) | st.sampled_from([1 << 20, 1 << 40, (1 << 63) - 1])
SHAPES = st.lists(DIMENSIONS, max_size=4).map(tuple)
# Made once: to make a strategy costs more than to draw from it.
BYTES = st.binary(max_size=60)
ANY_DTYPE, ANY_CODEC = st.sampled_from([*DTYPES, "bfloat16", ""]), st.sampled_from([*CODECS, "lz4"])
OUR_DTYPE, OUR_CODEC = st.sampled_from(DTYPES), st.sampled_from(CODECS)
FITTING_SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, ROWS - 1, ROWS, ROWS + 1]), max_size=3)
VALUES = st.integers(0, 70)
KINDS = st.sampled_from(["whole", "dtype", "shape", "codec", "data", "cut", "flip"])
PLACES_OF_BYTES = st.integers(0, 200)


def frame(num_bytes: int) -> bytes:
    """A zstd frame that declares this content (RFC 8878, 3.1.1), and has one byte of it."""
    declared = struct.pack("<Q", num_bytes)
    return bytes.fromhex("28b52ffdc058") + declared + bytes.fromhex("09000041")


def _sized(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def _unsized(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


_WRAPS: list[Callable[[bytes], bytes]] = [bytes, _sized, _unsized]
WRAPS = st.sampled_from(_WRAPS)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any tensor at all: what its fields say need not be what its bytes are."""
    data = draw(BYTES)
    wrap = draw(WRAPS)
    return Tensor(
        dtype=draw(ANY_DTYPE),
        shape=draw(SHAPES),
        codec=draw(ANY_CODEC),
        data=wrap(data),
    )


@st.composite
def bombs(draw: st.DrawFn) -> Tensor:
    """A few bytes whose frame declares what the shape asks for, however much that is."""
    dtype = draw(OUR_DTYPE)
    shape = draw(SHAPES)
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    declared = max(0, min(num_bytes, (1 << 64) - 3))
    return Tensor(dtype=dtype, shape=shape, codec="zstd", data=frame(declared))


@st.composite
def fitting(draw: st.DrawFn) -> Tensor:
    """A tensor whose fields fit its bytes; it only need not be the one that belongs there."""
    dtype = draw(OUR_DTYPE)
    shape = tuple(draw(FITTING_SHAPES))
    return Tensor.of(np.full(shape, draw(VALUES), dtype), draw(OUR_CODEC))


OTHERS = st.none() | tensors() | fitting() | bombs()


@st.composite
def edits(draw: st.DrawFn) -> Edit:
    """None, another tensor, one field of another, or damaged bytes."""
    other = draw(OTHERS)
    kind = draw(KINDS)
    at = draw(PLACES_OF_BYTES)

    def edit(old: Tensor | None) -> Tensor | None:
        if old is None or other is None or kind == "whole":
            return other
        if kind in ("cut", "flip"):
            data = bytearray(old.data)
            if kind == "cut":
                data = data[: at % (len(data) + 1)]
            elif data:
                data[at % len(data)] ^= 1 << at % 8
            return replace(old, data=bytes(data))
        return replace(old, **{kind: getattr(other, kind)})

    return edit


def takes_or_refuses(record: ScoredTrajectory | Outgoing, is_replayed: bool) -> bool:
    """Whether it was taken: then a batch is made of it; else there is one letter."""
    site = Site(ON if is_replayed else OFF, routers=SHAPE if is_replayed else None)
    site.sends(record)
    letters = site.take()
    if site.intake.num_samples == 0:
        return False
    assert letters == []
    (group,) = site.admission._groups.values()
    payloads = site.payloads.take([seen.position for seen in group.in_order()])
    batch = packed_within(
        [payload.scored for payload in payloads],
        np.ones(1, np.float32),
        [],
        policy_version=2,
        token_budget=MAX_TOKENS,
        replay_routes=is_replayed,
    )
    assert batch.num_loss_tokens > 0
    return True


@pytest.mark.parametrize("is_replayed", [True, False])
def test_a_sample_as_it_should_be_is_taken(is_replayed: bool) -> None:
    """What the other tests damage."""
    assert takes_or_refuses(SAMPLES[is_replayed], is_replayed)


@settings(max_examples=400)
@given(
    st.lists(st.tuples(st.sampled_from(PLACES), edits()), min_size=1, max_size=3),
    st.booleans(),
)
def test_tensors_that_do_not_fit_are_set_aside(
    changes: list[tuple[tuple[str, int, str], Edit]], is_replayed: bool
) -> None:
    """Bytes, dtype, shape, codec or length of any of them, and one that is missing."""
    scored = SAMPLES[is_replayed]
    for place, edit in changes:
        scored = edited(scored, place, edit)
    takes_or_refuses(scored, is_replayed)


@settings(max_examples=400)
@given(st.data(), st.booleans())
def test_damaged_bytes_are_set_aside(data: st.DataObject, is_replayed: bool) -> None:
    """A record with bits turned, or cut: most is no event then, and some is another sample."""
    whole = outgoing(SCORED, SAMPLES[is_replayed])
    value = bytearray(b"".join(bytes(piece) for piece in whole.value))
    for _ in range(data.draw(st.integers(0, 3))):
        value[data.draw(st.integers(10, len(value) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    if data.draw(st.booleans()):
        del value[data.draw(st.integers(0, len(value))) :]
    takes_or_refuses(replace(whole, value=[bytes(value)]), is_replayed)
