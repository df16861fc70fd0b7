"""Engine in this process: requests, versions and the gate around a decoder in a thread of its own.

`Scheduler` and `Decoder` belong to that thread, which runs one call after another: a step of the
decoder, or a command of the event loop between two steps. Weights are received beside the old ones
and put in place between two steps, so a pull that breaks off leaves the version that was held.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from rlstreams.schemas.events import PolicyPublished, ServerLoad
from rlstreams.workers.engines.base import (
    FinishReason,
    GeneratedSegment,
    Held,
    SampleRequest,
    check_request,
    pulled_of,
)
from rlstreams.workers.engines.decode import CacheDecoder, Generation
from rlstreams.workers.engines.scheduler import Item, Scheduler
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.weights.channel import Pulled, WeightSource
from rlstreams.workers.weights.layout import size_bytes

T = TypeVar("T")
_Listener = tuple[asyncio.AbstractEventLoop, "asyncio.Queue[Item]"]


class LocalEngine:
    """Samples with a decoder; see `Engine`.

    Args:
        slots: sequences decoded together.
        max_tokens: longest sequence, prompt included.
        pull_deadline_s: longest time for one pull.
        answer_deadline_s: longest time for the decode thread to take a command.
    """

    def __init__(
        self,
        name: str,
        decoder: CacheDecoder,
        *,
        slots: int,
        vocab_size: int,
        max_tokens: int,
        eos_ids: frozenset[int],
        pull_deadline_s: float,
        answer_deadline_s: float,
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.max_tokens = max_tokens
        self.capacity = self.max_capacity = slots
        self._pull_deadline_s = pull_deadline_s
        self._answer_deadline_s = answer_deadline_s
        self._decoder = decoder
        self._scheduler = Scheduler(decoder, slots=slots, eos_ids=eos_ids, deliver=self._deliver)
        self._listeners: dict[Generation, _Listener] = {}
        self._thread = ThreadPoolExecutor(1, "decode")
        self._has_step = False  # a step is waiting for the thread
        self._closed: Future[None] | None = None
        self._error: Exception | None = None

    @property
    def policy_version(self) -> int:
        """The version that the engine holds, or NO_VERSION."""
        return self._scheduler.held.policy_version

    @property
    def is_ready(self) -> bool:
        """Whether it holds a version, and has neither failed nor been closed."""
        return self.policy_version >= 0 and not (self._error or self._closed)

    @property
    def num_sampled(self) -> int:
        """Tokens sampled since the engine was made."""
        return self._decoder.num_sampled

    @property
    def trouble(self) -> str:
        """Always "": if the engine fails, its worker ends."""
        return ""

    @property
    def servers(self) -> Mapping[str, str]:
        """No servers: the engine is in this process."""
        return {}

    @property
    def server_loads(self) -> Sequence[ServerLoad]:
        """No loads: the engine is in this process."""
        return ()

    def wants(self, published: PolicyPublished) -> bool:
        """Whether `published` is newer than the held version, or differs under its number."""
        held = self._scheduler.held
        is_other = held != Held(published.policy_version, published.weight_hash)
        return is_other and published.policy_version >= held.policy_version

    async def start(self) -> None:
        """Do nothing: the thread starts with its first command."""

    async def generate(self, request: SampleRequest) -> AsyncIterator[GeneratedSegment]:
        """The sample's segments, as they end; see `Engine.generate`."""
        check_request(request, self.vocab_size, self.max_tokens)
        generation = Generation.of(request, self.max_tokens)
        queue: asyncio.Queue[Item] = asyncio.Queue()
        self._listeners[generation] = (asyncio.get_running_loop(), queue)
        try:
            self._post(lambda: self._scheduler.add(generation))
            while True:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise EngineError(
                        f"{self.name} failed at {request.sample_id}: {item!r}"
                    ) from item
                yield item
                if item.finish_reason is not FinishReason.POLICY_CHANGED:
                    return
        finally:
            del self._listeners[generation]
            with contextlib.suppress(EngineError):  # closed: nothing is left to forget
                self._post(lambda: self._scheduler.forget(generation))

    async def pull(self, published: PolicyPublished, channel: WeightSource) -> Pulled:
        """Receive beside the decode thread, then swap between two of its steps.

        Raises:
            WeightError: not received, or it does not fit; the version held is unchanged.
            EngineError: the decode thread failed.
        """
        started_s = time.monotonic()
        weights = await asyncio.to_thread(
            lambda: dict(channel.pull(published, self._pull_deadline_s))
        )
        held = Held(published.policy_version, published.weight_hash)

        def swap() -> float:
            swap_started_s = time.monotonic()
            self._scheduler.load(weights, held)
            return time.monotonic() - swap_started_s

        paused_s = await self._ask(swap, "swapping weights")
        return pulled_of(published, size_bytes(weights), started_s, paused_s)

    @property
    def is_up(self) -> bool:
        """Always true."""
        return True

    async def sleep(self) -> None:
        """Cut running requests and off-load; `wake` brings the held version back."""
        await self._ask(self._scheduler.stop, "stopping")
        await self._ask(self._decoder.off_load, "off-loading")

    async def wake(self) -> None:
        """Load back, and resume sampling."""
        await self._ask(self._decoder.load_back, "loading back")
        await self._ask(self._scheduler.resume, "resuming")

    async def close(self) -> None:
        """End all requests with ABORT and the thread with them; idempotent."""
        if self._closed is None:
            self._closed = self._thread.submit(self._scheduler.close)
            self._thread.shutdown(wait=False)
        try:
            closed = asyncio.shield(asyncio.wrap_future(self._closed))
            await asyncio.wait_for(closed, self._answer_deadline_s)
        except TimeoutError:
            raise EngineError(
                f"decode thread still runs {self._answer_deadline_s:g} s after close"
            ) from None

    def _check_open(self) -> None:
        if self._error is not None:
            raise EngineError(f"{self.name} failed: {self._error!r}") from self._error
        if self._closed is not None:
            raise EngineError(f"{self.name} is closed")

    def _post(self, command: Callable[[], None]) -> None:
        """Have the decode thread run `command` between two steps."""
        self._check_open()
        self._thread.submit(self._run, command)

    async def _ask(self, command: Callable[[], T], what: str) -> T:
        """Run `command` in the decode thread and wait for its result."""
        self._check_open()

        def run() -> T:
            try:
                return command()
            finally:
                self._go_on()

        answer = asyncio.wrap_future(self._thread.submit(run))
        try:
            return await asyncio.wait_for(answer, self._answer_deadline_s)
        except TimeoutError:
            raise EngineError(
                f"{what}: the decode thread did not answer within {self._answer_deadline_s:g} s"
            ) from None

    def _run(self, command: Callable[[], None]) -> None:
        """In the decode thread: run `command`; its failure ends every request."""
        try:
            command()
        except Exception as err:  # noqa: BLE001
            self._error = err
        if self._error is not None:
            self._scheduler.fail(self._error)
        self._go_on()

    def _go_on(self) -> None:
        """In the decode thread: queue a step behind the commands that came in meanwhile."""
        if self._error is None and self._scheduler.can_step and not self._has_step:
            with contextlib.suppress(RuntimeError):  # closed, or the interpreter ends
                self._thread.submit(self._run, self._step)
                self._has_step = True

    def _step(self) -> None:
        self._has_step = False
        if self._error is None and self._scheduler.can_step:
            self._scheduler.step()

    def _deliver(self, generation: Generation, item: Item) -> None:
        listener = self._listeners.get(generation)
        if listener is not None and not listener[0].is_closed():
            listener[0].call_soon_threadsafe(listener[1].put_nowait, item)
