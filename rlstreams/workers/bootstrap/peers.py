"""Settles the transaction of a peer that joined by itself, died in a commit and does not come back.

Its transaction stands open and hides what others write behind it: their reports too, so no
heartbeat shows its death, and the broker ends it after 30 s. Nobody starts that name again, as
`up` or a unit file does with those that a configuration counts. So each worker asks the broker
which transactions of its own role stand too long, and starts a producer of that name, which is how
Kafka ends a predecessor's (decision 0092).

One that is only slow is fenced by it, as by any successor: its next commit fails, it ends with
status 75, and its keeper starts it again. Others do its uncommitted work again.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import FencedError, StreamsError
from rlstreams.streams.workers import JOINED_FROM
from rlstreams.workers.bootstrap.parts import bootstrap_of, client_options
from rlstreams.workers.loop.context import Context

# A commit takes well under a second; one of 256 MB, the most that a worker has in hand, a few.
STANDS_S = 10.0
LOOK_S = 5.0  # each look is a connection of its own
# Peers that saw the same look again at different times: the first settles it. So the name is not
# taken from a process that was given it since, but for the moment between that look and the start.
APART_S = 1.0


def abandoned(standing: Sequence[str], run: str, role: str, own: str) -> list[str]:
    """Transactional ids of other workers of this role that joined by themselves, without their
    prefix.

    Args:
        standing: ids with their prefix.
        own: this worker's id.
    """
    found = []
    for name in standing:
        short = name.removeprefix(f"{run}.")
        number = short.removeprefix(f"{role}.")
        is_one = short == f"{role}.{number}" and name == f"{run}.{short}" and number.isdecimal()
        if is_one and int(number) >= JOINED_FROM and short != own:
            found.append(short)
    return found


def settle(
    bus: Bus,
    look: Callable[[], Sequence[str]],
    note: Callable[[str], None],
    wait: Callable[[float], bool],
) -> None:
    """Look once, and settle transactions that stand.

    Args:
        look: transactional ids that are to be settled now.
        note: called with each id.
        wait: waits so many seconds; True: this worker ends.

    Raises:
        BrokerError: the broker cannot be reached, or refused.
    """
    seen = look()
    if not seen or wait(random.uniform(0.0, APART_S)):
        return
    for name in set(seen).intersection(look()):
        try:
            bus.producer(name).close()
        except FencedError:
            continue  # another peer, or its successor, at the same time
        note(name)


@contextmanager
def peers_settled(context: Context) -> Iterator[None]:
    """Settle peers during the block, in a thread of its own: a broker that is away holds up no
    other work."""
    config, ended = context.config, threading.Event()
    run, role, log = config.run.id, context.role, context.log
    options = client_options(config)

    def look() -> Sequence[str]:
        from rlstreams.streams.kafka.open_transactions import standing  # not while the role starts

        found = standing(bootstrap_of(config), f"{run}.{role}.", options, older_than_s=STANDS_S)
        return abandoned(found, run, role, context.transactional_id)

    def note(name: str) -> None:
        log.warning("peer_settled", who=name, why=f"its transaction stood for {STANDS_S:g} s")

    def watch() -> None:
        refused = ""
        while not ended.wait(LOOK_S):
            try:
                settle(context.bus, look, note, ended.wait)
            except StreamsError as err:
                if refused != (refused := type(err).__name__):
                    log.info("peers_unknown", why=str(err))

    thread = threading.Thread(target=watch, name="peers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
