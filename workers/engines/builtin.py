"""The built-in engine: a Hugging Face model in this process, decoded by a thread of its own.

`Scheduler` and `Decoder` belong to that thread. This file is the bridge: calls of the event loop
become commands that the thread runs between two steps, and what requests are to hear goes back
through the loop. Weights are received beside the old ones and copied in place between two steps,
so a pull that breaks off leaves the version that was held.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.engines.base import (
    GeneratedSegment,
    Health,
    PauseMode,
    SampleRequest,
    check_request,
)
from rlstreams.workers.engines.decode import Decoder, Generation
from rlstreams.workers.engines.scheduler import End, Held, Item, Scheduler
from rlstreams.workers.engines.selfcheck import check_decoding
from rlstreams.workers.model.base import CPU, EngineError
from rlstreams.workers.model.folder import (
    eos_ids_of,
    num_experts_of,
    read_config,
    token_limit,
    vocab_size_of,
)
from rlstreams.workers.model.model import FLOAT32, configure_torch, load_model
from rlstreams.workers.weights.channel import Pulled, WeightChannel
from rlstreams.workers.weights.layout import size_bytes

T = TypeVar("T")
_Listener = tuple[asyncio.AbstractEventLoop, "asyncio.Queue[Item]"]


class BuiltinEngine:
    """Samples with a KV cache over `slots` sequences, refilled as sequences end."""

    def __init__(
        self,
        folder: Path | str,
        *,
        slots: int,
        threads: int = 1,
        capture_experts: bool = True,
        pull_deadline_s: float = 300.0,
        answer_deadline_s: float = 60.0,
        device: str = CPU,
        dtype: str = FLOAT32,
    ) -> None:
        """Load the model; its weights are used only after a first `pull`.

        Args:
            folder: config, safetensors; version 0 comes from there too, but by `pull`.
            slots: sequences decoded together.
            threads: of torch, for the whole process.
            pull_deadline_s: longest time for one pull.
            answer_deadline_s: longest time for the decode thread to take a command.
            device: `cpu` or `cuda`.
            dtype: of the weights that are pulled, `model.dtype`.

        Raises:
            EngineError: the folder cannot be loaded, or its family not be decoded here.
        """
        configure_torch(threads, device)
        folder = Path(folder)
        config = read_config(folder)
        self._vocab_size = vocab_size_of(config)
        self._max_tokens = token_limit(config)
        self._slots = slots
        self._pull_deadline_s = pull_deadline_s
        self._answer_deadline_s = answer_deadline_s
        model = load_model(folder, dtype)
        check_decoding(model, self._vocab_size)
        model = model.to(torch.device(device))
        decoder = Decoder(
            model, slots=slots, num_experts=num_experts_of(config), capture_experts=capture_experts
        )
        self._scheduler = Scheduler(
            model, decoder, slots=slots, eos_ids=eos_ids_of(folder), deliver=self._deliver
        )
        self._listeners: dict[Generation, _Listener] = {}
        self._outbox: list[tuple[Generation, Item]] = []
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """`builtin/{version of transformers}`."""
        return f"builtin/transformers-{version('transformers')}"

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._vocab_size

    @property
    def max_tokens(self) -> int:
        """Longest sequence, prompt included."""
        return self._max_tokens

    @property
    def capacity(self) -> int:
        """As many as there are slots."""
        return self._slots

    @property
    def policy_version(self) -> int:
        """The version that it holds, or NO_VERSION."""
        return self._scheduler.held.policy_version

    @property
    def num_sampled(self) -> int:
        """Tokens sampled since it was made."""
        return self._scheduler.num_sampled

    @property
    def trouble(self) -> str:
        """None: it is here, or the worker ends."""
        return ""

    def wants(self, published: PolicyPublished) -> bool:
        """Whether `published` is newer than what it holds, or of another content."""
        held = self._scheduler.held
        is_other = held != Held(published.policy_version, published.weight_hash)
        return is_other and published.policy_version >= held.policy_version

    async def start(self) -> None:
        """Nothing to do."""

    async def generate(self, request: SampleRequest) -> AsyncIterator[GeneratedSegment]:
        """The sample's segments, as they end; see `Engine.generate`."""
        check_request(request, self._vocab_size, self._max_tokens)
        generation = Generation.of(request, self._max_tokens)
        queue: asyncio.Queue[Item] = asyncio.Queue()
        self._listeners[generation] = (asyncio.get_running_loop(), queue)
        try:
            self._post(lambda: self._scheduler.add(generation))
            while (item := await queue.get()) is not End.END:
                if isinstance(item, Exception):
                    raise EngineError(
                        f"{self.name} failed at {request.sample_id}: {item!r}"
                    ) from item
                yield item
        finally:
            del self._listeners[generation]
            with contextlib.suppress(EngineError):  # stopped: there is nothing to forget
                self._post(lambda: self._scheduler.forget(generation))

    async def pull(self, published: PolicyPublished, channel: WeightChannel) -> Pulled:
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
        return Pulled(
            policy_version=held.policy_version,
            weight_hash=held.weight_hash,
            num_bytes=size_bytes(weights),
            seconds=time.monotonic() - started_s,
            paused_s=paused_s,
        )

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; with WAIT it returns when all running requests have finished."""
        paused: Future[None] = Future()
        await self._ask(lambda: self._scheduler.pause(mode, paused), "pausing")
        await asyncio.wrap_future(paused)

    async def resume(self) -> None:
        """Go on sampling."""
        await self._ask(self._scheduler.resume, "resuming")

    async def health(self) -> Health:
        """Answers at once, whatever the decode thread does."""
        running, waiting = self._scheduler.num_running, len(self._scheduler.waiting)
        if self._error is not None:
            detail = f"the decode thread failed: {self._error!r}"
        elif self._closing:
            detail = "closed"
        else:
            detail = f"version {self.policy_version}" if self.policy_version >= 0 else "no version"
        ready = not self._stopped and self.policy_version >= 0
        return Health(ready=ready, detail=detail, running=running, waiting=waiting)

    async def close(self) -> None:
        """End all requests with ABORT and the thread with them; idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, self._answer_deadline_s)
        if self._thread.is_alive():
            raise EngineError(f"decode thread still runs {self._answer_deadline_s:g} s after close")

    @property
    def _stopped(self) -> bool:
        return self._closing or self._error is not None

    def _post(self, command: Callable[[], None]) -> None:
        """Have the decode thread run `command` between two steps."""
        with self._wake:
            if self._error is not None:
                raise EngineError(f"{self.name} failed: {self._error!r}") from self._error
            if self._closing:
                raise EngineError(f"{self.name} is closed")
            self._commands.append(command)
            self._wake.notify()

    async def _ask(self, command: Callable[[], T], what: str) -> T:
        """Run `command` in the decode thread and wait for what it returns."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(command())
            except Exception as err:  # noqa: BLE001  (it belongs to who asked)
                answer.set_exception(err)

        self._post(run)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(answer), self._answer_deadline_s)
        except TimeoutError:
            raise EngineError(
                f"{what}: the decode thread did not answer within {self._answer_deadline_s:g} s"
            ) from None

    def _run(self) -> None:
        try:
            while not self._closing:
                self._take_commands()
                if self._scheduler.can_turn:
                    self._scheduler.turn()
                self._flush()
        except Exception as err:  # noqa: BLE001  (told to every request: nobody may hang)
            with self._wake:
                self._error = err
        # Nothing is posted any more; requests that were posted just before end here too.
        self._take_commands()
        if self._error is not None:
            self._scheduler.fail(self._error)
        else:
            self._scheduler.close()
        self._flush()

    def _take_commands(self) -> None:
        with self._wake:
            while not (self._commands or self._stopped or self._scheduler.can_turn):
                self._wake.wait()
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()

    def _deliver(self, generation: Generation, item: Item) -> None:
        self._outbox.append((generation, item))

    def _flush(self) -> None:
        """Hand what came of one turn to the event loops, each woken once."""
        outbox, self._outbox = self._outbox, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue[Item], Item]]] = {}
        for generation, item in outbox:
            listener = self._listeners.get(generation)
            if listener is not None:
                by_loop.setdefault(listener[0], []).append((listener[1], item))
        for loop, items in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_put_all, items)


def _put_all(items: list[tuple[asyncio.Queue[Item], Item]]) -> None:
    for queue, item in items:
        queue.put_nowait(item)
