"""An agent that nobody starts: a program from outside opens its sessions, with work of its own.

The run issues places: groups of samples whose rows nobody reads. A client with the agent's
key asks for a session and names its group: sessions of one group are compared with each
other. All places of one of the run's groups go to one group of clients; when they are given away,
the next session of that group begins another. A place that no session came for is set aside once
its group was silent for `lease_s`, so that those that came are not waited for in vain.

A client is not started anew when this worker is: it goes on where it was, with the same key.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlstreams.streams.log.group_ids import group_of
from rlstreams.streams.log.text import counted
from rlstreams.workers.agents.agent import Ending, SamplePlace, Start, fell_silent
from rlstreams.workers.agents.asking import MAX_ASKING, Given, refuse_beyond, start_json
from rlstreams.workers.config.agents import AgentSection
from rlstreams.workers.gateway.port import CallRefusedError, ending

FILE = "clients.json"  # the clients' address and key; for the run's owner alone
MAX_GROUP = 200  # characters of a group's name


@dataclass(slots=True)
class _Filled:
    """One of the run's groups, and the client group whose sessions it takes."""

    client_group: str
    size: int = 0  # places
    taken: set[str] = field(default_factory=set)  # sessions that came, or were given up
    num_running: int = 0
    over: set[str] = field(default_factory=set)  # sessions that ended here
    heard_s: float = field(default_factory=time.monotonic)  # when one came or went

    @property
    def is_full(self) -> bool:
        """Whether each of its places is taken."""
        return len(self.taken) >= self.size

    @property
    def is_over(self) -> bool:
        """Whether each session of the group has ended here."""
        return len(self.over) >= self.size


@dataclass(slots=True, eq=False)
class _Free:
    """A place that nobody has."""

    place: SamplePlace
    found: asyncio.Future[str]  # the group of its client


