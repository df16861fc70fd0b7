"""The fold of the run's topics that `up` decides by, and shows."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from rlstreams.schemas.events import ControlState, Event, StepsRedone
from rlstreams.show.health.poison import PoisonWatch
from rlstreams.show.health.stall_watch import StallWatch, ask_facts
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import SteadyClock, now_ms
from rlstreams.streams.log.errors import BrokerError, DeadlineError
from rlstreams.streams.log.record import Partition, Position
from rlstreams.streams.log.topics import CONTROL
from rlstreams.streams.run.place import BROKER_FOLDER
from rlstreams.streams.views.feed import WATCHED, Feed, Views, ViewState
from rlstreams.streams.views.folds import Folds
from rlstreams.up.live.figures import Figures
from rlstreams.up.live.screen import LiveView
from rlstreams.up.supervisor.progress import Progress
from rlstreams.words.screen import KillMark, LiveInput, ProcessInfo, passed_over_lines
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.control import RUNNING

POLL_S = 0.1
DRAW_S = 0.5
LOOK_S = 5.0  # between two looks at the disk
WARN_S = 600.0  # its warning is not repeated before
LOW_BYTES = 1_000_000_000
CLOCKS_MS = 30_000  # by which clocks may differ, reports on their way included
APART_S = 20.0  # they differ for so long before it is said: a report may have waited for its broker
CATCH_UP_S = 60.0  # longest wait for the next record of a history


class Watcher:
    """Folds the topics and draws them. Use it in a `with` block."""

    def __init__(
        self, bus: Bus, config: RunConfig, *, is_live: bool, figures: Figures | None = None
    ) -> None:
        self._config = config
        folds = Folds(group_size=config.prompts.group_size)
        self._views = Views(folds=folds)
        self.workers = folds.workers
        self.progress = Progress(folds)
        self._is_begun = False  # until `begin` what is read is history, whatever clocks say
        self._warned_clocks: set[str] = set()  # hosts
        self._apart_since_s: dict[str, float] = {}  # monotonic; since when a host's reports are off
        self._since_ms = 0  # when it began, by the clock of the fold
        self._poison = PoisonWatch(config, folds, is_live=False)
        self._steady = SteadyClock()
        self.stall = StallWatch(
            config, folds, lambda: ask_facts(bus, config), clock_ms=self._steady
        )
        self._next_look_s = 0.0
        self._feed = Feed(bus, self, (*WATCHED, CONTROL))
        self._processes: Sequence[ProcessInfo] = ()
        self._figures = figures
        self._joined: dict[str, bool] = {}  # instances that joined by themselves: has it left
        self._asked_ends: dict[Partition, int] = {}
        self._live = LiveView(None if is_live else Console(force_terminal=False))
        self._message = ""
        self._is_shown = True  # the message, at least once
        self._started_s = time.monotonic()
        self._next_draw_s = 0.0
        self.kills: list[KillMark] = []
        self.phase = "starting"
        self.control = RUNNING  # as requested since this start
        self.wanted: dict[str, int] = {}  # workers by role, likewise
        self.is_broker_away = False  # its keeper has a limit of its own

    def __enter__(self) -> Watcher:
        self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.__exit__(*exc)
        self._feed.close()

    def apply(self, event: Event, position: Position | None = None) -> None:
        """Take one event of the feed."""
        if self._is_begun:
            self.workers.passes(self._steady())  # the loop may have stood before it read this
        judges = self._views.judges
        self._views.apply(event, position)
        self._note_judges(judges)
        if isinstance(event, StepsRedone) and self._is_begun:
            for line in passed_over_lines([event]):
                self.say(line)
        if isinstance(event, ControlState) and self._is_begun:
            self.control = event.state
            self.wanted |= event.workers
            if event.reason:
                self.say(f"{event.state} by {event.by}: {event.reason}")
        before = self._poison.news
        self._poison.apply(event)
        if self._poison.news != before:
            self.say(self._poison.news)

    def _note_clocks(self) -> None:
        """Say once of each host that its clock is not ours, or was set since we started."""
        now_s = time.monotonic()
        for host, apart_ms in self.workers.apart_ms.items():
            if abs(apart_ms) <= CLOCKS_MS:
                self._apart_since_s.pop(host, None)
                continue
            lasts_s = now_s - self._apart_since_s.setdefault(host, now_s)
            if lasts_s >= APART_S and host not in self._warned_clocks:
                self._warned_clocks.add(host)
                how = "ahead of" if apart_ms > 0 else "behind"
                self.say(
                    f"warning: the clock of host {host or '?'} is {abs(apart_ms) / 1000:,.0f} s "
                    f"{how} the one that this run is watched by: times in the log are off by it, "
                    "and agents' sessions whose worker dies may be sampled again; use NTP"
                )

    def _note_joined(self) -> None:
        """Say which workers joined by themselves, and which of them left."""
        there = {life.instance: life for life in self.workers.lives if life.is_joined}
        for instance, life in there.items():
            has_left = life.state == "stopped"
            is_new = self._joined.get(instance) != has_left
            if is_new and self._is_begun and life.heard_ms > self._since_ms:
                self.say(f"{life.worker} has {'left' if has_left else 'joined from'} {life.host}")
                self._joined[instance] = has_left

    def _note_judges(self, before: Sequence[str]) -> None:
        """Say at which step rewards begin to be those of other code or settings."""
        now = self._views.judges
        if before and set(now) - set(before) and self.phase != "starting":
            self.say(
                f"step {self.step} is the first of answers that were judged by other code or "
                f"settings: {', '.join(before)} -> {', '.join(now)}"
            )

    @property
    def problem(self) -> str:
        """Why the run should not go on, by the log; empty: it should."""
        return self._poison.problem or self.stall.problem

    @property
    def state(self) -> ViewState:
        """State of the run, as far as the topics were read."""
        return self._views.state

    @property
    def waiting(self) -> Mapping[str, int]:
        """Samples that wait for the reader of a topic, by topic."""
        return self._views.flow.waiting

    @property
    def ledger(self) -> Ledger:
        """Steps and claims: asked in each iteration, for which no snapshot needs to be made."""
        return self._views.ledger

    @property
    def step(self) -> int:
        """The newest step."""
        return self.ledger.last_step

    def poll(self) -> None:
        """Take what is new and see whether the run stands; waits at most `POLL_S`, longer only for
        a schema of another release, which the broker is asked for once."""
        if not self._feed.poll(0.0):
            time.sleep(POLL_S)  # the client would wait for an hour if the clock were set back by it
        self._note_joined()
        self._note_clocks()
        self.stall.note(self._processes)
        is_running = self.phase in ("running", "saving") and not self.is_broker_away
        self.stall.tick(is_running=is_running)
        for news in (self.stall.news, self._disk_warning(time.monotonic())):
            if news:
                self.say(news)
        self.stall.news = ""

    def _disk_warning(self, now_s: float) -> str:
        """Warn that the embedded broker's disk is nearly full; empty: it is not, or just warned."""
        folder = Path(self._config.folder) / BROKER_FOLDER
        if self._config.broker.bootstrap or now_s < self._next_look_s or not folder.is_dir():
            return ""
        free_bytes = shutil.disk_usage(folder).free
        self._next_look_s = now_s + (WARN_S if free_bytes < LOW_BYTES else LOOK_S)
        found = f"{free_bytes / 1e9:.2f} GB are free on the broker's disk"
        return f"warning: {found}: a full disk stops the broker" if free_bytes < LOW_BYTES else ""

    def catch_up(self) -> None:
        """Take all that the topics hold now.

        Raises DeadlineError: the broker stopped delivering.
        """
        self._feed.catch_up(CATCH_UP_S)

    def finish(self) -> None:
        """`catch_up`, and write the last figures."""
        self.catch_up()
        if self._figures is not None:
            self._figures.update(self.state, lambda: True, is_last=True)

    def is_evaluated(self) -> bool:
        """Whether every held-out row was answered for the newest version."""
        version = self.ledger.policy_version
        if not self._is_complete(version):
            return False
        # Only with everything read is the number of rows that were issued known.
        with suppress(BrokerError, DeadlineError):  # a broker that is down is asked again
            self.catch_up()
            return self._is_complete(version)
        return False

    def num_evaluated(self) -> int:
        """Answers of all evaluations so far; it grows while one goes on."""
        return sum(point.num_samples for point in self._views.evaluation.points)

    def begin(self) -> None:
        """Begin: this start makes the steps to come; earlier ones are not shown again."""
        self._is_begun = self._poison.is_live = True
        self.workers.passes(self._steady())
        self._since_ms = self.workers.clock_ms
        self._live.skip_to(self.state)
        if self._figures is not None:
            self._figures.skip_to(self.state)

    def say(self, text: str) -> None:
        """Show a sentence until the next one."""
        # Two sentences between two drawings are both shown: neither is lost to a reader of lines.
        self._message = text if self._is_shown else f"{self._message}; {text}"
        self._is_shown = False
        self._next_draw_s = 0.0

    def killed(self, worker: str) -> None:
        """Mark a kill in the curve, at the step that is being made."""
        mark = KillMark(step=self.step + 1, worker=worker, killed_at_ms=now_ms())
        self.kills.append(mark)

    def draw(self, processes: Sequence[ProcessInfo]) -> None:
        """Show the state, at most twice a second unless something was said."""
        self._processes = processes
        now_s = time.monotonic()
        if now_s < self._next_draw_s:
            return
        self._next_draw_s = now_s + DRAW_S
        if self._figures is not None:
            self._figures.update(self.state, self._has_read)
        self._is_shown = True
        self._live.update(
            LiveInput(
                run=self._config.run.id,
                views=self.state,
                elapsed_s=now_s - self._started_s,
                step_target=self._config.trainer.steps,
                processes=processes,
                kills=tuple(self.kills),
                message=self._message,
                state=self.phase,
            )
        )

    def _has_read(self) -> bool:
        """Whether all was read that the topics held when this was asked first; a broker that is
        away is asked again."""
        if self.is_broker_away:
            return False
        try:
            self._asked_ends = self._asked_ends or self._feed.ends()
            if self._feed.behind(self._asked_ends):
                return False
        except (BrokerError, DeadlineError):
            return False
        self._asked_ends = {}
        return True

    def _is_complete(self, version: int) -> bool:
        points = self._views.evaluation.points
        return any(point.policy_version == version and point.is_complete for point in points)
