"""From a prompt to a judged rollout: drive the engine, turn by turn, until the sample ends.

Runs on the engine's event loop. Where there is an environment, it answers each turn that the policy
ended, until it says that the sample is over, `max_turns` is reached, or there is no room. An engine
may end a segment because the policy changed (the next segment follows automatically) or because the
request was aborted; then the turn is requested again with the tokens so far, and continues under
the weights that the engine holds by then. Tokens that were sampled are only appended to, never made
anew from their text.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from rlstreams.schemas.events import EVALUATE, Prompt
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.group_ids import sample_name
from rlstreams.streams.log.record import Record
from rlstreams.streams.log.topics import TRAJECTORIES
from rlstreams.workers.config.run import RolloutSection
from rlstreams.workers.engines.base import (
    Engine,
    FinishReason,
    PromptTooLongError,
    SampleRequest,
    Sampling,
)
from rlstreams.workers.engines.turn import whole_turn
from rlstreams.workers.loop.context import Context
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.model.tokenizer import Tokenizer
from rlstreams.workers.policy.puller import Loads
from rlstreams.workers.rollout.clock import SampleClock
from rlstreams.workers.rollout.episode import EnvironmentSegment, Played, Turn, turn_of
from rlstreams.workers.rollout.player import Concluded
from rlstreams.workers.rollout.trajectory import trajectory_of
from rlstreams.workers.rollout.turns import Turns
from rlstreams.workers.sandbox.environment import Ends, PolicyTurn, Says, UserEpisode
from rlstreams.workers.sandbox.reward import AnswerToJudge, Judgement, Verifier
from rlstreams.workers.sandbox.user_code import LostCallError, SuspectCallError

MOST_PER_TOKEN = 32  # characters; text has about 4


def sampling_of(section: RolloutSection) -> Sampling:
    """Sampling parameters of a section, as an engine takes them."""
    return Sampling(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        max_new_tokens=section.max_new_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """The port `Player`: each sample is one dialogue, driven from here."""

    engine: Engine
    verifier: Verifier
    tokenizer: Tokenizer
    sampling: Sampling
    evaluation: Sampling | None = None  # of held-out rows; None: as all others
    turns: Turns | None = None  # None: a sample is one answer
    max_attempts: int
    deadline_s: float
    clock: SampleClock = field(default_factory=SampleClock)

    @property
    def commits(self) -> None:
        """None: a sample is committed when it is over, and no request waits for that."""
        return

    @property
    def num_apart(self) -> int:
        """Samples that wait for a slow judge."""
        return self.verifier.num_open

    num_unjudged = num_apart

    num_late = 0

    @property
    def num_waiting(self) -> int:
        """Samples that wait for a judge with shifts of its own."""
        return self.verifier.num_elsewhere

    @property
    def address(self) -> str:
        """See Player: nobody calls."""
        return ""

    @property
    def waits_for(self) -> str:
        """That judge."""
        return self.verifier.waits_for

    async def open(self, loads: Callable[[], Loads]) -> None:
        """Do nothing: there is nothing to make ready."""

    async def stop(self) -> None:
        """End the environment; the engine's end ends what is sampled."""
        if self.turns is not None:
            await asyncio.to_thread(self.turns.environment.close)

    def close(self) -> None:
        """Let go of the verifier."""
        self.verifier.close()

    def sift(self, waiting: list[Record[Prompt]]) -> list[Record[Prompt]]:
        """Return all: only a trajectory or a dead letter ends a prompt."""
        return waiting

    def ready(
        self, waiting: Sequence[Record[Prompt]], num_running: int
    ) -> Sequence[Record[Prompt]]:
        """Return all; the engine has its own queue."""
        return waiting

    def concluded(
        self, record: Record[Prompt], rolled: Played, loads: Loads, context: Context, judge: str
    ) -> Concluded:
        """Make the trajectory of a sample."""
        trajectory = trajectory_of(
            *(record.event, record.position, rolled, loads, self.engine.name, context), judge=judge
        )
        return Concluded(
            record=record,
            outputs=(outgoing(TRAJECTORIES, trajectory),),
            counts=rolled.counts(in_turns=self.turns is not None),
        )

    def over(self, context: Context, judge: str) -> tuple[Concluded, ...]:
        """Return none: no sample waits."""
        return ()

    def give_up(self, numbers: Set[int]) -> None:
        """Do nothing: it keeps nothing by partition."""

    async def roll_out(self, record: Record[Prompt]) -> Played:
        """See `played`."""
        return await self.played(record.event)

    async def played(self, prompt: Prompt) -> Played:
        """Generate and judge one sample.

        Raises:
            PromptTooLongError: no room for an answer.
            EngineError: the engine failed `max_attempts` times; the last failure.
            UserCodeError: the environment failed, or its process ended as often while a step of
                this sample was one of several in it.
            TimeoutError: not finished within `deadline_s`.
            RewardError: the verifier failed.
        """
        started_s = time.monotonic()
        played = await self.generate(prompt)
        played.judgement = played.judgement or await self._judged(prompt, played)
        played.sample_s = time.monotonic() - started_s
        return played

    async def _judged(self, prompt: Prompt, played: Played) -> Judgement:
        last = played.last
        return await self.verifier.verify(
            AnswerToJudge(
                prompt.text,
                last.text,
                prompt.answer,
                json.loads(prompt.metadata or "{}"),
                last.finish_reason,
                last.token_ids,
                played.transcript,
            )
        )

    async def generate(self, prompt: Prompt) -> Played:
        """The attempt that succeeded, perhaps not judged; raises as `played` does."""
        played = Played(prompt_ids=prompt.token_ids.numpy().astype(np.int32, copy=False))
        num_failed, lost = 0, ""
        try:
            async with self.clock.limit(self.deadline_s):
                for attempt in itertools.count():
                    played = Played(prompt_ids=played.prompt_ids, attempt=attempt)
                    try:
                        await self._play(prompt, played)
                    except PromptTooLongError:
                        raise
                    except (EngineError, SuspectCallError):
                        num_failed += 1
                        if num_failed == self.max_attempts:
                            raise
                    except LostCallError as err:  # not charged: the deadline is its bound
                        lost = f"; attempt {attempt} was lost: {err}"
                    else:
                        return played
        except TimeoutError:
            raise TimeoutError(
                f"sample {sample_name(prompt)} was not finished by "
                f"{played.waits_for} within {self.deadline_s:g} s{lost}"
            ) from None
        raise AssertionError("counting has no end")

    def _sampling_of(self, prompt: Prompt) -> Sampling:
        return (prompt.purpose == EVALUATE and self.evaluation) or self.sampling

    async def _play(self, prompt: Prompt, played: Played) -> None:
        """One attempt, from the policy's first turn on."""
        if self.turns is None:
            await self._turn(prompt, played)
            return
        name = f"{sample_name(prompt)}/{played.attempt}"
        episode = self.turns.environment.begin(name, prompt)
        try:
            while True:
                turn = await self._turn(prompt, played)
                if turn.finish_reason is not FinishReason.STOP:
                    return  # cut: there is nothing to answer
                outcome = await self._step(episode, played, self.turns.max_turns)
                if isinstance(outcome, Ends):
                    played.judgement = outcome.judgement
                    return
                if not self._go_on(prompt, played, outcome, self.turns):
                    return
        finally:
            episode.leave()

    async def _step(self, episode: UserEpisode, played: Played, max_turns: int) -> Says | Ends:
        number, turn = len(played.turns), played.turns[-1]
        played.waits_for = f"its environment, in turn {number}"
        started_s = time.monotonic()
        try:
            return await episode.step(
                PolicyTurn(
                    number=number,
                    is_last=number >= max_turns,
                    text=turn.text,
                    raw=self.tokenizer.decode(turn.token_ids, skip_special_tokens=False),
                    token_ids=turn.token_ids,
                )
            )
        finally:
            played.environment_s += time.monotonic() - started_s

    def _go_on(self, prompt: Prompt, played: Played, says: Says, turns: Turns) -> bool:
        """Append the environment's answer, if a turn can follow; whether one can."""
        if len(played.turns) >= turns.max_turns:
            return False
        # Tokenising holds up the engine's loop, so a text that cannot fit is not tokenised.
        if len(says.text) > MOST_PER_TOKEN * self.engine.max_tokens:
            return False
        sampled = played.turns[-1].token_ids
        ids = turns.next_turn.tokens(says, sampled, is_chat=prompt.is_chat)
        if len(played.token_ids) + len(ids) >= self.engine.max_tokens:
            return False
        played.answers.append(EnvironmentSegment(token_ids=ids, text=says.text))
        return True

    async def _turn(self, prompt: Prompt, played: Played) -> Turn:
        """The policy's next turn; an aborted request is resumed where it was."""
        given = played.token_ids
        played.waits_for = f"engine {self.engine.name}"
        if self.turns is not None:
            played.waits_for += f", in turn {len(played.turns) + 1}"
        request = SampleRequest(
            sample_id=f"{sample_name(prompt)}/{played.attempt}",
            group_id=prompt.group_id,
            token_ids=given,
            prompt_tokens=len(given),
            sampling=self._sampling_of(prompt),
            seed=prompt.seed,
            session=sample_name(prompt),
        )
        segments = await whole_turn(self.engine, request)
        sampled = [token for segment in segments for token in segment.token_ids.tolist()]
        played.turns.append(turn_of(segments, self.tokenizer.decode(sampled)))
        return played.turns[-1]
