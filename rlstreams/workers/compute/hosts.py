"""Ranks on other hosts, as the trainer asks for them: one connection for each.

Both ends prove that they know the run's secret, as on the weight links, and compare versions and
model in JSON. Only then is the connection the `Link` of a follower, which carries pickles: a
stranger's bytes are never unpickled. Proven, not encrypted: hosts belong on a private network.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.secrets import resolve_secret
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop.host import commit, version_of
from rlstreams.workers.model.base import RankLostError
from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.link.frames import Connection, dial
from rlstreams.workers.weights.link.handshake import Hello, introduce, receiver_key

REACH_S = 120.0  # until all hosts have given their ranks: a host may still be starting
PROVE_S = 5.0
ANSWER_S = 60.0  # a host imports torch to count its GPUs
RECEIVER = "ranks"  # name of the receiver whose key both ends prove to know
_TRY_EVERY_S = 0.5
_DIAL_S = 5.0
_LIBRARIES = ("rlstreams", "torch", "transformers", "megatron-core", "numpy")
_ENDS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The other hosts, and the facts that each of them is asked to match."""

    addresses: Sequence[str]  # host:port, where a `RankServer` listens
    ranks: int  # number of ranks of each host
    secret: str
    device: str
    versions: Mapping[str, str]
    model: str  # `fingerprint` of the model's folder


def hosts_of(config: RunConfig, device: str, folder: Path) -> Hosts | None:
    """The other hosts that `trainer.hosts` names; None: there are none.

    Raises:
        ConfigError: as `fingerprint`.
    """
    if not config.trainer.hosts:
        return None
    return Hosts(
        addresses=config.trainer.hosts,
        ranks=config.trainer.ranks_here,
        secret=resolve_secret(config.weights.secret, "weights.secret"),
        device=device,
        versions=versions(),
        model=fingerprint(folder),
    )


def versions() -> dict[str, str]:
    """Versions that all ranks must share: the bits of a step, and pickles, depend on them."""
    found = {name: version_of(name) for name in _LIBRARIES}
    return {"python": platform.python_version(), "commit": commit(), **found}


def fingerprint(folder: Path) -> str:
    """Hash of a model's shape and weights: each file's size and last bytes stand for all of it.

    Raises:
        ConfigError: there is no model.
    """
    try:
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        for file in sorted(folder.glob("*.safetensors")):
            with file.open("rb") as opened:
                size = opened.seek(0, os.SEEK_END)
                digest.update(f"{file.name} {size}".encode())
                opened.seek(max(0, size - _ENDS_BYTES))
                digest.update(opened.read())
    except OSError as err:
        raise ConfigError(f"model.path is {str(folder)!r}, which is no model: {err}") from err
    return digest.hexdigest()


def reach(hosts: Hosts, reach_s: float = REACH_S) -> list[socket.socket]:
    """A connection to a new follower for each rank, in the order of the hosts.

    Raises:
        ConfigError: a host refuses; names the host and its reason.
        RankLostError: a host has not given its ranks in time.
    """
    until_s = time.monotonic() + reach_s
    found: list[socket.socket] = []
    try:
        for address in hosts.addresses:
            found += [_rank(hosts, address, n, until_s, reach_s) for n in range(hosts.ranks)]
    except BaseException:
        for end in found:
            end.close()
        raise
    return found


def _rank(hosts: Hosts, address: str, number: int, until_s: float, reach_s: float) -> socket.socket:
    while True:
        try:
            link = dial(address, min(until_s, time.monotonic() + _DIAL_S))
            try:
                return _asked(hosts, link, number)
            except BaseException:
                link.close()
                raise
        except PullError as err:
            if err.kind == "refused":
                raise ConfigError(f"trainer.hosts names {address!r}, which refuses: {err}") from err
            if time.monotonic() > until_s:
                raise RankLostError(
                    f"trainer.hosts names {address!r}, which gave no rank within {reach_s:g} s: "
                    f"{err}; does `rlstreams worker ranks` run there?"
                ) from err
        time.sleep(_TRY_EVERY_S)


def _asked(hosts: Hosts, link: Connection, number: int) -> socket.socket:
    """
    Raises:
        PullError: of kind `refused` if asking again is no use; else another try may succeed.
    """
    hello = Hello(receiver=RECEIVER, rank=number, epoch=0, purpose="rank")
    introduce(link, hello, receiver_key(hosts.secret, RECEIVER), time.monotonic() + PROVE_S)
    link.send({name: value for name, value in asdict(hosts).items() if name != "secret"})
    answer = link.receive(time.monotonic() + ANSWER_S)
    if answer.get("type") != "begun":
        raise PullError(str(answer.get("kind")), str(answer.get("error")))
    return link.detach()
