"""The loop of `up`: watch, reap and restart, kill when asked, and drain in good order.

running --last step--> saving --trainer done--> finishing --last version evaluated--> draining
   \\--Ctrl-C, or a worker that cannot go on-----------------------------------------> draining
"""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlstreams.streams.log.errors import BrokerError, DeadlineError
from rlstreams.streams.log.roles import ROLES
from rlstreams.streams.run.run_lock import FolderGoneError
from rlstreams.up.supervisor.broker import BrokerKeeper
from rlstreams.up.supervisor.device_scheduler import DeviceScheduler
from rlstreams.up.supervisor.fault_hook import FaultHook, RunOutcome
from rlstreams.up.supervisor.fleet import GRACE_S, Fleet, FleetPlace
from rlstreams.up.supervisor.scale import Scale
from rlstreams.up.supervisor.watcher import Watcher
from rlstreams.words.screen import ProcessInfo
from rlstreams.workers.config.operation import Kill
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.control import DRAINING

SAY_S = 5.0  # a wait for a checkpoint that takes longer is announced


class Drain:
    """Lets the roles finish, one after another. `tick` often; it never waits.

    Args:
        drain_s: how long a role may take, but for `GRACE_S` and for a checkpoint.
        save_s: how long a checkpoint may take, whenever it began: nobody is killed within it.
    """

    def __init__(
        self, fleet: Fleet, drain_s: float, say: Callable[[str], None], *, save_s: float
    ) -> None:
        self._fleet = fleet
        self._limit_s = drain_s + GRACE_S
        self._save_s = save_s
        self._say = say
        self._left = list(ROLES)
        self._deadline_s: float | None = None
        self._saving_since_s: float | None = None  # as far as this drain has seen it
        self._is_save_announced = False
        fleet.is_draining = True

    @property
    def is_over(self) -> bool:
        """Whether no process is left."""
        return not self._left

    def tick(self) -> None:
        """Ask the next role to drain once the one before is gone; kill it at its deadline."""
        now_s = time.monotonic()
        while self._left:
            role = self._left[0]
            if not self._fleet.is_gone(role) and self._deadline_s is None:
                self._deadline_s = now_s + self._limit_s
                self._fleet.stop(role, signal.SIGTERM)
            if not self._fleet.is_gone(role):
                self._await_checkpoint(role, now_s)
                self._kill_late(role, now_s)
                return
            self._left.pop(0)
            self._deadline_s = self._saving_since_s = None

    def _await_checkpoint(self, role: str, now_s: float) -> None:
        """Follow whether a checkpoint is written; after its end the role has `GRACE_S` to exit."""
        saving = self._fleet.saving(role)
        if not saving:
            if self._saving_since_s is not None and self._deadline_s is not None:
                self._deadline_s = max(self._deadline_s, now_s + GRACE_S)
            self._saving_since_s = None
            return
        if self._saving_since_s is None:
            self._saving_since_s = now_s
        if not self._is_save_announced and now_s - self._saving_since_s >= SAY_S:
            self._is_save_announced = True
            self._say(
                f"{', '.join(saving)} writes a checkpoint: the drain waits for it, at most "
                f"{self._save_s:g} s; a second Ctrl-C kills"
            )

    def _kill_late(self, role: str, now_s: float) -> None:
        if self._deadline_s is None or now_s < self._deadline_s:
            return
        problem = f"did not drain within {self._limit_s:g} s"
        if self._saving_since_s is not None:
            if now_s < self._saving_since_s + self._save_s + GRACE_S:
                return
            problem = f"has not finished its checkpoint within {self._save_s:g} s"
        late = [worker.name for worker in self._fleet.of(role) if worker.is_alive]
        self._say(f"{', '.join(late)} {problem}: killed")
        self._deadline_s = now_s + self._limit_s
        self._fleet.stop(role, signal.SIGKILL)


