"""A session's dialogue in token ids: the prompt of a request, the answer of sampled ids.

Ids that were sampled are never made anew from text. A prompt begins with all ids of an earlier
call, prompt and answer, where the request's messages begin with its messages and the renderer can
prove that the dialogue goes on with just these ids; else the call is a root.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlstreams.schemas.events import CallCommitted
from rlstreams.streams.sessions.chain import unpacked
from rlstreams.streams.sessions.session import Session, added, sampled_tokens
from rlstreams.workers.engines.base import Int32s, Sampling
from rlstreams.workers.engines.sampled import stop_of
from rlstreams.workers.gateway.canonical import Matcher, Spelled, answer_message
from rlstreams.workers.gateway.limits import least_tokens, too_long
from rlstreams.workers.gateway.port import CallAnswer, CallRefusedError, CallRequest, Message
from rlstreams.workers.gateway.shared import SharedParts


@dataclass(frozen=True, slots=True)
class PromptIds:
    """The ids that the policy goes on from."""

    token_ids: Int32s  # all of them
    new_ids: Int32s  # behind the parent's answer
    parent: str | None  # the call whose ids they begin with
    why_root: str  # why there is no parent, though the session has calls


class Dialogue:
    """The calls of a session by their messages."""

    def __init__(
        self, shared: SharedParts, log: Session, sampling: Sampling, matcher: Matcher
    ) -> None:
        self._shared = shared
        self._matcher = matcher
        self._log = log
        self._sampling = sampling
        self._continued: dict[bytes, str] = {}  # by digest of messages and answer: the call
        # The call that was continued last ("": none was), and its ids.
        self._newest = "", np.zeros(0, np.int32)

    def remember(self, spelled: Spelled, answer: CallAnswer) -> None:
        """Remember an answer that a later request may continue."""
        self._said_behind(spelled, answer_message(answer.parsed), answer.call_id)

    def recall(self) -> None:
        """Remember all recorded calls, each of which a later request may continue. One that cannot
        be read is continued by none."""
        for call in self._log.calls:
            with suppress(CallRefusedError, KeyError, ValueError):
                request = self._shared.read_again(call.dialect, unpacked(call.request))
                spelled = self._matcher.spelled(request.messages, request.tools)
                self._said_behind(spelled, json.loads(unpacked(call.response)), call.call_id)

    def _said_behind(self, spelled: Spelled, answer: Message, named: str) -> None:
        said = self._matcher.spelled((*spelled.messages, answer), spelled.tools, spelled)
        self._continued[said.chain[-1]] = named

    def prompt(self, request: CallRequest, spelled: Spelled) -> PromptIds:
        """The ids that the policy goes on from.

        Raises:
            CallRefusedError: 400; messages that the template does not take, or far too many.
        """
        known = [
            (n, self._continued[d]) for n, d in enumerate(spelled.chain) if d in self._continued
        ]
        num, named = known[-1] if known else (0, "")
        longest = self._shared.engine.max_tokens
        if least := least_tokens(request.messages[num:], self._shared.tokenizer, longest):
            raise too_long(least, longest, " or more")
        parent, why_root = self._parent(request, num, named)
        if parent is None:
            whole = np.array(
                self._shared.renderer.render(request.messages, request.tools), np.int32
            )
            return PromptIds(whole, whole, None, why_root)
        named, before, new_ids = parent
        return PromptIds(np.concatenate([before, new_ids]), new_ids, named, "")

    def _parent(
        self, request: CallRequest, num: int, parent: str
    ) -> tuple[tuple[str, Int32s, Int32s] | None, str]:
        """The call that is continued, its ids, and the new ids after them; or why there is none.

        Args:
            num: of the request's messages that `parent`, its answer included, begins with.
        """
        if not parent:
            return None, "no call's messages begin these" if self._log.nodes else ""
        before = self._tokens_of(parent)
        sampled = sampled_tokens(self._log.nodes[parent].call)
        new_ids = self._shared.renderer.bridge(
            before[:-sampled].tolist() if sampled else before.tolist(),
            before[-sampled:].tolist() if sampled else [],
            request.messages[num:],
            request.tools,
        )
        if new_ids is None:
            return None, f"{self._shared.renderer.name} cannot continue call {parent} by its ids"
        return (parent, before, np.array(new_ids, np.int32)), ""

    def _tokens_of(self, named: str) -> Int32s:
        """As `Session.tokens_of`; along a dialogue only the last call's tokens are appended."""
        node = self._log.nodes[named]
        before, ids = self._newest
        if node.parent is not None and before == node.parent.call.call_id and not node.problem:
            ids = np.concatenate([ids, *added(node.call)])
        else:
            ids = self._log.tokens_of(named)
        self._newest = named, ids
        return ids

    def read(
        self,
        request: CallRequest,
        prompt_ids: Int32s,
        sampled_ids: Sequence[int],
        is_cut: bool,
        named: str,
    ) -> CallAnswer:
        """The answer of sampled ids, without the fields of its record; a replay makes the same."""
        shared = self._shared
        parsed = shared.renderer.parse(
            sampled_ids, request.tools, prompt_ids=prompt_ids.tolist(), call_id=named
        )
        text = shared.tokenizer.decode(sampled_ids)
        stopped_by = stop_of(text, request.stop)
        tail = text[text.index(stopped_by) :] if stopped_by else ""
        parsed = replace(
            parsed,
            content=_without(parsed.content, tail),
            reasoning=_without(parsed.reasoning, "" if parsed.content else tail),
        )
        ended = "length" if is_cut else "tool_calls" if parsed.tool_calls else "stop"
        return CallAnswer(
            call_id=named,
            created_s=0,
            parsed=parsed,
            finish_reason=ended,
            prompt_tokens=len(prompt_ids),
            tokens=tuple(map(shared.tokenizer.text_of, sampled_ids)),
            logprobs=(),
            stopped_by="" if parsed.tool_calls else stopped_by,
            overruled=overruled_by(self._sampling, request.requested),
        )

    def again(self, request: CallRequest, recorded: CallCommitted) -> CallAnswer:
        """The answer of a recorded call."""
        num, ids = sampled_tokens(recorded), self._log.tokens_of(recorded.call_id)
        answer = self.read(
            request,
            ids[: len(ids) - num],
            ids[len(ids) - num :].tolist(),
            recorded.finish_reason == "length",
            recorded.call_id,
        )
        return replace(answer, **of_record(recorded), is_replayed=True)


def _without(text: str, tail: str) -> str:
    """A parsed text without its tail, of which a parser may have taken the spaces."""
    for end in (tail, tail.rstrip()):
        if end and text.endswith(end):
            return text.removesuffix(end)
    return text


def overruled_by(sampling: Sampling, requested: Mapping[str, Any]) -> dict[str, Any]:
    """Requested parameters, by name, that the run decides otherwise."""
    decided = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
    }
    return {
        name: value
        for name, value in requested.items()
        if value is not None and decided.get(name) != value
    }


def of_record(recorded: CallCommitted) -> dict[str, Any]:
    """Fields of an answer that only its record has."""
    logprobs = [s.behavior_logprobs for s in recorded.segments]
    return {
        "created_s": recorded.finished_at_ms // 1000,
        "is_trained": recorded.is_trained,
        "logprobs": tuple(
            value for part in logprobs if part is not None for value in part.numpy().tolist()
        ),
    }
