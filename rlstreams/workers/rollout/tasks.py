"""An agent's sample, as it is told: the place in the run, and the task."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rlstreams.schemas.events import Prompt
from rlstreams.streams.sessions.session import Session
from rlstreams.workers.agents.agent import SamplePlace


def place_of(prompt: Prompt, log: Session, siblings: Mapping[str, str]) -> SamplePlace:
    """The place of a sample, with the client group that it had."""
    return SamplePlace(
        session_id=log.session_id,
        group_id=prompt.group_id,
        group_size=prompt.group_size,
        client_group=log.opened.client_group if log.opened is not None else "",
        siblings=siblings,
    )


def task_of(prompt: Prompt, session_id: str, *, with_answer: bool) -> dict[str, object]:
    """The task that an agent is given: the row, and the sample's place in the run.

    Args:
        with_answer: it judges itself. Where a verifier does, the answer is that verifier's alone:
            an agent that can read its task could copy it.
    """
    return {
        "prompt": prompt.text,
        **({"answer": prompt.answer} if with_answer else {}),
        "metadata": json.loads(prompt.metadata or "{}"),
        "session": session_id,
        "sample": prompt.sample,
        "purpose": prompt.purpose,
        "seed": prompt.seed,
    }