class OutsideAgent:
    """The port `Agent`; see above."""

    def __init__(
        self, section: AgentSection, folder: Path, *, max_asking: int = MAX_ASKING
    ) -> None:
        """
        Args:
            folder: of the file with the clients' address and key.
        """
        self.name = section.name
        self.file = folder / FILE
        self.url = ""  # where its clients find the gateway; set before the first session
        self._section = section
        self._max_asking = max_asking
        self._free: dict[str, dict[str, _Free]] = defaultdict(dict)  # by group, by session
        self._filled: dict[str, _Filled] = {}  # by group
        self._asking: dict[Given, str] = {}  # clients that wait, and their groups; in order
        self._found: dict[str, Given] = {}  # of sessions that are about to start
        self._given_up: set[str] = set()
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Places that nobody has."""
        return sum(len(group) for group in list(self._free.values()))

    @property
    def waits_for(self) -> str:
        """Places that wait, in words; "": none does. May be asked from any thread."""
        if not (num := self.num_waiting):
            return ""
        places = counted(num, "place")
        return (
            f"for clients of agent {self.name!r}: {places} free; clients read in {self.file} "
            "where to ask"
        )

    def _take(self, place: SamplePlace, session_id: str, client_group: str) -> None:
        """Note that a client group has a session; its siblings' places are for that group."""
        group = self._filled.get(place.group_id)
        if group is None:
            self._forget_what_is_over()
            group = self._filled[place.group_id] = _Filled(client_group)
        group.size = place.group_size
        group.taken.add(session_id)
        group.heard_s = time.monotonic()

    def _forget_what_is_over(self) -> None:
        over = [name for name, group in self._filled.items() if group.is_over]
        for name in over:
            del self._filled[name]

    async def taken(self, place: SamplePlace) -> str:
        """See Agent: until a client asks for it, or its siblings' client sends no more."""
        for session_id, client_group in place.siblings.items():
            self._take(place, session_id, client_group)
        if (group := self._filled.get(place.group_id)) is not None:
            group.over.discard(place.session_id)  # its partition went away, and is back
        if place.client_group:  # its client goes on with it
            self._take(place, place.session_id, place.client_group)
            return place.client_group
        free = _Free(place, asyncio.get_running_loop().create_future())
        self._free[place.group_id][place.session_id] = free
        self._match()
        try:
            return await self._whose(free)
        except asyncio.CancelledError:
            if (given := self._found.pop(place.session_id, None)) is not None:
                self._filled[place.group_id].taken.discard(place.session_id)
                given.cancel()  # its client has to ask again
            raise
        finally:
            self._leave(place)

    async def _whose(self, free: _Free) -> str:
        place, lease_s = free.place, self._section.lease_s
        while not free.found.done():
            await asyncio.wait({free.found}, timeout=lease_s / 4)
            group = self._filled.get(place.group_id)
            if free.found.done() or group is None or group.num_running:
                continue
            if time.monotonic() - group.heard_s >= lease_s:
                self._given_up.add(place.session_id)
                group.taken.add(place.session_id)  # without a sign of life: others may be late too
                return group.client_group
        return free.found.result()

    def _leave(self, place: SamplePlace) -> None:
        self._free[place.group_id].pop(place.session_id, None)
        if not self._free[place.group_id]:
            del self._free[place.group_id]

    def _match(self) -> None:
        """Give places to clients, those that asked first first."""
        for given, client_group in list(self._asking.items()):
            if (free := self._place_for(client_group)) is None:
                continue
            del self._asking[given]
            self._take(free.place, free.place.session_id, client_group)
            self._found[free.place.session_id] = given
            self._leave(free.place)
            free.found.set_result(client_group)

    def _place_for(self, client_group: str) -> _Free | None:
        """A free place of the client group's own groups, or else of the one that waits longest.

        A group of its own that is not full may have its other places still to come, but not once it
        was silent for `lease_s`: another worker has them.
        """
        since_s = time.monotonic() - self._section.lease_s
        own = [
            group_id
            for group_id, group in self._filled.items()
            if group.client_group == client_group
            and not group.is_full
            and (group_id in self._free or group.num_running or group.heard_s > since_s)
        ]
        for group_id in own or (g for g in self._free if g not in self._filled):
            for free in self._free.get(group_id, {}).values():
                return free
        return None

    async def run(self, start: Start) -> Ending:
        """See Agent."""
        group_id, lease_s = group_of(start.session_id), self._section.lease_s
        if start.session_id in self._given_up:
            self._given_up.discard(start.session_id)
            self._filled[group_id].over.add(start.session_id)
            detail = f"no session of its group came within {lease_s:g} s (agent.lease_s)"
            return Ending(is_abandoned=True, detail=detail)
        given, group = self._found.pop(start.session_id, None), self._filled[group_id]
        if given is not None and not given.done():
            given.set_result(start_json(start, self._section, self.url))
        group.num_running += 1
        try:
            if await fell_silent(start, lease_s):
                detail = f"its client was silent for {lease_s:g} s (agent.lease_s)"
                return Ending(is_abandoned=True, detail=detail)
        finally:
            group.num_running -= 1
            group.over.add(start.session_id)
            group.heard_s = time.monotonic()
        return Ending()

    async def ask(self, wait_s: float, client_group: str) -> Mapping[str, Any] | None:
        """See Desk."""
        if self._is_closed:
            raise ending()
        if not 0 < len(client_group) <= MAX_GROUP:
            raise CallRefusedError(
                400,
                "invalid_value",
                f"group must have 1 to {MAX_GROUP} characters, got {client_group!r:.60}: a session "
                "is compared with those of its group, and has none alone",
                param="group",
            )
        refuse_beyond(self._max_asking, len(self._asking), f"clients of agent {self.name!r}")
        given: Given = asyncio.get_running_loop().create_future()
        self._asking[given] = client_group
        self._match()
        try:
            await asyncio.wait({given}, timeout=wait_s)
            return given.result() if given.done() and not given.cancelled() else None
        finally:
            given.cancel()
            self._asking.pop(given, None)

    async def close(self) -> None:
        """Refuse requests: this worker ends, and its sessions go on in the next one."""
        self._is_closed = True
        for given in (*self._asking, *self._found.values()):
            with suppress(asyncio.InvalidStateError):
                given.set_exception(ending())
