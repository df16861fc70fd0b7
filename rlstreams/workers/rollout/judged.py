"""Samples for a verifier from records of the log: a session, or a trajectory. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from rlstreams.schemas.events import Trajectory
from rlstreams.streams.log.group_ids import sample_name
from rlstreams.streams.rows import main_row
from rlstreams.streams.segments import ids_of, turns
from rlstreams.streams.sessions.chain import Chain
from rlstreams.workers.sandbox.reward import STOP, AnswerToJudge


def sample_of_chain(
    chain: Chain, text: str, answer: str, metadata: str, decode: Callable[[Sequence[int]], str]
) -> AnswerToJudge:
    """The sample of a chain, to be judged.

    Args:
        text, answer, metadata: of its prompt.
        decode: special tokens are left out.

    Raises:
        schemas.TensorError: tokens that cannot be read.
        ValueError: metadata that is no JSON.
    """
    answers = [ids_of(call.segments) for call in chain.calls]
    cut = chain.calls[-1].finish_reason == "length"
    return AnswerToJudge(
        prompt=text,
        completion=decode(answers[-1]),
        answer=answer,
        metadata=json.loads(metadata or "{}"),
        finish_reason="length" if cut else STOP,
        token_ids=answers[-1],
        transcript=[{"author": "policy", "text": decode(ids)} for ids in answers],
    )


def sample_of_trajectory(
    event: Trajectory,
    text: str,
    answer: str,
    metadata: str,
    decode: Callable[[Sequence[int]], str],
) -> AnswerToJudge:
    """The sample of a trajectory, to be judged again: the last turn of its main row, and all of
    them. An environment's text is given as the policy read it, with the template's own words
    around it.

    Args, Raises: as `sample_of_chain`; ValueError too: the policy said nothing.
    """
    said = list(turns(main_row(event)))
    own = [(segments, ids) for author, segments, ids in said if author == "policy"]
    if not own:
        raise ValueError(f"sample {sample_name(event)} has no token of the policy")
    segments, ids = own[-1]
    return AnswerToJudge(
        prompt=text,
        completion=decode(ids),
        answer=answer,
        metadata=json.loads(metadata or "{}"),
        finish_reason=segments[-1].finish_reason or STOP,
        token_ids=ids,
        transcript=[{"author": author, "text": decode(some)} for author, _, some in said],
    )
