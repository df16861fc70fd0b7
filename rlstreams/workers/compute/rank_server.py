"""The rank server, which gives a trainer on another host ranks here: `rlstreams worker ranks`.

It listens on one address, starts a follower for each connection that a trainer opens, and ends the
follower with the connection. It holds no model and outlives its trainers: the next one asks again.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.secrets import resolve_secret
from rlstreams.workers.compute.hosts import (
    PROVE_S,
    RECEIVER,
    fingerprint,
    versions,
)
from rlstreams.workers.compute.link import PROGRAM, start_follower
from rlstreams.workers.config.hub import model_folder
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.host import host_name
from rlstreams.workers.loop.log import Log, get
from rlstreams.workers.model.base import CPU
from rlstreams.workers.model.device import visible_gpus
from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.link.frames import Connection
from rlstreams.workers.weights.link.handshake import admit, receiver_key
from rlstreams.workers.weights.listening import LinkServer

_LOOK_EVERY_MS = 100  # whether a follower or its trainer has ended
_RDHUP = getattr(select, "POLLRDHUP", 0)  # Linux


def make_rank_server(config: RunConfig, ordinal: int, instance: str) -> RankServer:
    """The rank server of entry `ordinal` of `trainer.hosts`.

    Raises:
        ConfigError: there is no such entry, or this host cannot listen on its address.
    """
    hosts = config.trainer.hosts
    if not hosts:
        raise ConfigError(
            "trainer.hosts is empty: it names this host, as host:port, in the configuration that "
            "the trainer has too"
        )
    if ordinal >= len(hosts):
        raise ConfigError(
            f"--ordinal is {ordinal}, but trainer.hosts has {len(hosts)}, counted from 0"
        )
    secret, folder = (
        resolve_secret(config.weights.secret, "weights.secret"),
        model_folder(config.model.path),
    )
    log = get("ranks", f"ranks-{ordinal}", instance)
    try:
        server = RankServer(hosts[ordinal], secret, folder, log)
    except OSError as err:
        raise ConfigError(
            f"trainer.hosts names {hosts[ordinal]!r}, on which this host cannot listen: {err}; "
            "--ordinal says which of them this one is"
        ) from err
    log.info("ranks_served", address=server.address)
    return server


class RankServer:
    """Listens until the process ends. Each connection has a thread, which watches its follower."""

    def __init__(
        self, address: str, secret: str, folder: Path, log: Log, *, program: str = PROGRAM
    ) -> None:
        """
        Args:
            address: host:port; port 0 takes any free port.
            folder: the model's folder on this host.

        Raises:
            OSError: no such address here, or the port is taken.
            ValueError: no secret.
        """
        if not secret:
            raise ValueError("the secret of the ranks is empty")
        self._key = receiver_key(secret, RECEIVER)
        self._folder, self._log, self._program = folder, log, program
        self.processes: dict[int, int] = {}  # by rank, the follower's process id; 0: starting
        self._taking = threading.Lock()
        host, _, port = address.rpartition(":")
        self._links = LinkServer(host, self._serve, "ranks", int(port))
        self.address = self._links.address

    def close(self) -> None:
        """Accept no further connection; idempotent."""
        self._links.close()

    def _serve(self, link: Connection) -> None:
        try:
            hello = admit(link, 0, lambda _: self._key, time.monotonic() + PROVE_S)
            asked = link.receive(time.monotonic() + PROVE_S)
            gpus = visible_gpus() if asked["device"] != CPU else [""] * int(asked["ranks"])
            if problem := self._problem(asked, len(gpus)):
                self._log.warning("rank_refused", trainer=link.peer, why=problem)
                link.send({"kind": "refused", "error": f"host {host_name()}: {problem}"})
                return
            with self._taking:
                is_free = hello.rank not in self.processes
                self.processes.setdefault(hello.rank, 0)
            if not is_free:
                link.send({"kind": "busy", "error": "it serves another trainer"})
                return
            try:
                link.send({"type": "begun"})
                self._follow(link, hello.rank, gpus[hello.rank])
            finally:
                del self.processes[hello.rank]
        except PullError as err:
            self._log.warning("rank_refused", trainer=link.peer, why=str(err))

    def _problem(self, asked: Mapping[str, Any], num_gpus: int) -> str:
        """Reason why this host cannot give such a rank; "": it can."""
        ours, theirs = versions(), asked["versions"]
        other = [
            f"{name} is {ours.get(name)} here and {value} at the trainer"
            for name, value in theirs.items()
            # An installed package may not know its commit: then it is not compared.
            if ours.get(name) != value and (name != "commit" or (ours[name] and value))
        ]
        if other:
            return "; ".join(other)
        if num_gpus < asked["ranks"]:
            return f"the trainer asks for {asked['ranks']} ranks, and {num_gpus} GPUs are visible"
        try:
            here = fingerprint(self._folder)
        except ConfigError as err:
            return str(err)
        if here != asked["model"]:
            return (
                f"the model in {str(self._folder)!r} has fingerprint {here[:12]}, that of the "
                f"trainer {asked['model'][:12]}"
            )
        return ""

    def _follow(self, link: Connection, number: int, gpu: str) -> None:
        """Run a follower from its start to its end."""
        end = link.detach()
        child = start_follower(end, gpu, str(self._folder), program=self._program)
        self.processes[number] = child.pid
        facts = {"trainer": link.peer, "number": number, "process": child.pid, "gpu": gpu}
        self._log.info("rank_begun", **facts)
        poller = select.poll()
        poller.register(end, _RDHUP)  # also an error or both ends closed, which need no request
        while child.poll() is None and not poller.poll(_LOOK_EVERY_MS):
            pass
        is_trainer_gone = child.poll() is None
        status = child.end()  # stopped or not
        self._log.info("rank_ended", **facts, status=status, with_trainer=is_trainer_gone)
