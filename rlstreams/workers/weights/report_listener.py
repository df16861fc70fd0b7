"""Listener for the reports of model servers on orders to pull weights: the worker's side.

A pending order is one that a server was given: its text is sent through the engine's own HTTP
route; its reports, one per rank, arrive here. Reporters authenticate with the order's own key,
which only the order holds.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rlstreams.workers.weights.channel import Pulled, WeightError
from rlstreams.workers.weights.link import PROTOCOL
from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.link.frames import Connection
from rlstreams.workers.weights.link.handshake import admit
from rlstreams.workers.weights.listening import LinkServer

HANDSHAKE_S = 5.0
REPORT_GRACE_S = 10.0  # after the order's deadline
SILENT = "silent"  # the server did not answer the call that carried the order
UNREPORTED = "unreported"  # it answered, or had the time to, but a rank did not report

Report = Mapping[str, Any]


class ServerPullError(WeightError):
    """A server did not load a version.

    `touched`: its old weights may be damaged. `kind`: of a `PullError`, or `SILENT`, `UNREPORTED`.
    """

    def __init__(self, text: str, *, kind: str, touched: bool) -> None:
        super().__init__(text)
        self.kind = kind
        self.touched = touched

    @property
    def is_silence(self) -> bool:
        """Whether the server's state is unknown: it may hang."""
        return self.kind in (SILENT, UNREPORTED)


class ReportListener:
    """Listens on one interface until `close`."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """
        Args:
            host: address at which the servers reach this process.

        Raises:
            OSError: no such address here.
        """
        self._pending: dict[str, PendingOrder] = {}
        self._links = LinkServer(host, self._hear, "report-listener")
        self.address = self._links.address

    @contextlib.contextmanager
    def open(
        self, order: Mapping[str, object], *, kind: str = "receive", mode: str = "auto", ranks: int
    ) -> Iterator[PendingOrder]:
        """An order to one server, pending within the block; later reports on it are refused.

        Args:
            order: of `WeightChannel.order`, or `describe()`.
            ranks: processes of the server that hold a part of the model (TP x PP x DP).
        """
        more = {"kind": kind, "mode": mode, "report_to": self.address}
        pending = PendingOrder({**order, **more}, ranks)
        self._pending[pending.order_id] = pending
        try:
            yield pending
        finally:
            del self._pending[pending.order_id]

    def close(self) -> None:
        """Stop listening; idempotent."""
        self._links.close()

    def _hear(self, link: Connection) -> None:
        until_s = time.monotonic() + HANDSHAKE_S
        with contextlib.suppress(PullError):  # no reporter of ours
            hello = admit(link, 0, lambda order_id: self._pending[order_id].key, until_s)
            pending = self._pending.get(hello.receiver)
            frame = link.receive(until_s)
            if pending is not None:
                pending.reported(hello.rank, frame.get("report"))
        link.close()


def describe(deadline_s: float) -> dict[str, object]:
    """An order that asks a server for its description; touches nothing."""
    return {"rlstreams": PROTOCOL, "deadline_s": deadline_s}


class PendingOrder:
    """One pending order; `text` is what the server receives."""

    def __init__(self, order: Mapping[str, object], ranks: int) -> None:
        self.order_id = secrets.token_hex(8)
        self.key = secrets.token_hex(32)
        self.text = json.dumps({**order, "order": self.order_id, "report_key": self.key})
        self._address = order["report_to"]
        self._wanted = {name: order.get(name) for name in ("policy_version", "weight_hash")}
        self._ranks = ranks
        self._started_s = time.monotonic()
        self._until_s = self._started_s + float(str(order["deadline_s"])) + REPORT_GRACE_S
        self._reports: dict[int, Report] = {}
        self._changed = threading.Condition()

    def reported(self, rank: int, report: object) -> None:
        """Take a rank's report; a rank that the server does not have is ignored."""
        if not isinstance(report, dict):
            said = {"ok": False, "kind": "server", "touched": True}
            report = said | {"error": f"it reports {report!r:.80}"}
        if rank in range(self._ranks):
            with self._changed:
                self._reports[rank] = report
                self._changed.notify_all()

    def answered(self) -> None:
        """Shorten the wait: the server has answered all calls, so its ranks are done, and a report
        that does not arrive soon was lost."""
        with self._changed:
            self._until_s = min(self._until_s, time.monotonic() + REPORT_GRACE_S)
            self._changed.notify_all()

    def give_up(self, reason: str, *, kind: str = "server") -> None:
        """Fail all missing reports: the server died, refused the HTTP call or is silent."""
        said = {"ok": False, "kind": kind, "error": reason, "touched": True}
        with self._changed:
            self._reports = dict.fromkeys(range(self._ranks), said) | self._reports
            self._changed.notify_all()

    def reports(self) -> list[Report]:
        """Reports of all ranks, by rank.

        Raises:
            ServerPullError: a rank failed, or did not report in time.
        """
        with self._changed:
            while len(self._reports) < self._ranks:
                left_s = self._until_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            found = dict(sorted(self._reports.items()))
        if silent := [rank for rank in range(self._ranks) if rank not in found]:
            raise ServerPullError(
                f"ranks {silent} of {self._ranks} did not report to {self._address} "
                f"within {self._until_s - self._started_s:.0f} s",
                kind=UNREPORTED,
                touched=True,
            )
        touched = any(bool(report.get("touched")) for report in found.values())
        for rank, report in found.items():
            if not report.get("ok"):
                text = f"rank {rank} of {self._ranks}: {report.get('error')}"
                raise ServerPullError(text, kind=str(report.get("kind")), touched=touched)
        return list(found.values())

    def wait(self) -> Pulled:
        """Wait until every rank holds the version. `paused_s` is left to the caller, which paused.

        Raises:
            ServerPullError: see `reports`.
        """
        num_bytes = 0
        for rank, report in enumerate(self.reports()):
            said = {name: report.get(name) for name in self._wanted}
            if said != self._wanted:
                text = f"rank {rank} of {self._ranks} reports {said}, ordered was {self._wanted}"
                raise ServerPullError(text, kind="server", touched=True)
            size = report.get("num_bytes")
            num_bytes += size if isinstance(size, int) else 0
        return Pulled(
            policy_version=int(str(self._wanted["policy_version"])),
            weight_hash=str(self._wanted["weight_hash"]),
            num_bytes=num_bytes,
            seconds=time.monotonic() - self._started_s,
            paused_s=0.0,
        )
