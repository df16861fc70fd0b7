"""One server: its gate, its requests, its weights.

`states.py` decides when the gate is open. It is shut from before the first byte of a pull until the
version is confirmed; a server that was lost, restarted or damaged stays shut until it has pulled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import Enum

from rlstreams.schemas.events import PolicyPublished, ServerLoad
from rlstreams.workers.engines.base import (
    FinishReason,
    GeneratedSegment,
    Held,
    PauseMode,
    SampleRequest,
)
from rlstreams.workers.engines.served.adapter import Adapter
from rlstreams.workers.engines.served.adapters import ADAPTERS, ask_usable
from rlstreams.workers.engines.served.answer import UnknownVersionError
from rlstreams.workers.engines.served.delivery import (
    PLUGIN,
    DeliveryError,
    DeliveryOrder,
    FolderDelivery,
)
from rlstreams.workers.engines.served.facts import ServerFacts
from rlstreams.workers.engines.served.http import REFUSED, ServerError, ServerGoneError, ServerHttp
from rlstreams.workers.engines.served.running import (
    Requests,
    Running,
    generate_request,
    longest_answer,
)
from rlstreams.workers.engines.served.settings import ServedSettings
from rlstreams.workers.engines.served.shape import ModelShape
from rlstreams.workers.engines.served.states import Event, ServerState, State
from rlstreams.workers.engines.served.wire import Answer, AnswerError
from rlstreams.workers.weights.channel import (
    BY_HASH,
    BY_TRANSFER,
    STORE,
    Pulled,
    WeightChannel,
    WeightError,
)
from rlstreams.workers.weights.file import CHANNEL as FILE


class Liveness(Enum):
    """Result of a look at a server."""

    ALIVE = "alive"
    SILENT = "silent"  # or it answers as one that does not work
    REFUSED = "refused"  # no process listens at its address


class ServerClient:
    """One server; belongs to the engine's event loop."""

    def __init__(
        self,
        url: str,
        settings: ServedSettings,
        shape: ModelShape,
        delivery: FolderDelivery,
        *,
        instance: str = "",
    ) -> None:
        """Nothing is asked before `meet`.

        Args:
            instance: of this process. The names that it gives to weights carry it, so that names
                given by a predecessor that woke up are unknown here.
        """
        self.url = url
        self.http = ServerHttp(url)
        self.state = ServerState()
        self.adapter: Adapter | None = None  # None: not up
        self.on_loss: Callable[[str], None] = lambda _: None  # receives the reason
        self._settings = settings
        self._shape = shape
        self._delivery = delivery
        self._owner = instance[:8]
        self._labels: dict[str, Held] = {}
        self.requests = Requests(self._abort, settings)
        self._memory = asyncio.Lock()  # held while it frees its memory, or takes it again

    @property
    def delivery_name(self) -> str:
        """Name of the way that weights reach it, for people."""
        return self._delivery.name

    @property
    def facts(self) -> ServerFacts | None:
        """The server's description of itself; None: not up."""
        return self.adapter.facts if self.adapter else None

    @property
    def held(self) -> Held | None:
        """The version in it; during a pull, the one before."""
        return self.state.held

    @property
    def is_up(self) -> bool:
        """Whether it answered the last question."""
        return self.state.is_up

    @property
    def load(self) -> ServerLoad:
        """Load of the server."""
        capacity = self.requests.capacity
        return ServerLoad(
            server=self.url,
            in_flight=len(self.requests),
            limit=capacity.limit,
            why=capacity.why,
            num_preemptions=capacity.num_preemptions,
        )

    async def meet(self) -> None:
        """Ask a server for its facts, and take it over; from now on it may pull.

        A worker that died may have used it: that worker's requests are ended, unless the engine
        hangs in a pull, and from now on its plugin obeys the orders of this process alone.

        Raises:
            ServerError: it is of another kind or version, or fails.
        """
        settings = self._settings
        facts = await ask_usable(
            self.http, settings.kind, settings.answer_s, allow_untested=settings.allow_untested
        )
        adapter = ADAPTERS[facts.kind](self.http, facts, settings.answer_s)
        await adapter.pause(PauseMode.ABORT, keep_cache=False, deadline_s=settings.silent_s)
        await self._delivery.prepare(adapter)
        self.adapter, self._labels = adapter, {}
        self.requests.capacity.meet()
        self.state.go(Event.MET, "holds no version that we gave it", is_trouble=False)
        self.state.trouble = ""

    async def look(self, deadline_s: float) -> Liveness:
        """Whether it answers `/health` as one that works: see `Adapter.alive`."""
        was_doubted = self.state.name is State.DOUBTED
        status = await self.http.status_of("/health", deadline_s)
        if status not in ADAPTERS[self._settings.kind].alive:
            return Liveness.REFUSED if status == REFUSED else Liveness.SILENT
        if was_doubted and self.state.can(Event.ANSWERED):  # a later doubt: the next look's
            self.state.go(Event.ANSWERED)
        return Liveness.ALIVE

    async def look_inside(self, deadline_s: float) -> bool:
        """Whether its engine answers, behind the front end that answers `/health`."""
        try:
            await self._met.ask_engine(deadline_s)
        except ServerGoneError:
            return False
        except ServerError:
            return True  # it refuses: no silence
        return True

    def doubt(self) -> None:
        """Send no more requests after one broke off, until a look finds the server at work."""
        if self.state.can(Event.BROKE_OFF):
            self.state.go(Event.BROKE_OFF)

    def lose(self, why: str, *, hangs: bool = False) -> None:
        """Shut a server that died or hangs, and end its requests.

        Args:
            hangs: its process may live, and its owner has to end it.
        """
        self.adapter, self._labels = None, {}
        self.state.go(Event.HUNG if hangs else Event.LOST, why)
        self.requests.hang_up(why)
        self.on_loss(why)

    async def ask(self, request: SampleRequest) -> list[GeneratedSegment]:
        """The request's segments. It counts as in flight before this first waits.

        Raises:
            ServerGoneError: the server broke off; the request may be asked again.
            ServerError: it refused, or a field of its answer cannot be.
        """
        assert self.held is not None, "the gate is shut"
        facts, label = self._met.facts, self._label(self.held)
        to_send = generate_request(request, self._settings, self._shape, facts.max_tokens, label)
        running = Running(request.sample_id, to_send, label, self._labels, facts)
        self.requests.begin(running)
        try:
            running.task = asyncio.ensure_future(self._answer(running))
            answer = await self._heard(running)
            return running.segments(answer, self._shape)
        except (asyncio.CancelledError, ServerGoneError):
            if self.is_up:
                self.requests.leave(running)
            raise
        except AnswerError as err:
            if isinstance(err, UnknownVersionError) and running.labels is self._labels:
                self.state.forget(f"answered with weights that are not ours: {err}")
            raise ServerError(
                f"server {self.url}: request {request.sample_id} ({to_send.request_id}): {err}"
            ) from err
        finally:
            self.requests.end(running)

    async def sleep(self) -> None:
        """Cut its requests, free its memory, and hold no version: only a pull opens its gate.

        Raises:
            ServerError: it did not; it may still hold the memory.
        """
        async with self._memory:
            adapter = self._met
            self.state.go(Event.EMPTIED, "falls asleep", is_trouble=False)
            await self._stop(PauseMode.ABORT)
            await adapter.sleep(self._settings.change_s)
            self._check_same(adapter, "its falling asleep")
            self.state.go(Event.SLEPT, "sleeps", is_trouble=False)

    async def wake(self) -> None:
        """Have a server that sleeps take its memory again; raises ServerError, if it does not.

        Waits for a `sleep` under way: else the server would stay asleep unnoticed.
        """
        async with self._memory:
            if self.state.name is not State.ASLEEP:
                return
            adapter = self._met
            await adapter.wake(self._settings.change_s)
            self._check_same(adapter, "its waking up")
            self.state.go(Event.WOKE, "holds no version since it slept", is_trouble=False)

    async def pull(self, published: PolicyPublished, channel: WeightChannel) -> Pulled:
        """Hold `published`. The gate is shut meanwhile.

        Raises:
            WeightError: the version did not arrive; `held` is the version left, if any.
        """
        started_s = time.monotonic()
        adapter = self._met
        self.state.go(Event.PULL)
        self.requests.capacity.rebase()
        try:
            return await self._pull(adapter, published, channel, started_s)
        except ServerError as err:
            self._end_pull(adapter, f"failed in the middle of a pull: {err}")
            if isinstance(err, ServerGoneError):
                await self._probe(adapter)
            raise WeightError(str(err)) from err
        finally:
            self._end_pull(adapter, "a pull was cut off")

    async def close(self) -> None:
        """End its requests, let it go on for others, and hang up."""
        await self.requests.close()
        await self.http.close()

    @property
    def _met(self) -> Adapter:
        """Adapter of the server; a ServerGoneError, if the server was lost."""
        if self.adapter is None:
            raise ServerGoneError(f"server {self.url} was lost: {self.state.why_shut}")
        return self.adapter

    def _label(self, held: Held) -> str:
        """The server's name for a version that this process gave it."""
        return f"{held.label}-{self._owner}" if self._owner else held.label

    async def _abort(self, running: Running) -> bool:
        """Have the server end a request; False: only hanging up does."""
        return self.adapter is None or await self.adapter.abort(running.request.request_id)

    async def _answer(self, running: Running) -> Answer:
        """Send the request; the whole answer."""
        adapter, deadline_s = self._met, self._settings.request_s
        what = f"request {running.sample_id} ({running.request.request_id})"
        body = adapter.body(running.request)
        longest = longest_answer(running.request, self._shape)
        found = await self.http.post(
            adapter.generate_route, body, deadline_s, what=what, longest_bytes=longest
        )
        return adapter.answer(found)

    async def _heard(self, running: Running) -> Answer:
        """The answer of the request's task; an empty one, if this process hung up."""
        assert running.task is not None
        try:
            return await running.task
        except asyncio.CancelledError as err:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise  # the caller has left
            if not self.is_up:
                raise ServerGoneError(
                    f"server {self.url}: request {running.sample_id}: {self.state.why_shut}"
                ) from err
            return Answer(token_ids=(), logprobs=(), finish_reason=FinishReason.ABORT)

    async def _pull(
        self,
        adapter: Adapter,
        published: PolicyPublished,
        channel: WeightChannel,
        started_s: float,
    ) -> Pulled:
        mode, is_mute = self._settings.on_pull, not adapter.facts.reports_versions
        await self._stop(PauseMode.ABORT if is_mute and mode is PauseMode.KEEP else mode)
        stopped_s = time.monotonic()
        order = DeliveryOrder(
            adapter=adapter,
            published=published,
            channel=channel,
            until_s=stopped_s + self._settings.pull_s,  # requests that finish first take none of it
        )
        if is_mute and len(self.requests):
            raise ServerError(f"server {self.url}: requests run on that were to end for a pull")
        try:
            num_bytes = await self._delivery.delivered(order)
        except DeliveryError as err:
            await self._recover(adapter, err)
            raise
        self._check_same(adapter, "its pull")
        label = self._label(order.held)
        self._labels[label] = order.held
        await adapter.set_label(label)
        self._check_same(adapter, "its pull")
        self.state.held = order.held  # tokens sampled from now on come from it
        await adapter.resume()
        self._check_same(adapter, "its pull")
        self.state.pulled(order.held)
        ended_s = time.monotonic()
        is_link = self._delivery.name == PLUGIN and channel.name not in (FILE, STORE)
        return Pulled(
            policy_version=published.policy_version,
            weight_hash=published.weight_hash,
            num_bytes=num_bytes,
            seconds=ended_s - started_s,
            paused_s=ended_s - stopped_s,
            verified=BY_TRANSFER if is_link else BY_HASH,
        )

    def _check_same(self, adapter: Adapter, when: str) -> None:
        """Raise if the server was lost since: its results are void, also if it is up again."""
        if self.adapter is not adapter:
            why = self.state.why_shut
            raise ServerGoneError(f"server {self.url} was lost during {when}: {why}")

    def _end_pull(self, adapter: Adapter, why: str) -> None:
        """Mark a pull that is still under way as failed, unless the server was lost."""
        if self.adapter is adapter and self.state.name is State.PULLING:
            self.state.go(Event.EMPTIED, why)

    async def _recover(self, adapter: Adapter, err: DeliveryError) -> None:
        """After a pull that failed: go on with the old weights if they are whole."""
        held = self.held
        if not err.touched and held is not None and self.adapter is adapter:
            await adapter.set_label(self._label(held))  # our plugin forgot it as the pull began
            await adapter.resume()
            if self.held is held and self.adapter is adapter:
                self.state.go(Event.KEPT)
            return
        self._end_pull(adapter, f"a pull broke off: {err}")
        if err.silent:
            await self._probe(adapter)
        if self.adapter is adapter:
            await self._stop_server(PauseMode.ABORT)

    async def _probe(self, adapter: Adapter) -> None:
        """After a silent pull: find out whether the server hangs, or never received the order."""
        if self.adapter is not adapter:
            return  # lost meanwhile
        try:
            await self._delivery.probe(adapter)
        except ServerGoneError as err:
            if self.adapter is adapter:
                self.lose(f"a pull broke off, and it does not answer since: {err}", hangs=True)
        except ServerError:
            return  # it refuses: it does not hang

    async def _stop(self, mode: PauseMode) -> None:
        if mode is PauseMode.WAIT:
            try:
                await self.requests.ended(self._settings.request_s)
            except TimeoutError:
                raise ServerError(
                    f"server {self.url}: {len(self.requests)} requests still run "
                    f"{self._settings.request_s:g} s after they were to end"
                ) from None
            mode = PauseMode.KEEP
        await self._stop_server(mode)
        if mode is PauseMode.ABORT:
            await self.requests.all_cut(lambda: self._stop_server(mode))

    async def _stop_server(self, mode: PauseMode) -> None:
        await self._met.pause(mode, keep_cache=self._settings.keep_cache)
