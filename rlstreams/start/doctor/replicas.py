"""Whether each partition has the copies it is to have: a broker that is down, or too few of them.

The two want opposite cures. A broker that holds copies and does not answer is to be started; only
where no broker is missing is the configuration the thing to change. Looks only.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlstreams.start.doctor.check import Check, fail, ok, warn
from rlstreams.streams.kafka.facts import BrokerFacts
from rlstreams.streams.log.topics import TOPICS
from rlstreams.workers.config.run import RunConfig

_NAME = "replicas"
_SHOWN = 3  # partitions that a sentence names


def replication_check(facts: BrokerFacts, config: RunConfig) -> Check:
    """Enough brokers for the replicas that are wanted, and all copies where they belong."""
    wanted = config.broker.replication
    found = f"broker.replication is {wanted}"
    run = config.run.id
    down = facts.assigned - facts.brokers
    if wanted > facts.num_brokers:  # before the run has topics; else a node may be gone on purpose
        down |= facts.fenced
    weak = [f"{run}.{name}" for name in _lacking(facts, to_write=True)]
    if down:
        return _down(facts, found, weak, sorted(down))
    if wanted > facts.num_brokers:
        return fail(
            _NAME, f"{found}, brokers are {facts.num_brokers}",
            "start as many brokers, or lower broker.replication",
        )  # fmt: skip
    if weak:
        return fail(_NAME, f"{found}; {_refused(weak)}", "wait until their brokers have caught up")
    if behind := [f"{run}.{name}" for name in _lacking(facts, to_write=False)]:
        return warn(
            _NAME, f"{found}; copies that are not in sync: {_some(behind)}",
            "wait until their brokers have caught up; till then fewer losses are survived",
        )  # fmt: skip
    if wanted == 1:
        return ok(_NAME, f"{found}: survives killed processes, not a lost disk")
    return ok(_NAME, found)


def _down(facts: BrokerFacts, found: str, weak: list[str], down: list[int]) -> Check:
    every = sorted(facts.brokers | set(down))
    names = _numbers(down)
    found = f"{found}; of the brokers {_numbers(every)} there is no answer from {names}"
    if weak:
        return fail(_NAME, f"{found}; {_refused(weak)}", f"start broker {names}")
    if len(facts.topics) < len(TOPICS):
        return fail(
            _NAME, f"{found}, and not all topics of the run exist",
            f"start broker {names}: on fewer brokers than copies no topic can be created",
        )  # fmt: skip
    return warn(
        _NAME, f"{found}; what is left takes all writes",
        f"start broker {names} before another one is lost; leave broker.replication as it is",
    )  # fmt: skip


def _lacking(facts: BrokerFacts, *, to_write: bool) -> Iterable[str]:
    """Partitions with fewer copies in sync than writing needs, or else than are assigned."""
    for name, topic in facts.topics.items():
        least = int(topic.settings.get("min.insync.replicas", 1))
        for number, copies in topic.copies.items():
            needed = min(least, len(copies.assigned)) if to_write else len(copies.assigned)
            if len(copies.in_sync) < needed:
                yield f"{name}[{number}]"


def _refused(weak: list[str]) -> str:
    return f"fewer copies in sync than min.insync.replicas, so writes are refused: {_some(weak)}"


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def _numbers(nodes: list[int]) -> str:
    return ", ".join(map(str, nodes))
