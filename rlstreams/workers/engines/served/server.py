"""One server: its gate, its requests, its weights.

The gate is open while the server is up, holds a version that it was given and checked, and takes no
other. It is shut from before the first byte of a pull until the version is confirmed; a server that
was lost, restarted or damaged stays shut until it has pulled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.engines.base import (
    FinishReason,
    GeneratedSegment,
    Held,
    PauseMode,
    SampleRequest,
)
from rlstreams.workers.engines.served.adapter import Adapter
from rlstreams.workers.engines.served.answer import UnknownVersionError
from rlstreams.workers.engines.served.delivery import (
    PLUGIN,
    DeliveryError,
    FolderDelivery,
    Order,
)
from rlstreams.workers.engines.served.facts import Kind, ServerFacts, ask_usable
from rlstreams.workers.engines.served.http import REFUSED, ServerError, ServerGoneError, ServerHttp
from rlstreams.workers.engines.served.running import Requests, Running, generate_request
from rlstreams.workers.engines.served.settings import ServedSettings
from rlstreams.workers.engines.served.sglang import SglangAdapter
from rlstreams.workers.engines.served.shape import ModelShape
from rlstreams.workers.engines.served.vllm import VllmAdapter
from rlstreams.workers.engines.served.wire import Answer, AnswerError
from rlstreams.workers.weights.channel import (
    BY_HASH,
    BY_TRANSFER,
    Pulled,
    WeightChannel,
    WeightError,
)
from rlstreams.workers.weights.file import CHANNEL as FILE

ADAPTERS: Mapping[Kind, type[Adapter]] = {Kind.VLLM: VllmAdapter, Kind.SGLANG: SglangAdapter}


class Server:
    """One server; belongs to the engine's event loop."""

    def __init__(
        self,
        url: str,
        settings: ServedSettings,
        shape: ModelShape,
        delivery: FolderDelivery,
    ) -> None:
        """Nothing is asked before `meet`."""
        self.url = url
        self.http = ServerHttp(url)
        self.adapter: Adapter | None = None  # None: not up
        self.held: Held | None = None
        self.why_shut = "not asked yet"
        self.is_pulling = False
        self.is_gone = False  # nobody listens at its address, as of the last look
        self.hang = ""  # why it is to be given up though it answers looks; empty: it is not
        self.trouble = ""  # what put it out of service and was not mended since, for people
        self._settings = settings
        self._shape = shape
        self._delivery = delivery
        self._labels: dict[str, Held] = {}
        self._requests = Requests(self._tell_to_end, settings)
        self.is_resting = False  # it is to give its memory up, or has done so
        self.is_asleep = False  # it has given its memory up
        self._memory = asyncio.Lock()  # held while it gives its memory up, or takes it again
        self._is_doubted = False  # it broke off, and was not looked at since

    @property
    def delivery_name(self) -> str:
        """How weights reach it, for people."""
        return self._delivery.name

    @property
    def facts(self) -> ServerFacts | None:
        """What it said that it is; None: not up."""
        return self.adapter.facts if self.adapter else None

    @property
    def is_up(self) -> bool:
        """Whether it answered when it was asked last."""
        return self.adapter is not None

    @property
    def may_pull(self) -> bool:
        """Whether a pull may begin."""
        return self.is_up and not (self.is_pulling or self.hang or self.is_resting)

    @property
    def is_open(self) -> bool:
        """Whether a request may leave for it now."""
        is_shut = self.is_pulling or self._is_doubted or self.is_resting
        return self.is_up and self.held is not None and not is_shut

    @property
    def in_flight(self) -> int:
        """Requests that left and were not answered."""
        return len(self._requests)

    @property
    def num_sampled(self) -> int:
        """Tokens received; of requests that broke off none."""
        return self._requests.num_sampled

    async def meet(self, *, is_inherited: bool = False) -> None:
        """Ask a server that answers what it is; from now on it may pull.

        Args:
            is_inherited: a worker that died used it: what that one asked is ended, which an engine
                that hangs in a pull does not do.

        Raises:
            ServerError: it is of another kind or version, or fails.
        """
        settings = self._settings
        facts = await ask_usable(
            self.http, settings.kind, settings.answer_s, allow_untested=settings.allow_untested
        )
        adapter = ADAPTERS[facts.kind](self.http, facts, settings.answer_s)
        if is_inherited:
            await adapter.pause(PauseMode.ABORT, keep_cache=False)
        await self._delivery.prepare(adapter)
        self.held, self._labels = None, {}
        self.adapter, self.why_shut = adapter, "holds no version that we gave it"
        self._is_doubted, self.hang, self.trouble = False, "", ""
        self.is_asleep = False

    async def is_alive(self, deadline_s: float) -> bool:
        """Whether it answers `/health` as one that works: see `Adapter.alive`."""
        was_doubted = self._is_doubted
        status = await self.http.status_of("/health", deadline_s)
        self.is_gone = status == REFUSED
        is_alive = status in ADAPTERS[self._settings.kind].alive
        if was_doubted and is_alive:  # a doubt that came up meanwhile is for the next look
            self._is_doubted = False
        return is_alive

    def doubt(self) -> None:
        """It broke off: no request leaves for it before it answered `is_alive`, or was met anew."""
        self._is_doubted = True

    def lose(self, why: str) -> None:
        """It died or does not answer: shut it, and end what it was asked."""
        self.adapter, self.hang = None, ""
        self.is_asleep = False  # one whose wake failed is not taken for one that sleeps
        self._void(why)
        self._labels = {}
        self._requests.hang_up(why)

    async def ask(self, request: SampleRequest) -> list[GeneratedSegment]:
        """The request's segments. It counts as in flight before this first waits.

        Raises:
            ServerGoneError: the server broke off; the request may be asked again.
            ServerError: it refused, or a field of its answer cannot be.
        """
        assert self.held is not None, "the gate is shut"
        facts = self._met.facts
        to_send = generate_request(
            request, self._settings, self._shape, facts.max_tokens, self.held.label
        )
        running = Running(request.sample_id, to_send, self.held, self._labels, facts)
        self._requests.begin(running)
        try:
            running.task = asyncio.ensure_future(self._answer(running))
            answer = await self._heard(running)
            running.num_tokens = len(answer.token_ids)
            return running.segments(answer, self._shape)
        except (asyncio.CancelledError, ServerGoneError):
            if self.is_up:
                self._requests.leave(running)
            raise
        except AnswerError as err:
            if isinstance(err, UnknownVersionError) and running.labels is self._labels:
                self._void(f"answered with weights that are not ours: {err}")
            raise ServerError(
                f"server {self.url}: request {request.sample_id} ({to_send.request_id}): {err}"
            ) from err
        finally:
            self._requests.end(running)

    async def sleep(self) -> None:
        """Cut what it samples, give its memory up, and hold no version: only a pull opens its gate.

        Raises:
            ServerError: it did not; its memory may still be taken.
        """
        async with self._memory:
            await self._stop(PauseMode.ABORT)
            self.held, self.why_shut = None, "sleeps"
            await self._met.sleep(self._settings.change_s)
            self.is_asleep = True

    async def wake(self) -> None:
        """Have the memory again, if it is up; raises ServerError, if it does not.

        A `sleep` under way is waited for: else the server would stay asleep, and nobody know it.
        """
        async with self._memory:
            if self.is_asleep and self.adapter is not None:
                await self.adapter.wake(self._settings.change_s)
                self.why_shut = "holds no version since it slept"
            self.is_resting = self.is_asleep = False

    async def pull(self, published: PolicyPublished, channel: WeightChannel) -> Pulled:
        """Hold `published`. The gate is shut meanwhile.

        Raises:
            WeightError: the version did not arrive; `held` says what is left.
        """
        started_s = time.monotonic()
        self.is_pulling = True
        try:
            return await self._pull(published, channel, started_s)
        except ServerError as err:
            self._void(f"failed in the middle of a pull: {err}")
            if isinstance(err, ServerGoneError):
                await self._probe()
            raise WeightError(str(err)) from err
        finally:
            self.is_pulling = False

    async def close(self) -> None:
        """End what it was asked, let it go on for others, and hang up."""
        await self._requests.close()
        await self.http.close()

    @property
    def _met(self) -> Adapter:
        """Its adapter; a ServerGoneError, if it was lost."""
        if self.adapter is None:
            raise ServerGoneError(f"server {self.url} was lost: {self.why_shut}")
        return self.adapter

    async def _tell_to_end(self, running: Running) -> bool:
        """Have it ended there; False: there is no way to but hanging up."""
        return self.adapter is None or await self.adapter.abort(running.request.request_id)

    async def _answer(self, running: Running) -> Answer:
        """The whole answer."""
        adapter, deadline_s = self._met, self._settings.request_s
        what = f"request {running.sample_id} ({running.request.request_id})"
        body = adapter.body(running.request)
        found = await self.http.post(adapter.generate_route, body, deadline_s, what=what)
        return adapter.answer(found)

    async def _heard(self, running: Running) -> Answer:
        """What the request's task hears; nothing, if we hung up ourselves."""
        assert running.task is not None
        try:
            return await running.task
        except asyncio.CancelledError as err:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise  # who asked has left
            if not self.is_up:
                raise ServerGoneError(
                    f"server {self.url}: request {running.sample_id}: {self.why_shut}"
                ) from err
            return Answer(token_ids=(), logprobs=(), finish_reason=FinishReason.ABORT)

    async def _pull(
        self, published: PolicyPublished, channel: WeightChannel, started_s: float
    ) -> Pulled:
        mode, is_mute = self._settings.on_pull, not self._met.facts.tells_versions
        await self._stop(PauseMode.ABORT if is_mute and mode is PauseMode.KEEP else mode)
        stopped_s = time.monotonic()
        order = Order(
            adapter=self._met,
            published=published,
            channel=channel,
            until_s=stopped_s + self._settings.pull_s,  # requests that finish first take none of it
        )
        if is_mute and len(self._requests):
            raise ServerError(f"server {self.url}: requests run on that were to end for a pull")
        try:
            num_bytes = await self._delivery.delivered(order)
        except DeliveryError as err:
            await self._recover(err)
            raise
        self._check_same(order)
        self._labels[order.held.label] = order.held
        await order.adapter.set_label(order.held.label)
        self._check_same(order)
        # What is sampled from now on comes from it.
        self.held, self.trouble = order.held, ""
        await order.adapter.resume()
        ended_s = time.monotonic()
        is_link = self._delivery.name == PLUGIN and channel.name != FILE
        return Pulled(
            policy_version=published.policy_version,
            weight_hash=published.weight_hash,
            num_bytes=num_bytes,
            seconds=ended_s - started_s,
            paused_s=ended_s - stopped_s,
            verified=BY_TRANSFER if is_link else BY_HASH,
        )

    def _check_same(self, order: Order) -> None:
        """What a server took that was lost meanwhile is lost too, also if it is up again."""
        if self.adapter is not order.adapter:
            raise ServerGoneError(f"server {self.url} was lost during its pull: {self.why_shut}")

    async def _recover(self, err: DeliveryError) -> None:
        """After a pull that failed: go on with the old weights if they are whole."""
        if not err.touched and self.held is not None and self.adapter is not None:
            await self.adapter.set_label(self.held.label)  # our plugin forgot it as the pull began
            await self._met.resume()
            return
        self._void(f"a pull broke off: {err}")
        if err.silent:
            await self._probe()
        if not self.hang:
            await self._stop_server(PauseMode.ABORT)

    async def _probe(self) -> None:
        """A pull was met with silence: whether the server hangs, or did not hear of that one."""
        if self.adapter is None:
            return  # lost meanwhile
        try:
            await self._delivery.probe(self.adapter)
        except ServerGoneError as err:
            self.hang = f"a pull broke off, and it does not answer since: {err}"
        except ServerError:
            return  # it refuses: no hang

    def _void(self, why: str) -> None:
        self.held, self.why_shut, self.trouble = None, why, why

    async def _stop(self, mode: PauseMode) -> None:
        if mode is PauseMode.WAIT:
            try:
                await self._requests.ended(self._settings.request_s)
            except TimeoutError:
                raise ServerError(
                    f"server {self.url}: {len(self._requests)} requests still run "
                    f"{self._settings.request_s:g} s after they were to end"
                ) from None
            mode = PauseMode.KEEP
        await self._stop_server(mode)
        if mode is PauseMode.ABORT:
            await self._requests.all_cut(lambda: self._stop_server(mode))

    async def _stop_server(self, mode: PauseMode) -> None:
        await self._met.pause(mode, keep_cache=self._settings.keep_cache)
