"""A sample as one JSON object on one line, for pipes; log-probs in nats, times in ms."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from rlstreams.debug.inspect.sample_detail import SampleDetail
from rlstreams.schemas.events import Tensor
from rlstreams.streams.log.text import plain_json


def json_line(detail: SampleDetail) -> str:
    """Everything that is known of the sample.

    Numbers that nobody gave are null; arrays have one entry per token, `experts` one less.
    """
    lineage, rollout = detail.lineage, detail.lineage.rollout
    trained = lineage.trained
    told: dict[str, Any] = {
        "sample": str(lineage.sample),
        "outcome": str(lineage.outcome),
        "reward": None if rollout is None else rollout.reward,
        "reward_parts": {} if rollout is None else rollout.reward_parts,
        "reward_note": "" if rollout is None else rollout.reward_note,
        "mismatch": _number(detail.mismatch),
        "staleness": list(detail.staleness),
        "versions": list(detail.versions),
        "step": None if trained is None else trained.step.step,
        "advantage": None if trained is None else trained.ref.advantage,
        "made_version": None if trained is None else trained.step.policy_version,
        "used_by": [load.worker for load in lineage.used_by],
        "dropped": None if lineage.dropped is None else lineage.dropped.group.reason,
        "replaced_by": lineage.replaced_by or None,
        "prompt": None if lineage.prompt is None else lineage.prompt.event.text,
        "expected": None if lineage.prompt is None else lineage.prompt.event.answer,
        "answer": detail.said_by("policy"),
        "copies": [str(position) for position in lineage.copies],
        "missing": list(lineage.missing),
        "stages": [_stage(stage) for stage in map(dataclasses.asdict, detail.stages)],
        "tokens": _tokens(detail),
    }
    return plain_json(told)


def _stage(stage: dict[str, Any]) -> dict[str, Any]:
    """The position as `topic[partition]@offset`."""
    position = stage.pop("position")
    where = None if position is None else "{}[{}]@{}".format(*position)
    return {**stage, "position": where}


def _tokens(detail: SampleDetail) -> dict[str, Any] | None:
    table = detail.tokens
    if table is None:
        return None
    return {
        "ids": table.ids_N.tolist(),
        "words": list(detail.words),
        "author": [table.authors[number] for number in table.segment_N.tolist()],
        "segment": table.segment_N.tolist(),
        "version": [v if v >= 0 else None for v in table.version_N.tolist()],
        "behavior": _numbers(table.behavior_N),
        "proximal": _numbers(table.proximal_N),
        "reference": _numbers(table.reference_N),
        "difference": _numbers(table.difference_N),
        "entropy": _numbers(table.entropy_N),
        "experts": _experts(table.experts),
    }


def _experts(tensor: Tensor | None) -> list[Any] | None:
    return None if tensor is None else list(tensor.numpy().tolist())


def _numbers(array_N: npt.NDArray[np.float32]) -> list[float | None]:
    # Through the shortest text that gives the same float32 back: -0.1, not -0.10000000149.
    return [None if math.isnan(value) else float(str(value)) for value in array_N]


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
