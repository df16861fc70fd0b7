"""Whatever passes intake, a step takes or names: values that may be, and are far from usual."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.schemas.events import ScoredTrajectory, Segment, SegmentScore, Tensor
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import Position, RawRecord
from rlstreams.streams.log.topics import SCORED
from rlstreams.workers.trainer.intake.payloads import payload_of
from rlstreams.workers.trainer.intake.validation import check_routing, validate
from rlstreams.workers.trainer.training.training import Training
from tests import factories
from tests.heavy.trainer.trainer_stand import make_config

LAYERS, EXPERTS, TOP_K = 2, 8, 2  # of the demo's model
CODECS = st.sampled_from(["raw", "zstd"])
LOGPROBS = st.sampled_from([0.0, 1e-4, -1e-30, -1.0, -700.0, -6e4, -3e38])
TEMPERATURES = st.sampled_from([1.0, 0.3, 1e-2, 1e6, 1e30])
REWARDS = st.sampled_from([0.0, 1.0, -1e9, 1e9, 1e-300])
WIDTHS = st.sampled_from([np.uint8, np.uint16])


@st.composite
def answers(draw: st.DrawFn, index: int) -> tuple[Segment, SegmentScore]:
    """A segment by the policy, tokens or none, and its score."""
    num = draw(st.integers(0, 3))
    ids = draw(st.lists(st.integers(0, 100), min_size=num, max_size=num))
    id_type = draw(st.sampled_from([np.uint8, np.uint16, np.int32, np.int64]))

    def logprobs() -> Tensor:
        values = draw(st.lists(LOGPROBS, min_size=num, max_size=num))
        fits = min(values, default=0.0) > -65504  # the lowest of float16
        dtype = draw(st.sampled_from([np.float32, np.float16])) if fits else np.float32
        return Tensor.of(np.array(values, dtype), draw(CODECS))

    segment = Segment(
        author="policy",
        token_ids=Tensor.of(np.array(ids, id_type), draw(CODECS)),
        policy_version=draw(st.integers(0, 2)),
        behavior_logprobs=logprobs(),
        temperature=draw(TEMPERATURES),
        finish_reason=draw(st.sampled_from(["stop", "length", "policy_changed", "?"])),
    )
    score = SegmentScore(
        segment=index,
        anchor=draw(st.sampled_from(["sampled", "behavior"])),
        policy_version=segment.policy_version,
        proximal_logprobs=logprobs(),
        reference_logprobs=logprobs(),
    )
    return segment, score


@st.composite
def samples(draw: st.DrawFn, number: int) -> ScoredTrajectory:
    """One that intake takes, if only one answer has a token."""
    first, second = draw(answers(1)), draw(answers(3))
    environment = Segment(author="environment", token_ids=factories.int32s(draw(st.integers(0, 2))))
    segments = (factories.prompt_segment(2), first[0], environment, second[0])
    rows = sum(len(segment.token_ids) for segment in segments) - 1
    dtype = draw(WIDTHS)
    one = draw(st.integers(0, EXPERTS - 1))
    experts = np.empty((rows, LAYERS, TOP_K), dtype)
    experts[...] = one, (one + 1) % EXPERTS
    mask = np.array(draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)), np.uint8)
    experts[mask == 0] = np.iinfo(dtype).max  # nobody looks at it
    routes = {
        "routed_experts": Tensor.of(experts, draw(CODECS)),
        "routed_experts_mask": Tensor.of(mask, draw(CODECS)),
    }
    trajectory = factories.trajectory(
        group_id="0",
        sample=number,
        group_size=2,
        segments=segments,
        reward=draw(REWARDS),
        reward_parts=draw(st.dictionaries(st.text(max_size=3), REWARDS, max_size=2)),
        **draw(st.sampled_from([routes, {}, routes | {"routed_experts_mask": None}])),
    )
    return ScoredTrajectory(
        trajectory=trajectory, scores=(first[1], second[1]), routing_replayed=True
    )


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Of the demo's model, with routing replay and a pull towards a reference."""
    on = {"trainer__routing_replay": "true", "trainer__loss__kl_coef": "0.1"}
    config = make_config(tmp_path_factory.mktemp("run"), **on)
    return Training(Path(config.model.path), config.trainer, threads=1)


def record(event: ScoredTrajectory, offset: int) -> RawRecord:
    value = b"".join(bytes(piece) for piece in outgoing(SCORED, event).value)
    return RawRecord(position=Position(SCORED.name, 0, offset), offsets=(0,), key=b"", value=value)


@settings(max_examples=30)
@given(data=st.data())
def test_a_step_takes_or_names_what_intake_takes(training: Training, data: Any) -> None:
    """Numbers at every bound, dtypes and codecs of every kind, segments without a token."""
    taken = []
    for number in range(2):
        payload = payload_of(record(data.draw(samples(number)), number), {})
        try:
            validate(payload.scored, training.vocab_size, training.max_tokens)
            check_routing(payload.scored, is_replayed=True, shape=training.routers)
        except ValueError:
            continue
        taken.append(payload)
    if not taken:
        return
    found = training.try_train(taken, (), 2)
    if isinstance(found, tuple):
        assert all(0 <= bad.index < len(taken) for bad in found)