@contextmanager
def interrupts() -> Iterator[Sequence[int]]:
    """Every SIGINT and SIGTERM of the block, which must be in the main thread.

    The first one drains, the second one kills; afterwards signals mean what they meant before.
    """
    asked: list[int] = []
    before = {
        number: signal.signal(number, lambda it, _frame: asked.append(it))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Supervisor:
    """One run of the fleet, from its start to the end of its last process."""

    def __init__(
        self,
        config: RunConfig,
        fleet: Fleet,
        watcher: Watcher,
        devices: DeviceScheduler | None = None,
        *,
        broker: BrokerKeeper | None,
        asked: Sequence[int],
        hook: FaultHook | None = None,
        is_there: Callable[[], bool] = lambda: True,  # the run's folder
        on_drain: Callable[[], None] = lambda: None,
        scale: Scale | None = None,  # None: the fleet stays as it is
    ) -> None:
        self._config = config
        self._devices = devices
        self._fleet = fleet
        self._watcher = watcher
        self._broker = broker
        self._asked = asked  # signals that came
        self._hook = hook
        self._is_there = is_there
        self._on_drain = on_drain
        self._scale = scale
        self._kills = kills_ahead(config.demo.kills, watcher.step, config.trainer.steps)
        self._drain: Drain | None = None
        self._finish_until_s: float | None = None  # while the last evaluation goes on
        self._num_evaluated = 0
        self._cured = -1  # the step at which the broker was restarted
        self._say_saving_s = math.inf  # when to say that the run waits for its trainer
        self.outcome = RunOutcome.DRAINED

    def run(self) -> RunOutcome:
        """Start everything and stay until no process is left.

        Raises FolderGoneError: the run's folder was deleted or moved away.
        """
        self._fleet.start()
        self._watcher.phase = "running"
        while self._drain is None or not self._drain.is_over:
            if not self._is_there():  # looked at before a part of the run could make it again
                raise FolderGoneError(Path(self._config.folder))
            self._poll()
            self._fleet.tick()
            self._advance()
            if self._devices is not None and not self._watcher.is_broker_away:
                self._devices.tick(is_draining=self._drain is not None)
            if self._hook is not None:
                self._hook.tick(is_running=self._is_running)
            self._watcher.draw([_info(worker) for worker in self._fleet.workers])
        return self.outcome

    def _poll(self) -> None:
        """Read new records, and look after the broker.

        Raises StreamsError: the broker is gone for good; while it is only away, nothing is new.
        """
        keeper = self._broker
        if keeper is None:
            self._watcher.poll()
            return
        keeper.tick()
        self._watcher.is_broker_away = keeper.is_away
        if keeper.is_away:  # a worker that commits or starts meanwhile may end
            self._fleet.excuse_all("ended while the broker was away")
        before = self._watcher.progress.num_events
        try:
            self._watcher.poll()
        except (BrokerError, DeadlineError):
            if not (keeper.is_away or keeper.lacks_room):
                raise
        if self._watcher.progress.num_events > before:
            keeper.made_headway()

    @property
    def _is_running(self) -> bool:
        return self._drain is None and not self._fleet.is_done("trainer")

    def _advance(self) -> None:
        if self._drain is not None:
            if len(self._asked) > 1:
                self._fleet.close()
            self._drain.tick()
        elif self._fleet.failure is not None:
            self.outcome = RunOutcome.FAILED
            self._begin_drain(self._fleet.failure.reason)
        elif self._watcher.problem:
            if not self._cure():
                self._fleet.give_up(self._watcher.problem)
        elif self._asked:
            self._begin_drain("draining; a second Ctrl-C kills, --resume continues")
        elif self._watcher.control == DRAINING:
            self._begin_drain("draining, as `control` says; --resume continues")
        elif self._fleet.is_done("trainer"):
            self._finish()
        else:
            self._await_trainer()
            if self._scale is not None:
                self._scale.tick(self._watcher.wanted)
            self._kill_for_show()

    def _cure(self) -> bool:
        """Restart the broker, once a step, where a stage gets none of the records that wait for it:
        after a kill a group may have lost its coordinator, or keep dead members (decision 0013)."""
        stall, step = self._watcher.stall, self._watcher.step
        if self._broker is None or not stall.problem or not stall.is_unfed or step == self._cured:
            return False
        self._cured = step
        self._broker.restart(stall.problem)
        stall.begin_anew()
        return True

    def _await_trainer(self) -> None:
        """After the last step enter the phase `saving`: the other roles may end now."""
        if not self._watcher.progress.at_target:
            return
        # The target of a claim before ours says nothing: a resumed run may go beyond it.
        processes = [worker.child for worker in self._fleet.of("trainer") if worker.child]
        is_ours = any(self._watcher.progress.owns_run(child.spec.instance) for child in processes)
        now_s = time.monotonic()
        if self._watcher.phase == "running" and is_ours:
            self._watcher.phase = "saving"
            self._say_saving_s = now_s + SAY_S
        elif now_s >= self._say_saving_s:
            self._say_saving_s = math.inf
            reports = self._watcher.stall.last_reports("trainer")
            self._watcher.say(f"all steps are done, the run waits for its trainer: {reports}")

    def _finish(self) -> None:
        """The trainer is done: wait for the last evaluation, as long as it goes on."""
        step, step_target = self._watcher.step, self._watcher.ledger.step_target
        if step < step_target:
            self._begin_drain(f"the trainer drained at step {step} of {step_target}")
            return
        if not self._config.data.has_held_out or self._watcher.is_evaluated():
            self.outcome = RunOutcome.COMPLETE
            self._begin_drain("the run is complete")
            return
        now_s = time.monotonic()
        progress = self._watcher.num_evaluated()
        if self._finish_until_s is None or progress > self._num_evaluated:
            self._num_evaluated = progress
            # 0: for ever.
            self._finish_until_s = now_s + (self._config.deadlines.stall_s or math.inf)
            self._watcher.phase = "finishing"
            self._watcher.say("all steps are done; the last version is being evaluated")
        elif now_s > self._finish_until_s and not self._watcher.stall.is_starting("rollout"):
            self.outcome = RunOutcome.FAILED
            waited_s = self._config.deadlines.stall_s
            version = self._watcher.ledger.policy_version
            self._begin_drain(
                f"the evaluation of version {version} has made no progress for "
                f"{waited_s:g} s: " + self._watcher.stall.last_reports("rollout")
            )

    def _begin_drain(self, why: str) -> None:
        self._watcher.phase = "draining"
        self._watcher.say(why)
        self._on_drain()
        deadlines = self._config.deadlines
        self._drain = Drain(
            self._fleet, deadlines.drain_s, self._watcher.say, save_s=deadlines.checkpoint_s
        )

    def _kill_for_show(self) -> None:
        step, step_target = self._watcher.step, self._watcher.ledger.step_target
        if self._kills and step_target and step >= self._kills[0].at * step_target:
            (worker, *_) = self._fleet.of(self._kills[0].role)
            if self._kill(worker, step):
                self._kills.popleft()

    def _kill(self, worker: FleetPlace, step: int) -> bool:
        pid = worker.child.pid if worker.child is not None else 0
        if not self._fleet.kill(worker):
            return False
        self._watcher.killed(worker.name)
        self._watcher.say(f"KILLED {worker.name} (process {pid}) with SIGKILL after step {step}")
        return True


def _info(worker: FleetPlace) -> ProcessInfo:
    child = worker.child
    is_due = worker.restart_at_s is not None
    return ProcessInfo(
        worker=worker.name,
        role=worker.role,
        pid=child.pid if child is not None else None,
        is_alive=worker.is_alive,
        restarts=max(0, worker.num_starts - 1),
        instance=child.spec.instance if child is not None else "",
        started_s=child.started_s if child is not None else time.monotonic() if is_due else None,
    )


def kills_ahead(kills: Sequence[Kill], step: int, step_target: int) -> deque[Kill]:
    """The kills of `[demo]`, oldest first; those before the step of a resumed run are past."""
    left = [kill for kill in kills if not step or kill.at * step_target > step]
    return deque(sorted(left, key=lambda kill: kill.at))
