"""Members of a weight server: a listener, and one thread per authenticated link.

Links only pass frames on; the sender's thread alone decides.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

from torch._C._distributed_c10d import HashStore

from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.link.frames import Connection, Frame
from rlstreams.workers.weights.link.handshake import Hello, admit
from rlstreams.workers.weights.link.rendezvous import answer
from rlstreams.workers.weights.listening import LinkServer

HANDSHAKE_S = 5.0


@dataclass(eq=False, slots=True, kw_only=True)
class Member:
    """One connected receiver."""

    hello: Hello
    link: Connection
    layout: str = ""  # JSON of its parameters
    mode: str = "in_place"
    ranks: int = 1
    engine: str = ""
    gpu: str = ""  # empty: none, or a plugin that does not report it
    wants: int | None = None  # the version it asks for
    settled: int | None = None  # the version that it got, or was refused, last
    worker: str = ""  # the worker that asked for it in the log
    since_s: float = 0.0
    tries: int = 0
    has_no_ipc: bool = False  # it is on the sender's GPU, and no link was formed there
    gone: str = ""  # reason that its link ended
    answers: dict[str, Frame] = field(default_factory=dict)  # last frame by group

    @property
    def label(self) -> str:
        """Name for logs and errors."""
        rank = f" rank {self.hello.rank}" if self.ranks > 1 else ""
        who = f"receiver {self.hello.receiver}{rank} ({self.engine}, {self.link.peer})"
        return f"{self.worker or 'unknown worker'}, {who}"

    def send(self, frame: Frame) -> None:
        """Send; a member that takes nothing is marked gone, as its own thread will report too."""
        try:
            self.link.send(frame)
        except PullError as err:
            self.gone = self.gone or str(err)

    def refuse(self, kind: str, error: str) -> None:
        """Refuse the wanted version, with the reason."""
        self.settled, self.wants = self.wants, None
        self.send({"type": "refused", "kind": kind, "error": error})


# Takes a member's frame; or None with the reason that its link ended.
Heard = Callable[[Member, Frame | None, str], None]


class Listener:
    """Accepts links on one address."""

    def __init__(
        self,
        host: str,
        epoch: int,
        key_of: Callable[[str], str],
        heard: Heard,
        refused: Callable[[str], None],
    ) -> None:
        """Listen on a free port of `host`, and of no other interface.

        Raises:
            OSError: no such address here.
        """
        self._epoch = epoch
        self._key_of = key_of
        self._heard = heard
        self._refused = refused
        self._stores: dict[str, HashStore] = {}
        self._links = LinkServer(host, self._serve, "weight-listener")
        self.host, self.address = host, self._links.address

    @contextlib.contextmanager
    def rendezvous(self, group_id: str, form_s: float) -> Iterator[HashStore]:
        """Open the store that members reach to form a group, within the block."""
        store = self._stores[group_id] = HashStore()
        store.set_timeout(timedelta(seconds=form_s))
        try:
            yield store
        finally:
            del self._stores[group_id]

    def close(self) -> None:
        """Accept no further link; idempotent."""
        self._links.close()

    def _serve(self, link: Connection) -> None:
        try:
            hello = admit(link, self._epoch, self._key_of, time.monotonic() + HANDSHAKE_S)
            purpose, _, group_id = hello.purpose.partition("/")
            if purpose == "group":
                store = self._stores.get(group_id)
                while store is not None:
                    link.send(answer(store, link.receive(math.inf)))
            else:
                self._serve_member(Member(hello=hello, link=link))
        except PullError as err:
            if err.kind == "refused":
                self._refused(str(err))
        finally:
            link.close()

    def _serve_member(self, member: Member) -> None:
        try:
            while True:
                self._heard(member, member.link.receive(math.inf), "")
        except PullError as err:
            self._heard(member, None, str(err))
