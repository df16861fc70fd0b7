"""A few sessions of each agent, as a run would have them, without a broker: a commit is
acknowledged at once, and nothing is kept."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from rlstreams.check.trial.sample import (
    Completion,
    Say,
    Times,
    TriedRow,
    all_of,
    block,
    given_lines,
    left_out,
    loaded,
    prompts_of,
    verdict,
)
from rlstreams.schemas.calls import JUDGED
from rlstreams.schemas.events import Prompt
from rlstreams.streams.log.bus import Closing
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.record import Outgoing, Position, RawRecord, Record
from rlstreams.streams.log.topics import PROMPTS
from rlstreams.streams.sessions.figures import SessionFigures, session_figures
from rlstreams.streams.sessions.session import Session, sampled_tokens
from rlstreams.words.dialogue import words_of
from rlstreams.words.screen import visible
from rlstreams.words.session_text import session_lines
from rlstreams.words.spelling import Spelling
from rlstreams.workers.bootstrap.sessions import sessions_of
from rlstreams.workers.config.agents import AgentSection
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.dataset.limits import PromptEncoder, PromptLimits
from rlstreams.workers.dataset.row import Row
from rlstreams.workers.loop.commit_requests import CommitRequests
from rlstreams.workers.policy.puller import Load
from rlstreams.workers.rollout.history import session_of
from rlstreams.workers.rollout.sessions import Closed, Sessions
from rlstreams.workers.sandbox.reward import Judgement, Verifier

WORKER = "try"
_COMMIT_S = 0.002  # between two looks at what is to be committed


class Nowhere(Closing):
    """The port `Appender` without a log: what is appended is acknowledged, and gone."""

    def append(self, record: Outgoing) -> Future[Position]:
        """See `Appender`."""
        answer: Future[Position] = Future()
        answer.set_result(Position(record.topic, 0, 0))
        return answer

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedAgent:
    """One agent with its rows, and the session of each answer."""

    name: str
    rows: Sequence[TriedRow]
    sessions: Sequence[Sequence[SessionFigures]]  # by row


def agent_lines(tried: TriedAgent) -> Iterator[str]:
    """Each row: the task, the answer wanted, and each session word by word."""
    for index, (row, sessions) in enumerate(zip(tried.rows, tried.sessions, strict=True), 1):
        yield f"row {index} of {len(tried.rows)}  {row.row.place}, agent {tried.name}"
        yield from block("task", str(row.row.prompt))
        yield from given_lines(row)
        for figures, completion in zip(sessions, row.completions, strict=True):
            yield ""
            for line in session_lines(figures, is_full=True):
                yield f"  {visible(line)}"
            yield f"  {verdict(completion)}"
        yield ""


@dataclass(slots=True, kw_only=True)
class AgentTrial:
    """The model and a verifier, loaded, and the agents that are configured.

    Raises:
        EngineError: from `loaded`.
    """

    config: RunConfig
    verifier: Verifier
    encoder: PromptEncoder
    spelling: Spelling
    note: Callable[[str], None]
    say: Say  # called with the progress of slow work; "": it is done
    times: Times = field(default_factory=Times)

    def run(self, rows: Sequence[Row], num_samples: int) -> list[TriedAgent]:
        """Have each agent work on each row `num_samples` times, all of one agent together.

        Raises:
            ConfigError: an agent that cannot be started, or that runs elsewhere.
            EngineError: the model cannot be loaded.
        """
        if away := [section.name for section in self.config.agent if section.is_elsewhere]:
            raise ConfigError(
                f"agent {away[0]!r} runs elsewhere, so `try` cannot start it; "
                "give it a `command` here, or start a run: rlstreams up"
            )
        return asyncio.run(self._run(rows, num_samples))

    async def _run(self, rows: Sequence[Row], num_samples: int) -> list[TriedAgent]:
        started_s = time.monotonic()
        channel, engine = loaded(self.config)
        await engine.pull(channel.published, channel)
        self.times.load_s = time.monotonic() - started_s
        prompts = prompts_of(self.config, self.encoder, rows)
        limits = PromptLimits.of(self.config.data, self.encoder, engine.max_tokens)
        reasons = left_out(limits, rows, prompts)
        issued = [
            dataclasses.replace(prompt, sample=number, group_size=num_samples)
            for prompt, why in zip(prompts, reasons, strict=True)
            for number in range(0 if why else num_samples)
        ]
        found = []
        load = Load(weight_hash=channel.published.weight_hash, load_id=f"{WORKER}/0")
        try:
            for section in self.config.agent:
                with tempfile.TemporaryDirectory(prefix="rlstreams-try-") as folder:
                    sessions = sessions_of(
                        dataclasses.replace(self.config, agent=(section,)),
                        engine,
                        WORKER,
                        appender=Nowhere(),
                        verifier=self.verifier,
                        folder=Path(folder),
                        worker=WORKER,
                        instance=WORKER,
                        note=self.note,
                    )
                    sessions.open_sessions.shared.loads = lambda: {0: load}
                    closed = await self._played(sessions, issued)
                found.append(self._tried(section, rows, prompts, reasons, closed))
        finally:
            await engine.close()
        return found

    async def _played(self, sessions: Sessions, prompts: Sequence[Prompt]) -> list[Closed]:
        """Run the sessions of the prompts to their ends; commits are acknowledged, and not kept."""
        started_s = time.monotonic()
        try:
            async with asyncio.TaskGroup() as tasks:
                committing = tasks.create_task(_commit(sessions.open_sessions.shared.commits))
                await sessions.start()
                rolled = (_rolled(sessions, prompt) for prompt in prompts)
                closed = await all_of(rolled, "sessions that have ended", self.say)
                committing.cancel()
        finally:
            self.say("")
            await sessions.close()
        self.times.sample_s += time.monotonic() - started_s
        return closed

    def _tried(
        self,
        section: AgentSection,
        rows: Sequence[Row],
        prompts: Sequence[Prompt],
        reasons: Sequence[str],
        closed: Sequence[Closed],
    ) -> TriedAgent:
        tried, sessions = [], []
        for row, prompt, why in zip(rows, prompts, reasons, strict=True):
            own = [one for one in closed if one.session.log.session_id.startswith(
                f"{prompt.group_id}/")]  # fmt: skip
            completions = tuple(map(_completion, own))
            self.times.num_tokens += sum(len(one.token_ids) for one in completions)
            ids = prompt.token_ids.numpy().tolist()
            tried.append(TriedRow(row=row, prompt_ids=ids, left_out=why, completions=completions))
            words = words_of(self.spelling)
            sessions.append([session_figures(one.session.log, words) for one in own])
        return TriedAgent(name=section.name, rows=tried, sessions=sessions)


async def _commit(commits: CommitRequests) -> None:
    while True:
        for one in commits.take():
            one.committed()
        await asyncio.sleep(_COMMIT_S)


async def _rolled(sessions: Sessions, prompt: Prompt) -> Closed:
    """Run a session to its end, and log its outcome and its close as a run would."""
    closed = await sessions.roll_out(_record(prompt), Session(session_id=session_of(prompt)))
    log = closed.session.log
    if closed.outcome is not None:
        log.judge(closed.outcome)
    if not log.is_closed:
        log.close(closed.session.records.closed(log, closed.kind, closed.detail))
    return closed


def _record(prompt: Prompt) -> Record[Prompt]:
    """A record of the prompt, as a log would have it."""
    raw = RawRecord(Position(PROMPTS.name, 0, 0), (0,), prompt.group_id.encode(), b"")
    return Record(event=prompt, raw=raw)


def _completion(closed: Closed) -> Completion:
    """Reward of a session, or why its sample would be set aside."""
    calls, judged = closed.session.log.calls, closed.judged
    is_judged = closed.kind in JUDGED and judged is not None
    waits = "a run waits for outcomes by its graders, too" if closed.is_waiting else ""
    return Completion(
        text="",
        token_ids=range(sum(map(sampled_tokens, calls))),
        finish_reason=closed.kind,
        judgement=Judgement(reward=judged.reward, parts=judged.parts, note=judged.note)
        if is_judged and judged is not None
        else None,
        rejected="" if is_judged else f"{closed.kind}: {closed.detail}",
        note=waits,
    )
