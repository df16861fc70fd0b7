"""An order in, a report out: a model server's answer to a worker that has it pull a version.

Nothing here raises: SGLang would end the whole server. Fields: infra/server/README.md.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from . import CLAIM, KINDS, PROTOCOL, RECEIVE
from .errors import PullError
from .frames import dial
from .handshake import Hello, introduce
from .mapping import make_plan
from .model_target import Loading, ModelTarget
from .pieces import batches
from .receiver import Address, Received, Receiver
from .safetensors_file import read
from .target import rows_of

REPORT_S = 10.0
MODES = ("auto", "in_place", "checkpoint")
PLAIN = Loading()
Report = dict[str, Any]


class ServerRank:
    """One rank of a model server; keeps its link and groups from order to order."""

    def __init__(
        self,
        model: Any,  # noqa: ANN401  (any engine's)
        device: torch.device,
        *,
        engine: str,
        rank: int = 0,
        ranks: int = 1,
        loading: Loading = PLAIN,
    ) -> None:
        self._model = model
        self._device = device
        self._engine = engine
        self._rank = rank
        self._ranks = ranks
        self._loading = loading
        self._receiver: Receiver | None = None
        self._touched = False
        self._owner = ""  # the worker's process that claimed this server last

    def obey(self, text: str) -> Report:
        """Do what the order says and report to its listener; the report is returned too."""
        started_s = time.monotonic()
        order: Report = {}
        said: Report = {}
        try:
            order = _read(text)
            said = self._obey(order, started_s + float(order["deadline_s"])) | {"ok": True}
        except PullError as err:
            said = {"ok": False, "kind": err.kind, "error": str(err)}
        except Exception as err:  # noqa: BLE001  (an engine that we do not know may raise anything)
            said = {"ok": False, "kind": "server", "error": f"{type(err).__name__}: {err}"}
        report = {
            "order": order.get("order"),
            "rank": self._rank,
            "ranks": self._ranks,
            "touched": self._touched,
            "seconds": time.monotonic() - started_s,
        }
        report |= said
        self._report(order, report)
        return report

    def close(self) -> None:
        """Leave the trainer; idempotent."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _obey(self, order: Report, until_s: float) -> Report:
        instance = str(order.get("instance", ""))
        if order["kind"] == CLAIM:
            self._owner = instance
        target = ModelTarget(self._model, self._device, self._loading)
        if order["kind"] != RECEIVE:
            return {"engine": self._engine, "parameters": rows_of(target.tensors)}
        if instance != self._owner:  # a suspended process, which has a successor by now
            raise PullError(
                "refused",
                f"order of process {instance or '(unnamed)'}, but this server was claimed by "
                f"{self._owner or 'nobody'}",
            )
        mode = str(order["mode"])
        if mode == "auto" and self._device.type == "cpu":
            mode = "checkpoint"  # CPU kernels keep weights packed: their parameters are others
        pulled = self._from_file if order["channel"] == "file" else self._from_link
        target.touched = self._touched
        try:
            try:
                received = pulled(order, mode, target, until_s)
            finally:
                target.settle()
        finally:
            self._touched = target.touched
        return asdict(received) | {
            "weight_hash": order["weight_hash"],
            "policy_version": order["policy_version"],
        }

    def _from_link(self, order: Report, mode: str, target: ModelTarget, until_s: float) -> Received:
        address = Address(
            address=order["address"],
            backend=order["channel"],
            receiver=order["receiver"],
            key=order["key"],
            epoch=order["epoch"],
            rank=self._rank,
            ranks=self._ranks,
        )
        receiver = self._receiver
        if receiver is None or (receiver.address, receiver.mode) != (address, mode):
            self.close()
            receiver = Receiver(address, self._device, engine=self._engine, mode=mode)
            self._receiver = receiver
        return receiver.receive(order["policy_version"], target, until_s)

    def _from_file(self, order: Report, mode: str, target: ModelTarget, until_s: float) -> Received:
        started_s = time.monotonic()
        tensors = read(Path(order["address"]), order["weight_hash"])
        if time.monotonic() > until_s:
            raise PullError("deadline", f"{order['address']} was not read in time")
        sources, targets = rows_of(tensors), rows_of(target.tensors)
        part_of = dict(make_plan(sources, targets, mode=mode, rank=self._rank, ranks=self._ranks))
        target.expect(list(part_of))
        target.touched = True
        for batch in batches(list(part_of)):
            buffers = [target.buffer(piece) for piece in batch]
            for piece, buffer in zip(batch, buffers, strict=True):
                whole = part_of[piece].cut(tensors[part_of[piece].name])
                run = whole.to(getattr(torch, piece.dtype)).contiguous().view(-1)
                buffer.copy_(run.view(torch.uint8))
            target.took(batch, buffers)
        target.synchronize()
        target.check_filled()
        target.touched = False
        return Received(
            num_bytes=sum(piece.num_bytes for piece in part_of),
            checksum=order["weight_hash"][:16],
            receive_s=time.monotonic() - started_s,
            join_s=0.0,
        )

    def _report(self, order: Report, report: Report) -> None:
        """Send the report to the listener; if that is closed, only the worker loses."""
        if not order.get("report_to"):
            return
        until_s = time.monotonic() + REPORT_S
        hello = Hello(receiver=str(order["order"]), rank=self._rank, epoch=0, purpose="report")
        with contextlib.suppress(PullError):
            listener = dial(str(order["report_to"]), until_s)
            try:
                introduce(listener, hello, str(order["report_key"]), until_s)
                listener.send({"type": "report", "report": report})
            finally:
                listener.close()


def _read(text: str) -> Report:
    try:
        order = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise PullError("refused", f"an order that is no JSON: {err}") from err
    if not isinstance(order, dict) or order.get("rlstreams") != PROTOCOL:
        raise PullError("refused", f"no order of version {PROTOCOL}: {text[:80]!r}")
    for name, known in (("kind", KINDS), ("mode", MODES)):
        if order.get(name) not in known:
            raise PullError("refused", f"{name} is {order.get(name)!r}, not one of {known}")
    return order
