"""One turn of the policy; an aborted request resumes with its tokens so far."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlstreams.workers.engines.base import Engine, FinishReason, GeneratedSegment, SampleRequest
from rlstreams.workers.model.base import EngineError


async def whole_turn(engine: Engine, request: SampleRequest) -> list[GeneratedSegment]:
    """Segments of the turn, one or more; each was sampled under one version.

    Raises:
        PromptTooLongError: no room for a single token.
        EngineError: as `Engine.generate`, or the engine ended the request without a segment.
    """
    asked, segments = request, list[GeneratedSegment]()
    while not segments or segments[-1].finish_reason is FinishReason.ABORT:
        begun = len(segments)
        if segments:
            so_far = [request.token_ids, *(segment.token_ids for segment in segments)]
            asked = replace(request, token_ids=np.concatenate(so_far))
        async for segment in engine.generate(asked):
            segments.append(segment)
        if len(segments) == begun:
            raise EngineError(
                f"engine {engine.name} ended request {request.sample_id} without a segment"
            )
    return segments
