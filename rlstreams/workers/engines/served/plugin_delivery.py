"""Delivery by our plugin in the server: straight into its own parameters (infra/server/README.md).

An order goes to the server by its own update route and holds no weights; the plugin receives them
from the trainer and reports to this worker's listener. The report counts; the route's answer
matters only where the server died. A server without the plugin is noticed when it is met, and takes
versions by a folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rlstreams.workers.engines.served.adapter import Adapter, Calls
from rlstreams.workers.engines.served.delivery import (
    PLUGIN,
    PROBE_S,
    DeliveryError,
    DeliveryOrder,
    FolderDelivery,
    before_the_server,
)
from rlstreams.workers.engines.served.facts import Ranks
from rlstreams.workers.engines.served.http import ServerError, ServerGoneError, ServerHttp
from rlstreams.workers.weights.link import CLAIM, DESCRIBE
from rlstreams.workers.weights.report_listener import (
    SILENT,
    PendingOrder,
    Report,
    ReportListener,
    ServerPullError,
    describe,
)

T = TypeVar("T")
_ALREADY = "already active"  # in vLLM's refusal of a second session


class PluginDelivery(FolderDelivery):
    """Puts versions into one server by its plugin, or by a folder where it has none."""

    def __init__(
        self,
        listener: ReportListener,
        model: Path,
        folder: Path,
        server: str,
        *,
        instance: str = "",
        probe_s: float = PROBE_S,
    ) -> None:
        """
        Args:
            server: name of the receiver among the worker's servers.
            instance: of this process, in every order: the plugin obeys the last that met it.
        """
        super().__init__(model, folder, probe_s=probe_s)
        self._listener = listener
        self._server = server
        self._instance = {"instance": instance}
        self._ranks = 1
        self._has_plugin = False

    @property
    def name(self) -> str:
        """`plugin`, or the name of the other way and the reason for it."""
        return PLUGIN if self._has_plugin else f"{super().name} (it has no transfer plugin)"

    async def prepare(self, adapter: Adapter) -> None:
        """Greet the plugin, and ask how many processes hold a part of the model."""
        ranks = await adapter.ranks(self._probe_s)
        _refuse(adapter, ranks)
        self._ranks = ranks.total
        self._has_plugin = await self._answers(adapter)
        if not self._has_plugin:
            await super().prepare(adapter)
            return
        try:
            reports = await self._described(adapter, CLAIM)
        except ServerPullError as err:
            kind = ServerGoneError if err.kind == SILENT else ServerError
            raise kind(f"server {adapter.http.url}: its plugin does not answer: {err}") from err
        if adapter.has_staged_ranks:
            stages = self._ranks // int(reports[0]["ranks"])
            _refuse(adapter, replace(ranks, stages=stages))

    async def probe(self, adapter: Adapter) -> None:
        """Have every rank describe itself; the description is not used."""
        if not self._has_plugin:
            await super().probe(adapter)
            return
        try:
            await self._described(adapter)
        except ServerPullError as err:
            if err.is_silence:
                raise ServerGoneError(str(err)) from err

    async def deliver(self, order: DeliveryOrder) -> int:
        """Have the plugin receive; see `FolderDelivery.deliver`."""
        if not self._has_plugin:
            return await super().deliver(order)
        http, left_s = order.adapter.http, order.left_s
        with before_the_server(order):
            given = order.published, left_s  # in a thread: a store puts the version together
            text = await asyncio.to_thread(order.channel.order, *given, server=self._server)
        try:
            with self._listener.open(text | self._instance, ranks=self._ranks) as pending:
                calls = order.adapter.update_calls(pending.text, self._ranks)
                until_s = time.monotonic() + left_s + self._probe_s
                pulled = await self._run(pending, http, calls, until_s, pending.wait)
        except ServerPullError as err:
            version = order.published.policy_version
            raise DeliveryError(
                f"server {http.url}: policy version {version}: {err}",
                touched=err.touched,
                silent=err.is_silence,
            ) from err
        return pulled.num_bytes

    async def _answers(self, adapter: Adapter) -> bool:
        """Whether the server has the plugin: it takes its greeting, or describes itself. Silence is
        a ServerGoneError: it proves neither."""
        try:
            if adapter.greeting:
                await adapter.http.post(*adapter.greeting, self._probe_s)
            else:
                await self._described(adapter)
        except ServerGoneError:
            raise
        except ServerError:
            return False
        except ServerPullError as err:
            if err.kind == SILENT:
                raise ServerGoneError(str(err)) from err
            return False
        return True

    async def _described(self, adapter: Adapter, kind: str = DESCRIBE) -> list[Report]:
        order = describe(self._probe_s) | self._instance
        with self._listener.open(order, kind=kind, ranks=self._ranks) as pending:
            calls = adapter.update_calls(pending.text, self._ranks)
            until_s = time.monotonic() + self._probe_s
            return await self._run(pending, adapter.http, calls, until_s, pending.reports)

    async def _run(
        self,
        pending: PendingOrder,
        http: ServerHttp,
        calls: Calls,
        until_s: float,
        reports: Callable[[], T],
    ) -> T:
        """Call the routes while the reports come in; the result of `reports`."""
        calling = asyncio.create_task(self._call(pending, http, calls, until_s))
        try:
            found = await asyncio.to_thread(reports)
            await calling
        except ServerPullError:
            # A session that was begun is also ended, or the next pull would be refused. A server
            # that does not answer that either is left alone: the end must not reach it during a
            # later pull.
            await asyncio.wait({calling}, timeout=self._probe_s)
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
            raise
        except asyncio.CancelledError:
            calling.cancel()
            pending.give_up("the worker ends")  # else its thread would wait for the report
            raise
        except ServerError as err:
            raise ServerPullError(str(err), kind=_kind_of(err), touched=True) from err
        return found

    async def _call(
        self, pending: PendingOrder, http: ServerHttp, calls: Calls, until_s: float
    ) -> None:
        end, begun = calls[-1], False
        try:
            for route, body in calls:
                try:
                    await http.post(route, body, _left_s(until_s))
                except ServerError as err:
                    if begun or _ALREADY not in str(err):
                        raise
                    await http.post(*end, self._probe_s)  # the session left open
                    await http.post(route, body, _left_s(until_s))
                begun = True
        except ServerError as err:
            pending.give_up(str(err), kind=_kind_of(err))
            if begun and len(calls) > 1:
                with contextlib.suppress(ServerError):
                    await http.post(*end, self._probe_s)
            raise
        pending.answered()


def _refuse(adapter: Adapter, ranks: Ranks) -> None:
    found, cure = adapter.refusal(ranks)
    if found:
        raise ServerError(f"server {adapter.http.url} was started with {found}; {cure}")


def _left_s(until_s: float) -> float:
    return max(0.1, until_s - time.monotonic())


def _kind_of(err: ServerError) -> str:
    return SILENT if isinstance(err, ServerGoneError) else "server"
