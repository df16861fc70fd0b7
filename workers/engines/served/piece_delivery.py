"""Delivery by our piece in the server: straight into its own parameters (infra/server/README.md).

An order goes to the server by its own update route and holds no weights; the piece receives them
from the trainer and reports to this worker's desk. The report counts; the route's answer matters
only where the server died. A server without the piece is noticed when it is met.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import replace

from workers.engines.served.delivery import Delivery, DeliveryError, Order
from workers.engines.served.dialect import Dialect
from workers.engines.served.facts import Kind, ServerFacts
from workers.engines.served.http import ServerError, ServerHttp
from workers.engines.served.ranks import ask_ranks, refuse
from workers.weights import payloads
from workers.weights.channel import Pulled, WeightError
from workers.weights.desk import Desk, Errand, Report, ServerPullError, describe

_ASK_S = 40.0
_ALREADY = "already active"  # how vLLM refuses a second session


class PieceDelivery:
    """Puts versions into one server; by `other` where the server has no piece."""

    def __init__(self, desk: Desk, other: Delivery, server: str) -> None:
        """Args: desk: of this worker. server: which of the worker's servers, a receiver's name."""
        self._desk = desk
        self._other = other
        self._server = server
        self._ranks = 1
        self._has_piece = False

    @property
    def name(self) -> str:
        """`piece`, or the other way's name and why."""
        return "piece" if self._has_piece else f"{self._other.name} (it has no transfer piece)"

    async def prepare(self, http: ServerHttp, dialect: Dialect, facts: ServerFacts) -> None:
        """Greet the piece, and ask how many processes hold a part of the model."""
        ranks = await ask_ranks(http, facts, _ASK_S)
        refuse(http.url, ranks, facts.kind)
        self._ranks = ranks.total
        self._has_piece = await self._answers(http, facts)
        if not self._has_piece:
            await self._other.prepare(http, dialect, facts)
        elif facts.kind is Kind.VLLM and ranks.total > 1:
            refuse(http.url, replace(ranks, stages=await self._stages(http, facts)), facts.kind)

    async def deliver(self, order: Order) -> int:
        """Have the piece receive; see `Delivery.deliver`."""
        if not self._has_piece:
            return await self._other.deliver(order)
        try:
            text = order.channel.order(order.published, order.left_s, server=self._server)
        except WeightError as err:
            raise DeliveryError(str(err), touched=False) from err
        try:
            with self._desk.open(text, ranks=self._ranks) as errand:
                calls = self._calls(errand, order.facts)
                pulled = await self._run(errand, order.http, calls, order.left_s)
        except ServerPullError as err:
            version = order.published.policy_version
            raise DeliveryError(
                f"server {order.http.url}: policy version {version}: {err}", touched=err.touched
            ) from err
        return pulled.num_bytes

    async def _answers(self, http: ServerHttp, facts: ServerFacts) -> bool:
        """Whether the piece is there: vLLM takes its greeting, SGLang runs it for a description."""
        try:
            if facts.kind is Kind.VLLM:
                await http.post("/init_weight_transfer_engine", payloads.VLLM_INIT, _ASK_S)
                return True
            await self._described(http, facts)
        except (ServerError, ServerPullError):
            return False
        return True

    async def _described(self, http: ServerHttp, facts: ServerFacts) -> list[Report]:
        with self._desk.open(describe(), kind="describe", ranks=self._ranks) as errand:
            for route, body in self._calls(errand, facts):
                await http.post(route, body, _ASK_S)
            return await asyncio.to_thread(errand.reports)

    async def _stages(self, http: ServerHttp, facts: ServerFacts) -> int:
        """Of a pipeline: its ranks know how many share a stage."""
        try:
            reports = await self._described(http, facts)
        except ServerPullError as err:
            raise ServerError(f"server {http.url}: its piece does not answer: {err}") from err
        return self._ranks // int(reports[0]["ranks"])

    def _calls(self, errand: Errand, facts: ServerFacts) -> list[tuple[str, Mapping[str, object]]]:
        """The routes to call, in order."""
        if facts.kind is Kind.VLLM:
            return [
                ("/start_weight_update", payloads.VLLM_START),
                ("/update_weights", payloads.vllm_update(errand.text)),
                ("/finish_weight_update", payloads.VLLM_FINISH),
            ]
        update = "/update_weights_from_tensor", payloads.sglang_update(errand.text, self._ranks)
        if not facts.has_session:
            return [update]
        return [("/begin_weight_update", {}), update, ("/end_weight_update", {})]

    async def _run(
        self,
        errand: Errand,
        http: ServerHttp,
        calls: list[tuple[str, Mapping[str, object]]],
        deadline_s: float,
    ) -> Pulled:
        """Call the routes while the reports come in."""

        calling = asyncio.create_task(self._call(errand, http, calls, deadline_s))
        try:
            pulled = await asyncio.to_thread(errand.wait)
        except ServerPullError:
            # A session that was begun is also ended, or the next pull would be refused.
            await asyncio.wait({calling}, timeout=_ASK_S)
            raise
        except asyncio.CancelledError:
            calling.cancel()
            errand.give_up("the worker ends")  # or its thread would wait for the report
            raise
        try:
            await calling
        except ServerError as err:
            raise ServerPullError(str(err), kind="server", touched=True) from err
        return pulled

    async def _call(
        self,
        errand: Errand,
        http: ServerHttp,
        calls: list[tuple[str, Mapping[str, object]]],
        deadline_s: float,
    ) -> None:
        begun = False
        try:
            for route, body in calls:
                try:
                    await http.post(route, body, deadline_s + _ASK_S)
                except ServerError as err:
                    if begun or _ALREADY not in str(err):
                        raise
                    await http.post(calls[-1][0], calls[-1][1], _ASK_S)  # a session left open
                    await http.post(route, body, _ASK_S)
                begun = True
        except ServerError as err:
            errand.give_up(str(err))
            if begun and len(calls) > 1:
                with contextlib.suppress(ServerError):
                    await http.post(calls[-1][0], calls[-1][1], _ASK_S)
            raise
