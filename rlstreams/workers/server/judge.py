"""The judge's server on a device that roles share: it sleeps while others have their shifts."""

from __future__ import annotations

from rlstreams.streams.leases import Lease
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.engines.thread import EngineThread
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.lease import AWAITS_SHIFT, OFFLOADED, Offloading
from rlstreams.workers.server.gate import Gate
from rlstreams.workers.server.process import HealthLooks, ServerProcess
from rlstreams.workers.server.worker import Patience, ServerWorker

LISTEN_S = 10.0


class JudgeInShifts(ServerWorker):
    """As `ServerWorker`; its own shifts, and a gate that holds requests back between them.

    consumes:     worker-events; control (DeviceLease)
    produces:     worker-events, with its requests and answers as counters, by which `up` knows how
                  many wait; control (DeviceLease)
    waits for:    a shift; between two requests, the next one
    unblocked by: up granting a shift to it
    """

    def __init__(
        self,
        context: Context,
        url: str,
        process: ServerProcess,
        looks: HealthLooks,
        patience: Patience,
        *,
        name: str,
    ) -> None:
        """
        Args:
            url: of the server behind the gate, which listens where `[judge]` says.

        Raises:
            ConfigError: another process listens there.
        """
        super().__init__(context, url, process, looks, patience, name=name)
        device, judge = context.config.shared_device("judge"), context.config.judge
        assert device is not None
        self._device, self._me = device, context.worker
        self._loop = EngineThread("judge-gate")
        self._gate = Gate(url, device.change_s)
        listening = self._gate.start(judge.host, judge.port)
        try:
            self._loop.wait(listening, LISTEN_S, f"the gate at {judge.url}")
        except OSError as err:
            raise ConfigError(f"judge.port is {judge.port}: {err}; set a free one") from err
        self._handover = Offloading(
            lambda: self._loop.submit(self._gate.shut()),
            lambda: self._loop.submit(self._gate.open()),
        )
        self._handover.is_here = False  # shut at first
        self._sleeps = False
        self._counted = (0, 0)

    def follow(self, lease: Lease) -> None:
        """Know who has the device."""
        of = f"device {self._device.name!r}"
        others = f", which {lease.holder} has ({lease.state})" if not lease.is_free else ""
        if lease.holder == self._me:
            others = f" of {self._me}, which begins or ends" if not lease.is_free else ""
        self._gate.shut_because = f"waits for its shift on {of}{others}"

    def take_device(self) -> bool:
        """Start the server, or wake it; True once requests pass."""
        if self._ready_s is None:
            return False
        if self._sleeps:
            if self._process.why_not_yet():
                return False
            self._process.answered()
            self._sleeps = False
        return self._handover.to(here=True)

    def give_up_device(self) -> bool:
        """Put it to sleep, once what it was asked is answered or cut."""
        if self._ready_s is None or not self._handover.to(here=False):
            return False
        if not self._sleeps:
            self._sleeps = True
            self._process.sleeps()
        return True

    def tick(self) -> None:
        """As of every server; counts requests and answers too."""
        asked, answered = self._gate.num_asked, self._gate.num_answered
        self._reporter.count(requests=asked - self._counted[0], answers=answered - self._counted[1])
        self._counted = asked, answered
        super().tick()

    def close(self) -> None:
        """As of every server."""
        self._loop.wait(self._gate.close(), LISTEN_S, "closing the judge's gate")
        self._loop.close()
        super().close()

    def _serves(self, since_s: float) -> bool:
        """As it is ready: it pulls nothing."""
        return self._ready_s is not None

    def _standing(self) -> tuple[str, str]:
        if self._sleeps:
            return OFFLOADED, AWAITS_SHIFT
        asked, answered = self._counted
        return super()._standing() if asked > answered else ("waiting", "for answers to judge")
