"""A session whose agent runs now: each of its requests is one call, sampled once at most.

A request is one of these, the first that fits:

1. one that its client sends again: it is the same call (`equals`);
2. recorded, as the n-th of its kind in an earlier start of the agent: answered from the log;
3. else it is sampled. Its answer leaves when its record is in the log (`SessionRecords.appended`).

A request that fails is no call: the next try of it is the same occurrence again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from rlstreams.schemas.events import (
    CallCommitted,
    CallFailed,
    CallReplayed,
    Prompt,
)
from rlstreams.streams.log.codec import now_ms
from rlstreams.streams.log.errors import StreamsError
from rlstreams.streams.log.record import Record
from rlstreams.streams.sessions.session import Session
from rlstreams.workers.engines.base import PromptTooLongError, SampleRequest, Sampling
from rlstreams.workers.engines.sampled import Sampled, sampled_of
from rlstreams.workers.engines.turn import whole_turn
from rlstreams.workers.gateway.auxiliary import Auxiliary
from rlstreams.workers.gateway.canonical import Matcher, Spelled, call_id
from rlstreams.workers.gateway.dialogue import Dialogue, PromptIds, of_record
from rlstreams.workers.gateway.equals import AskedCall, EqualCalls
from rlstreams.workers.gateway.limits import (
    Budget,
    CallLimits,
    LimitError,
    Share,
    Trouble,
    check_parameters,
    too_long,
)
from rlstreams.workers.gateway.port import (
    CallAnswer,
    CallRefusedError,
    CallRequest,
    Report,
    ending,
    moving,
)
from rlstreams.workers.gateway.records import SessionRecords
from rlstreams.workers.gateway.shared import BUSY_S, OVERLOADED, SharedParts
from rlstreams.workers.gateway.word import Word
from rlstreams.workers.model.base import EngineError

MAX_REFUSALS = 100  # of one start that are recorded
_SILENT = (401, 410, 429)  # statuses of refusals that are not recorded


class OpenSession:
    """One start of a session's agent; lives on the engine's event loop."""

    def __init__(
        self,
        shared: SharedParts,
        record: Record[Prompt],
        log: Session,
        limits: CallLimits,
        sampling: Sampling,
        matcher: Matcher,
        auxiliary: Auxiliary,
        *,
        goes_on: bool = False,
    ) -> None:
        """
        Args:
            record: the prompt; its partition is that of all records of the session.
            log: what is recorded of it so far; grows with each call.
            goes_on: its client does not begin anew with this start: keys of earlier ones hold, and
                its next request continues calls of those.
        """
        self.log = log
        self.start = log.num_starts
        self.goes_on = goes_on
        self.first_start = 0 if goes_on else self.start
        """Earliest start whose key is accepted."""
        self.trouble: Trouble | None = None
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with the error that ends this process: no agent can go on here."""
        self._shared = shared
        self._record = record
        self._budget = Budget(limits, log)
        self._sampling, self._matcher = sampling, matcher
        self._is_closed = False
        self._lost = asyncio.Event()  # it goes on elsewhere
        self._equals: defaultdict[str, EqualCalls] = defaultdict(EqualCalls)  # by request hash
        self._under_way: dict[asyncio.Task[CallAnswer], AskedCall] = {}
        self._noted: set[tuple[str, int, str]] = set()  # refusals that were recorded
        self.records = SessionRecords(shared, record, log.session_id, self.start, auxiliary)
        self.word = Word(self.records, log, goes_on=goes_on)
        self._dialogue = Dialogue(shared, log, sampling, matcher)
        self._spelled: Spelled | None = None  # of the newest request: the next one often goes on
        if goes_on:
            self._dialogue.recall()

    @property
    def session_id(self) -> str:
        """`{group_id}/{sample}`."""
        return self.log.session_id

    @property
    def num_under_way(self) -> int:
        """Requests that wait for their answer."""
        return len(self._under_way)

    async def begin(
        self,
        agent: str,
        agent_hash: str,
        caught_up: Callable[[], bool] | None = None,
        client_group: str = "",
        *,
        branches: bool = False,
    ) -> None:
        """Record that the agent is started; before the first of its calls.

        After this record no call of an earlier start counts, whichever process writes it.

        Args:
            branches: see `SessionOpened`.
            caught_up: once it is committed, takes the earlier records of others into `log`;
                returns whether that is all. None: nobody else had the session.
        """
        opened = await self.records.committed(
            self.records.opened(agent, agent_hash, client_group, branches=branches),
            is_progress=False,
        )
        if caught_up is not None:
            await self.records.settled(caught_up)
        self.log.open(opened)
        self._ordinals = itertools.count(len(self.log.nodes))

    async def call(self, request: CallRequest) -> CallAnswer:
        """The answer, once its record is in the log; see `Calls.call`."""
        self.check_open()
        spelled = self._matcher.spelled(request.messages, request.tools, self._spelled)
        self._spelled, request_hash = spelled, self._matcher.request_hash(request, spelled)
        equal = self._equals[request_hash]
        one = equal.found(request)
        if one is None:
            one = equal.begin(request, self.log.answered_occurrences(self.start, request_hash))
            one.work = asyncio.get_running_loop().create_task(
                self._answer(request, spelled, request_hash, one)
            )
            self._under_way[one.work] = one
            one.work.add_done_callback(partial(self._is_done, equal, one))
        one.tried = max(one.tried, request.retry or 0)
        one.num_listening += 1
        try:
            return await self._heard(one)
        finally:
            one.num_listening -= 1

    async def _heard(self, one: AskedCall) -> CallAnswer:
        """The answer of a call, for one client more."""
        if (answer := one.answer) is not None:
            answer = replace(answer, is_replayed=True)
        else:
            assert one.work is not None
            try:
                answer = await asyncio.shield(one.work)
            except asyncio.CancelledError:
                if one.work.cancelled():  # not the client hung up: the session is over
                    raise self._gone() from None
                raise
        if not one.is_heard:  # the record says that nobody had it
            one.is_heard = True
            await self._replay(self.log.nodes[answer.call_id].call)
        return answer

    def check_open(self) -> None:
        """
        Raises:
            CallRefusedError: 410; the session is over.
        """
        if self._is_closed or self.log.is_closed:
            raise self._gone()

    async def report(self, report: Report) -> str:
        """Write a reward; see `Calls.report`. One that the session's move cuts is said again."""
        writing = asyncio.ensure_future(self.word.report(report))
        lost = asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait({writing, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                raise self._gone()
            return writing.result()
        finally:
            writing.cancel()
            lost.cancel()

    def _gone(self) -> CallRefusedError:
        if self._lost.is_set() and self.goes_on:
            return moving()
        return CallRefusedError(410, "session_closed", f"session {self.session_id} is over")

    def _is_done(self, equal: EqualCalls, one: AskedCall, work: asyncio.Task[CallAnswer]) -> None:
        del self._under_way[work]
        if one.answer is None:
            equal.refuse(one)
        if not work.cancelled():
            work.exception()  # seen, should all its clients be gone

    async def close(self, *, is_lost: bool = False) -> None:
        """Take no more requests; sampling is cut, commits under way are waited for.

        Args:
            is_lost: it goes on elsewhere, so nothing is committed here any more.
        """
        self._is_closed = True
        if is_lost:
            self._lost.set()
        while self._under_way:
            for work, one in self._under_way.items():
                if is_lost or not one.is_written:
                    work.cancel()
            await asyncio.wait(list(self._under_way))
        self.broken.cancel()

    async def _answer(
        self, request: CallRequest, spelled: Spelled, request_hash: str, one: AskedCall
    ) -> CallAnswer:
        recorded = self.log.recorded(request_hash, one.occurrence)
        before = self.trouble
        try:
            if recorded is not None:
                answer = await self._replayed(request, recorded, one)
            else:
                check_parameters(request)
                with self._budget.call() as share:
                    answer = await self._live(request, spelled, request_hash, one, share)
        except CallRefusedError as err:
            if isinstance(err, LimitError) or err.code == OVERLOADED:
                self.trouble = Trouble(is_limit=isinstance(err, LimitError), detail=str(err))
            if err.status not in _SILENT:
                self._note(self.records.failed(request_hash, one.occurrence, err))
            raise
        if self.trouble is before:  # one that came meanwhile stands: its agent was told later
            self.trouble = None
        one.answer = answer
        self._dialogue.remember(spelled, answer)
        return answer

    async def _live(
        self,
        request: CallRequest,
        spelled: Spelled,
        request_hash: str,
        one: AskedCall,
        share: Share,
    ) -> CallAnswer:
        received_ms = now_ms()
        named = call_id(self.session_id, request_hash, one.occurrence)
        async with self._place(self._equals[request_hash], one):
            prompt = self._dialogue.prompt(request, spelled)
            sampled = await self._sampled(request, prompt, named, share)
        answer = self._dialogue.read(
            request, prompt.token_ids, sampled.token_ids, sampled.is_cut, named
        )
        draft = self.records.call(request, prompt, sampled, answer)
        one.is_written = True
        load_ids = await self._load_ids(sampled)
        one.is_heard = one.num_listening > 0
        event = replace(
            draft,
            call_id=named,
            request_hash=request_hash,
            occurrence=one.occurrence,
            received_at_ms=received_ms,
            segments=sampled.events(load_ids.__getitem__, self._sampling),
            ordinal=next(self._ordinals),
            finished_at_ms=now_ms(),
            unheard=not one.is_heard,
        )
        await self._append(event)
        self.log.commit(event)
        return replace(answer, **of_record(event))

    @asynccontextmanager
    async def _place(self, equal: EqualCalls, one: AskedCall) -> AsyncIterator[None]:
        """A place in the engine. While all are taken, it waits for equal calls that have one: who
        wants eight answers is not refused those that one after another would be given.

        Raises:
            CallRefusedError: 429; see `SharedParts.place`.
        """
        while self._shared.is_full:
            ahead = [other.work for other in equal.under_way if other.has_place and other.work]
            if not ahead:
                break
            await asyncio.wait(ahead, return_when=asyncio.FIRST_COMPLETED)
        with self._shared.place():
            one.has_place = True
            try:
                yield
            finally:
                one.has_place = False

    def _note(self, failed: CallFailed) -> None:
        """Have a refusal recorded: an agent in a loop has each only once, and not all of them."""
        named = (failed.request_hash, failed.occurrence, failed.reason)
        if named not in self._noted and len(self._noted) < MAX_REFUSALS:
            self._noted.add(named)
            self.records.note(failed)

    async def _append(self, event: CallCommitted | CallReplayed) -> None:
        try:
            await self.records.appended(event)
        except StreamsError as err:
            self._break(err)
            raise ending(str(err)) from err

    async def _load_ids(self, sampled: Sampled) -> Mapping[int, str]:
        """Load ids by version; a record names only loads whose records are written."""
        shared = self._shared

        def known() -> dict[int, str]:
            loads = shared.loads()
            return {v: loads[v].load_id for v in sampled.versions if v in loads}

        found = known()
        if len(found) < len(sampled.versions) or not shared.readable.issuperset(found.values()):
            await self.records.settled(lambda: len(known()) == len(sampled.versions))
            found = known()
            shared.readable.update(found.values())
        return found

    def _break(self, err: Exception) -> None:
        """No agent can go on here: the process ends, and its sessions go on in the next."""
        if not self.broken.done():
            self.broken.set_exception(err)

    async def _sampled(
        self, request: CallRequest, prompt: PromptIds, named: str, share: Share
    ) -> Sampled:
        engine, given = self._shared.engine, len(prompt.token_ids)
        if given >= engine.max_tokens:
            raise too_long(given, engine.max_tokens)
        wanted = [self._sampling.max_new_tokens, engine.max_tokens - given]
        if request.max_tokens is not None:
            wanted.append(request.max_tokens)
        most = await share.take(min(wanted))
        for attempt in range(self._shared.max_attempts):
            asked = SampleRequest(
                sample_id=f"{self.session_id}/{named}/{attempt}",
                group_id=self._record.event.group_id,
                token_ids=prompt.token_ids,
                prompt_tokens=given,
                sampling=replace(self._sampling, max_new_tokens=most),
                seed=self._record.event.seed,
                session=self.session_id,
            )
            try:
                segments = await whole_turn(engine, asked)
            except PromptTooLongError:
                raise too_long(given, engine.max_tokens) from None
            except EngineError as err:
                failed = err
            else:
                return sampled_of(
                    segments, given, attempt, request.stop, self._shared.tokenizer.decode
                )
        raise self._failed_engine(failed)

    def _failed_engine(self, failed: EngineError) -> CallRefusedError:
        """Make the refusal; an engine that will sample no more ends the worker, too: its sessions
        go on in the next one."""
        if not self._shared.engine.is_ready:
            self._break(failed)
        self.trouble = Trouble(is_limit=False, detail=str(failed))
        return CallRefusedError(503, "engine_failed", str(failed), retry_after_s=BUSY_S)

    async def _replayed(
        self, request: CallRequest, recorded: CallCommitted, one: AskedCall
    ) -> CallAnswer:
        one.is_heard = True
        await self._replay(recorded)
        return self._dialogue.again(request, recorded)

    async def _replay(self, recorded: CallCommitted) -> None:
        event = self.records.replayed(recorded)
        await self._append(event)
        self.log.replay(event)
